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
found: [results](results/README.md).

| harness | what reads | refused as | what holds |
| --- | --- | --- | --- |
"""

_TAIL = """
## What has none

| what | why |
| --- | --- |
| metrics of engines | nobody parses their text: a served worker says how it is over the control endpoints (`server-answer`) |
| answers of the Kubernetes API, of Redis, of object stores | their own clients read them; the values: `shared-record`, `bucket` |
| HTTP itself: request lines, chunks, header lines | aiohttp's and uvicorn's; what we read of headers is `http-headers` |
| tokenizers, `torch.load` with `weights_only` | of the model that a run was given, read by transformers and torch |
| what NCCL, gloo and Mooncake speak among themselves | theirs; no parser of ours |

What no check can see: a changed digit within a line of the journal that leaves it a possible history (lines have
numbers, not checksums; a missing or repeated line is seen), and changed statistics in a Parquet footer (pages have
checksums). The mutex in a pool's file is not damaged: the C library trusts it, and so must whoever shares that file.
"""


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
