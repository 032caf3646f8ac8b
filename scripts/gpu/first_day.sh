#!/usr/bin/env bash
# The first day on a host with an NVIDIA GPU: scripts/gpu/first_day.sh [--dry] [FOLDER [STEP...]]
#
# Driver and virtual memory, page rates, one engine, one in FP8, idle overhead, update in place, two engines in one pool, sleep
# and wake, TP 2, co-serving, MPS: in this order, each a process with a time limit of its own; one that fails, hangs or lacks
# something keeps no other from running. Into FOLDER (default: docs/results/gpu/HOST-DATE) go, as each step ends, NAME.log, NAME.err and a
# line of steps.jsonl: {"step", "state": "ok", "failed" or "left out", "seconds", "why", "result"}. The exit code is the number
# of steps that failed. What is tested beside that, and what needs no vLLM: scripts/gpu/suite.sh.
#
#   --dry           without a GPU: the same steps, small, on stand-ins and vLLM's CPU build
#   PYTHON=python   whose packages are used
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2

python=${PYTHON:-python}
dry=()
if [ "${1:-}" = --dry ]; then
    dry=(--dry)
    shift
fi
folder=${1:-docs/results/gpu/$(hostname)-$(date -u +%Y%m%d)}
shift || true
wanted=" $* "
failed=0
probe=(-m scripts.bench.probes.vllm.first_day_probe)

steps=$("$python" "${probe[@]}") || exit 2
for name in $wanted; do
    grep -q "^$name " <<<"$steps" || {
        printf '%s is no step: %s\n' "$name" "$(cut -d' ' -f1 <<<"$steps" | tr '\n' ' ')" >&2
        exit 2
    }
done
if [ ${#dry[@]} -eq 0 ] && ! "$python" -c 'import sys; from orchestrator.ops.nvidia_driver import find_gpus; sys.exit(find_gpus().missing)'; then
    echo "nothing was run; --dry needs no GPU" >&2
    exit 2
fi
mkdir -p "$folder" || exit 2

while read -r name limit; do
    [[ $wanted == "  " || $wanted == *" $name "* ]] || continue
    begun=$SECONDS
    timeout --kill-after=10 "$limit" "$python" "${probe[@]}" "$name" "${dry[@]}" >"$folder/$name.log" 2>"$folder/$name.err" </dev/null
    code=$?
    case $code in
        0) state=ok why= ;;
        3) state="left out" why="needs $(tail -n 1 "$folder/$name.err")" ;;
        124 | 137) state=failed why="took longer than $limit s" ;;
        *) state=failed why="exit code $code: $(tail -n 1 "$folder/$name.err")" ;;
    esac
    state=$("$python" - "$folder/$name.log" "$name" "$state" $((SECONDS - begun)) "$why" "$folder/steps.jsonl" <<'PYTHON'
import json, sys

log, step, state, seconds, why, steps = sys.argv[1:]
result = None
if state == "ok":  # an engine may log something after what its probe prints
    with open(log, encoding="utf-8", errors="replace") as file:
        lines = [line for line in file.read().splitlines() if line.startswith("{")]
    try:
        result = json.loads(lines[-1])
    except (IndexError, ValueError):
        state, why = "failed", "it printed no result"
with open(steps, "a", encoding="utf-8") as file:
    print(json.dumps({"step": step, "state": state, "seconds": int(seconds), "why": why[:300], "result": result}), file=file)
print(state)
PYTHON
    )
    [ "$state" = ok ] || [ "$state" = "left out" ] || failed=$((failed + 1))
    printf '%-9s %-9s %4s s  %s\n' "$state" "$name" $((SECONDS - begun)) "${why:0:150}"
done <<<"$steps"
exit "$failed"
