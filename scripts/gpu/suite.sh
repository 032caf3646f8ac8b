#!/usr/bin/env bash
# What needs an NVIDIA GPU, on a host that has one: scripts/gpu/suite.sh [FOLDER [PART...]]
#
#   SUITE_SECONDS=1500   of all parts together; what does not fit any more is left out, and said
#   PYTHON=python        whose packages are used: CUDA's PyTorch and Triton at least; vLLM, Megatron-Core and this package's
#                        own dependencies where they are there. Nothing is installed and nothing is fetched
#   SUITE_CHECK=1        no GPU: only whether each part's program starts and its tests can be collected
#
# The parts stand in the order of their worth: what needs PyTorch alone and is over in minutes comes first, engines next, the
# trainer last. Each has a time limit of its own. Into FOLDER (default: docs/results/gpu/HOST-DATE) go, as each part ends, its
# line in parts.tsv (part, state, seconds, why), NAME.log, NAME.err, and NAME.json where its last line is JSON: a machine that
# is taken away half-way leaves what was done. A part that fails, hangs or lacks a package does not keep the others from
# running. The exit code is the number of parts that failed; parts that lack something do not count.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2

python=${PYTHON:-python}
budget=${SUITE_SECONDS:-1500}
check=${SUITE_CHECK:-}
least=$((budget / 100 + 1)) # seconds that a part is begun with
folder=${1:-docs/results/gpu/$(hostname)-$(date -u +%Y%m%d)}
shift || true
wanted=" $* "
failed=0

gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())') || {
    echo "$python has no PyTorch: nothing was run" >&2
    exit 2
}
if [ "$gpus" -eq 0 ] && [ -z "$check" ]; then
    echo "no CUDA device: nothing was run (the same tests are skipped, and reported so, by make test-gpu)" >&2
    exit 2
fi
mkdir -p "$folder" || exit 2

say() { # say NAME STATE SECONDS WHY: one line of the result, now
    printf '%s\t%s\t%s\t%s\n' "$@" >>"$folder/parts.tsv"
    printf '%-9s %-14s %4s s  %s\n' "$2" "$1" "$3" "$4"
}

lacks() { # lacks NEED...: the first that is not there; a need is a Python package, "native" or "gpus:N"
    local need
    for need in "$@"; do
        case $need in
            native) ls vllm_rlplugin/kvpool/ledger/_pages*.so >/dev/null 2>&1 || installed_native || echo "the native library" ;;
            gpus:*) [ "$gpus" -ge "${need#gpus:}" ] || echo "${need#gpus:} GPUs" ;;
            *) "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$need') is None)" || echo "$need" ;;
        esac
    done | head -n 1
}

installed_native() {
    "$python" -c 'from vllm_rlplugin.kvpool.ledger import native_pages; native_pages.library()' >/dev/null 2>&1
}

part() { # part NAME SECONDS "NEED..." COMMAND...
    local name=$1 limit=$2 needs=$3 begun=$SECONDS left=$((budget - SECONDS)) code missing
    shift 3
    [[ $wanted == "  " || $wanted == *" $name "* ]] || return 0
    # shellcheck disable=SC2086  # needs are words
    missing=$(lacks $needs)
    if [ -n "$missing" ] && [ -z "$check" ]; then
        say "$name" "left out" 0 "needs $missing"
        return 0
    fi
    if [ "$left" -lt "$least" ]; then
        say "$name" "left out" 0 "no time left of $budget s"
        return 0
    fi
    [ "$limit" -lt "$left" ] || limit=$left
    if [ -n "$check" ]; then
        limit=$left # a busy machine without a GPU
        case " $* " in
            *" -m pytest "*) set -- "$@" --collect-only ;;
            *) set -- "$1" "$2" "$3" --help ;;
        esac
    fi
    timeout --kill-after=10 "$limit" "$@" >"$folder/$name.log" 2>"$folder/$name.err" </dev/null
    code=$?
    tail -n 1 "$folder/$name.log" | grep '^{.*}$' >"$folder/$name.json" || rm -f "$folder/$name.json"
    if [ "$code" -eq 0 ]; then
        say "$name" ok $((SECONDS - begun)) ""
    elif [ "$code" -eq 124 ] || [ "$code" -eq 137 ]; then
        say "$name" FAILED $((SECONDS - begun)) "took longer than $limit s"
        failed=$((failed + 1))
    else
        say "$name" FAILED $((SECONDS - begun)) "exit code $code: $(tail -n 1 "$folder/$name.err" | cut -c1-150)"
        failed=$((failed + 1))
    fi
}

tests() { # tests NAME SECONDS "NEED..." PYTEST-ARGUMENTS...
    local name=$1 limit=$2 needs=$3
    shift 3
    part "$name" "$limit" "pytest pytest_timeout $needs" "$python" -m pytest -p no:cacheprovider -rsP --timeout=300 "$@"
}

# A checkout that was not installed: its patches and its native library are not in their packages yet.
linked=()
for plugin in vllm megatron; do
    if ! "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('${plugin}_rlplugin.patches') is None)"; then
        ln -sfn "../patches/$plugin" "${plugin}_rlplugin/patches" && linked+=("${plugin}_rlplugin/patches")
    fi
done
trap '[ ${#linked[@]} -eq 0 ] || rm -f "${linked[@]}"' EXIT
if [ -n "$(lacks native)" ]; then
    timeout 120 "$python" setup.py -q build_ext --inplace >"$folder/build.log" 2>&1 || echo "no native library: $folder/build.log"
fi

nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv >"$folder/gpus.csv" 2>&1 || true
"$python" - >"$folder/versions.txt" <<'PYTHON' || true
from importlib.metadata import distributions

for found in sorted({f"{item.metadata['Name']}=={item.version}" for item in distributions()}, key=str.lower):
    if found.lower().startswith(("torch", "vllm", "megatron", "triton", "transformer", "flash", "numpy", "nvidia-nccl", "kvcached")):
        print(found)
PYTHON

worlds=1
[ "$gpus" -ge 2 ] && worlds=1,2
[ "$gpus" -ge 4 ] && worlds=1,2,4

# PyTorch, Triton and the driver alone: five minutes at most, and the figures that have bars (ROSE 4.1: 1 GiB in 5 ms).
part remap 90 "native" "$python" -m scripts.bench.probes.vllm.remap_probe --mib 1024 --rounds 20 --kind kept
part remap-created 90 "native" "$python" -m scripts.bench.probes.vllm.remap_probe --mib 1024 --rounds 20 --kind created
tests pages 180 "native" tests/kvpool/test_gpu.py -m "not engine"
tests digests 60 "" tests/vllm/test_digests.py -m gpu

# Engines: what nobody saw on a GPU yet. -rP shows the figures that tests print.
tests engines 420 "native vllm pydantic transformers" tests/kvpool/test_gpu.py -m engine
tests pinned 90 "vllm" tests/vllm/test_checkpoint_mapping.py -m gpu
tests activation-tiny 180 "native vllm pydantic transformers" tests/vllm/test_activation_gpu.py
part activation 240 "native vllm pydantic transformers" "$python" -m scripts.bench.probes.vllm.activation_probe --model 8b
part activation-32b 300 "native vllm pydantic transformers" "$python" -m scripts.bench.probes.vllm.activation_probe --model 32b --rounds 1
tests mps 90 "pydantic aiohttp" tests/ops/test_mps.py -m gpu
tests collective 90 "vllm gpus:2" tests/megatron/test_collective_sender.py tests/megatron/test_stock_sender.py -m gpu
tests judge 240 "vllm pydantic" tests/rewards/test_streamed_model.py

# The trainer. The tests of one rank take whatever device there is; those of several ranks need a GPU each.
tests stream 120 "megatron" tests/megatron/test_gradient_stream.py -m gpu
part equality 240 "megatron" "$python" -m scripts.bench.probes.megatron.equality_probe --worlds "$worlds" --steps 20
part export 120 "megatron" "$python" -m scripts.bench.probes.megatron.export_probe --hidden 1024 --layers 8
tests colocation 240 "megatron vllm pydantic" tests/colocation/test_memory_residency.py tests/colocation/test_handover_engine.py
tests megatron 420 "megatron pydantic" tests/megatron/test_policy_loss.py tests/megatron/test_critic.py \
    tests/megatron/test_trainer.py tests/megatron/test_gradient_stream.py tests/megatron/test_trainer_stream.py \
    tests/megatron/test_rank_publisher.py -k "not ranks and not layout"
part kv-remap 120 "native pydantic" "$python" -m orchestrator.cli bench kv-remap --json

exit "$failed"
