"""The harnesses of the C libraries: programs under the address and undefined-behaviour sanitizers (``csrc/fuzz.h``).

With clang they are libFuzzer's, which is guided by coverage; with gcc the programs try what they make themselves.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.harness import COLLECTED, CORPORA, ROOT, FuzzResult, read_lines, write_line

BATCH = 20_000  # inputs of a call of a program without libFuzzer
MEGABYTES = 16  # of one allocation: a small input may not take much memory
PATIENCE = 600.0  # seconds more than were asked for
_OPTIONS = ("-g", "-O2", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
_SANITIZERS = "-fsanitize=address,undefined"


@dataclass(frozen=True)
class NativeHarness:
    """``sources``: of the program and the library."""

    name: str
    reads: tuple[str, ...]
    refuses: str
    property: str
    sources: tuple[str, ...]

    @property
    def corpus(self) -> Path:
        return CORPORA / f"{self.name}.jsonl"


NATIVE = {
    one.name: one
    for one in (
        NativeHarness(
            "delta-decoder",
            ("csrc/sparse.c", "csrc/rans.c", "csrc/planes.c", "csrc/gather.c"),
            "a negative code",
            "No segment makes a decoder touch a byte outside of its buffers; what is taken is taken back bit by bit, what is "
            "whole comes back.",
            tuple(f"csrc/{name}.c" for name in ("fuzz_delta", "level", "rans", "gather", "sparse", "planes")),
        ),
        NativeHarness(
            "page-ledger",
            ("csrc/pages.c",),
            "a negative code",
            "No file makes a call of the ledger touch memory outside of its tables.",
            ("csrc/fuzz_pages.c", "csrc/pages.c"),
        ),
    )
}


class NoSanitizer(Exception):
    """There is no compiler here that can build them; the text says which were tried."""


@functools.cache
def _compiler() -> tuple[str, tuple[str, ...]]:
    """(the compiler, its options). Raises NoSanitizer."""
    tried = []
    fuzzer = "-fsanitize=fuzzer,address,undefined"
    for name, options in (("clang", (fuzzer, "-DFUZZ_LIBFUZZER")), ("gcc", (_SANITIZERS,))):
        path = shutil.which(name)
        if path is None:
            tried.append(f"{name} is not installed (Debian: apt-get install {name})")
            continue
        source = b"#include <stddef.h>\nint LLVMFuzzerTestOneInput(const void *d, size_t n) { return !d && n; }\n"
        source += b'#ifndef FUZZ_LIBFUZZER\nint main(void) { return LLVMFuzzerTestOneInput("", 0); }\n#endif\n'
        command = [path, *options, "-x", "c", "-", "-o", os.devnull]
        done = subprocess.run(command, input=source, capture_output=True, timeout=120)
        if done.returncode == 0:
            return path, options
        tried.append(f"{name} has no sanitizers: {done.stderr.decode(errors='replace').strip()[-200:]}")
    raise NoSanitizer("; ".join(tried))


def engine() -> str:
    """What tries inputs. Raises NoSanitizer."""
    path, _ = _compiler()
    return "libFuzzer" if Path(path).name == "clang" else "gcc, made inputs"


def build(one: NativeHarness, folder: Path, *, guided: bool = True) -> Path:
    """The program; not ``guided``: without libFuzzer, which tries less in a second. Raises NoSanitizer."""
    compiler, options = _compiler()
    target = folder / (one.name if guided else f"{one.name}-made")
    strict = ("-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror")
    sources = [str(ROOT / source) for source in one.sources]
    chosen = options if guided else (_SANITIZERS,)
    command = [compiler, *strict, *_OPTIONS, *chosen, *sources, "-o", str(target), "-pthread"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise AssertionError(done.stderr[-3000:])
    return target


def run(program: Path, arguments: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    # A library that vLLM preloads in this process would come before the sanitizer's.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    environment["TMPDIR"] = str(program.parent)
    if engine() == "libFuzzer" and not program.name.endswith("-made"):  # which takes more than that for itself
        arguments = [f"-malloc_limit_mb={MEGABYTES}", *arguments]
    else:
        environment["ASAN_OPTIONS"] = f"max_allocation_size_mb={MEGABYTES}"
    return subprocess.run(
        [str(program), *arguments], capture_output=True, text=True, timeout=seconds, env=environment, cwd=program.parent
    )


def write_corpus(one: NativeHarness, folder: Path) -> list[str]:
    """Its inputs as files."""
    folder.mkdir(exist_ok=True)
    names = []
    for number, (_, value) in enumerate(read_lines(one.corpus)):
        (folder / f"{number:04}").write_bytes(value)
        names.append(str(folder / f"{number:04}"))
    return names


def replay(one: NativeHarness, folder: Path) -> int:
    """How many inputs. Raises AssertionError with the sanitizer's words. Raises NoSanitizer."""
    program = build(one, folder)
    files = write_corpus(one, folder / "corpus")
    done = run(program, files if engine() == "libFuzzer" else ["--replay", *files], PATIENCE)
    assert done.returncode == 0, done.stderr[-3000:]
    return len(files)


def collect(one: NativeHarness, folder: Path, most: int) -> list[str]:
    """Lines of a corpus: the smallest of those that libFuzzer keeps of so many inputs. Raises NoSanitizer."""
    if engine() != "libFuzzer":
        raise NoSanitizer("a corpus is collected by libFuzzer: apt-get install clang")
    program = build(one, folder)
    for name in ("kept", "least"):
        (folder / name).mkdir()
    run(program, [f"-runs={most}", "-max_len=2048", "kept"], PATIENCE)
    run(program, ["-merge=1", "-max_len=2048", "least", "kept"], PATIENCE)
    found = sorted((file.read_bytes() for file in (folder / "least").iterdir()), key=len)
    return [write_line("drawn", data) for data in found if data][:COLLECTED]


def fuzz(one: NativeHarness, folder: Path, seconds: float, first_seed: int, least: int = 0) -> FuzzResult:
    """For so long, guided where libFuzzer is there; then made inputs until there were ``least``. Raises NoSanitizer."""
    count, begun, guided = replay(one, folder), time.monotonic(), engine() == "libFuzzer"
    if guided:
        wanted = ["-max_len=16384", f"-seed={first_seed % (1 << 31) + 1}", f"-max_total_time={max(1, int(seconds))}"]
        done = run(folder / one.name, [*wanted, "-print_final_stats=1", "corpus"], seconds + PATIENCE)
        tried = re.search(r"stat::number_of_executed_units: (\d+)", done.stderr)
        count += int(tried[1]) if tried else 0
        if done.returncode:
            crash = next(iter(sorted(folder.glob("crash-*"))), None)
            line = write_line("found", crash.read_bytes()) if crash is not None else f"seed {first_seed}"
            return FuzzResult(count, time.monotonic() - begun, line, done.stderr[-3000:])
    program = build(one, folder, guided=False) if count < least or not guided else folder / one.name
    while count < least or (not guided and time.monotonic() < begun + seconds):
        done = run(program, [str(BATCH), str(first_seed)], PATIENCE)
        if done.returncode:
            return FuzzResult(count, time.monotonic() - begun, f"seed {first_seed}", done.stderr[-3000:])
        count, first_seed = count + BATCH, first_seed + 1
    return FuzzResult(count, time.monotonic() - begun)
