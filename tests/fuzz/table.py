"""All harnesses, and the page that lists them."""

from __future__ import annotations

from tests.fuzz import machine_files, messages, run_files, texts, weights  # noqa: F401 -- each enters its harnesses
from tests.fuzz.harness import HARNESSES, ROOT, Harness
from tests.fuzz.native import NATIVE, NativeHarness

PAGE = ROOT / "docs" / "fuzzing.md"

_HEAD = """\
# What is parsed, and what fuzzes it

Every parser of bytes from outside has a harness: what it reads, what it refuses with, and the property that holds for
every input. All hold one more: an answer within two seconds of processor time and 10 microseconds a byte, and 64 MiB.
Valid artefacts are damaged (bits flipped, cut, spliced, with checksums made to fit) or altered as trees (fields gone,
of another type, huge, NaN, nested 100,000 deep); the C libraries run under the address and undefined-behaviour
sanitizers, with libFuzzer where clang is installed.

```sh
# needs: minutes
python -m tests.fuzz                                   # each for FUZZ_MINUTES (2); one harness: its name
python -m tests.fuzz --page                            # writes this page
```

`make test` replays the corpora (`tests/fuzz/corpora`, one input a line, with why it is there); `make test-long`
fuzzes each for `FUZZ_MINUTES`. An input that fails is printed as a line for its corpus. How much has run, and what it
found: [results](results/README.md). Most parsers are small: `python -m tests.fuzz --reach 1000 --out FILE` says which
input was the first to reach each line that they reach at all, and for most of them no later one than the first few
hundred is. More minutes try more combinations there, not more code; a new kind of input finds more.

| harness | what reads | refused as | what holds |
| --- | --- | --- | --- |
"""

_TAIL = """
## What has none

| what | why |
| --- | --- |
| metrics of engines | nobody parses their text: a served worker says how it is over the control endpoints (`server-answer`) |
| answers of Redis and object stores | their own clients read them; the values: `shared-record`, `bucket` |
| other answers of the Kubernetes API than those about pods | its own client reads them; pods: `pod-list` |
| HTTP itself: request lines, chunks, header lines | aiohttp's and uvicorn's; what we read of headers is `http-headers` |
| tokenizers, `torch.load` with `weights_only` | of the model that a run was given, read by transformers and torch |
| what NCCL, gloo and Mooncake speak among themselves | theirs; no parser of ours |

What no check can see: a changed digit within a line of the journal that leaves it a possible history (lines have
numbers, not checksums; a missing or repeated line is seen), and changed statistics in a Parquet footer (pages have
checksums). The mutex in a pool's file is not damaged: the C library trusts it, and so must whoever shares that file.
"""


# Product files that call what makes values of bytes, and are in no harness: who wrote those bytes. A file that begins to do so is
# entered here, or gets a harness (tests/fuzz/test_fuzz.py).
_OWN = "a process that the run started, with our code alone, over a pipe that nobody else has"
_WRITTEN = "the same process, a moment before"
_VERIFIED = "numbers without a form, of a size that is known, from bytes that were verified"
OURS = {
    "megatron_rlplugin/memory/planned_step.py": _OWN,
    "megatron_rlplugin/memory/trainer_plan.py": _OWN,
    "orchestrator/cli.py": _WRITTEN,
    "orchestrator/observe/run_view.py": _OWN,
    "orchestrator/observe/trajectory_reader.py": "lines of `events`; those of turns are read by `turns`",
    "orchestrator/observe/view/view_commands.py": _WRITTEN,
    "orchestrator/ops/cost.py": _WRITTEN,
    "orchestrator/placement/predictor_service.py": "the run, over a pipe that nobody else has",
    "orchestrator/rewards/function_process.py": "the host of functions, which has parsed what it was sent: `function-host`",
    "orchestrator/rewards/host_launch.py": _OWN,
    "orchestrator/runtime/changed_config.py": _WRITTEN,
    "orchestrator/runtime/judge_setup.py": "whether a judge's config.json is JSON, by the parser of `json-text`",
    "orchestrator/runtime/real_run.py": "a model's config.json, which `model-config` has read before",
    "orchestrator/runtime/record_writer.py": _OWN,
    "orchestrator/runtime/shard_objects.py": _VERIFIED,
    "orchestrator/runtime/shard_process.py": _OWN,
    "orchestrator/sandbox/run.py": "bubblewrap, over a pipe that is closed inside",
    "orchestrator/sandbox/spawn.py": "the run, over a socket that nobody else has",
    "orchestrator/shards/sample_references.py": "the run, to the processes of its trainer",
    "orchestrator/shards/trajectory_shard.py": "a process of the run; read when the digest fits, which `checkpoint` looks at",
    "orchestrator/sim/coserving/serving_cluster.py": "files of this repository",
    "orchestrator/sim/paper_setups.py": "files of this repository",
    "orchestrator/sim/simulated_run.py": _WRITTEN,
    "orchestrator/sim/twins.py": _WRITTEN,
    "orchestrator/tasks/dataset.py": "prompts of its own, made of rows that `data-file` reads",
    "orchestrator/tasks/dataset_rewards.py": "the same, in the function's process",
    "orchestrator/tasks/reasoning_gym.py": "options of a config",
    "orchestrator/transfer/mooncake_relay.py": _VERIFIED,
    "orchestrator/transfer/registered_buffers.py": _VERIFIED,
    "orchestrator/transfer/turns/routed_experts.py": "numbers whose count `turn-message` has checked",
    "vllm_rlplugin/judge/judge_profiler.py": "a file that the user made by `profile --judge`",
    "vllm_rlplugin/kv/blocks.py": _VERIFIED,
    "vllm_rlplugin/kv/commands.py": _VERIFIED,
    "vllm_rlplugin/kv/connector.py": _VERIFIED,
    "vllm_rlplugin/kv/mover.py": _VERIFIED,
    "vllm_rlplugin/kvpool/engine/pool_agreement.py": "the ranks of one engine, over gloo",
    "vllm_rlplugin/weights/stock_receiver.py": "the run's own trainer, over the control channel",
    "vllm_rlplugin/worker/inprocess_engine.py": "a model's config.json, which `model-config` has read before",
}


def everything() -> dict[str, Harness | NativeHarness]:
    """By name."""
    return {**HARNESSES, **NATIVE}


def written() -> str:
    """The page."""
    rows = [
        f"| `{name}` | {', '.join(f'`{file}`' for file in one.reads)} | {one.refuses} | {one.property} |"
        for name, one in sorted(everything().items())
    ]
    return _HEAD + "\n".join(rows) + "\n" + _TAIL
