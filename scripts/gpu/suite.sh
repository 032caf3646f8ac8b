#!/usr/bin/env bash
# What needs an NVIDIA GPU, on a host that has one: scripts/gpu/suite.sh [FOLDER]
#
# Uses the Python of $PYTHON (default: python) with stock vLLM and Megatron-Core for CUDA beside this checkout, installs
# nothing, and writes one log and one JSON a part into FOLDER (default: docs/results/gpu/HOST-DATE). A part that fails
# does not keep the others from running; the exit code is the number of parts that failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=${PYTHON:-python}
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())') || exit 2
if [ "$gpus" -eq 0 ]; then
    echo "no CUDA device: nothing was run (the same tests are skipped, and reported so, by make test-gpu)" >&2
    exit 2
fi
folder=${1:-docs/results/gpu/$(hostname)-$(date -u +%Y%m%d)}
mkdir -p "$folder"
failed=0

part() { # part NAME COMMAND...: output to NAME.log, its last line too, which is JSON where the part prints some
    local name=$1 begun=$SECONDS
    shift
    if "$@" >"$folder/$name.log" 2>"$folder/$name.err"; then
        echo "ok      $name  $((SECONDS - begun)) s"
    else
        echo "FAILED  $name  $((SECONDS - begun)) s, see $folder/$name.err"
        failed=$((failed + 1))
    fi
}

nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv >"$folder/gpus.csv"
"$python" -m pip list --format=freeze 2>/dev/null | grep -iE '^(torch|vllm|megatron|triton|transformer|flash)' >"$folder/versions.txt"

worlds=1
[ "$gpus" -ge 2 ] && worlds=1,2
[ "$gpus" -ge 4 ] && worlds=1,2,4

part marked "$python" -m pytest -m gpu -rs --timeout=600 --ignore=tests/test_kvpool_gpu.py tests
# The tests of one rank take whatever device there is; those of several ranks need a GPU each.
part megatron "$python" -m pytest -rs --timeout=600 tests/test_megatron_stream.py tests/test_megatron_objective.py \
    tests/test_megatron_critic.py tests/test_megatron_trainer.py tests/test_megatron_trainer_stream.py -k "not ranks and not layout"
part equality "$python" -m megatron_rlplugin.equality_probe --worlds "$worlds" --steps 20
part export "$python" -m megatron_rlplugin.export_probe --hidden 1024 --layers 8
part colocation "$python" -m pytest -rs --timeout=600 tests/test_colocation_residency.py tests/test_colocation_engine.py
part judge "$python" -m pytest -rs --timeout=600 tests/test_judge_streamed.py tests/test_mps.py
# One pool of KV pages for two engines; -rP shows the figures that its tests print.
part kvpool "$python" -m pytest -rsP --timeout=900 tests/test_kvpool_gpu.py
part kv-remap "$python" -m orchestrator.cli bench kv-remap --json

exit "$failed"
