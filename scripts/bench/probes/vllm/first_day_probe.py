"""One step of the first day on a GPU host: ``python -m scripts.bench.probes.vllm.first_day_probe STEP [--dry]``.

``scripts/gpu/first_day.sh`` runs the steps of ``STEPS`` in their order, each in a process of its own with a time limit. Prints
one JSON object on the last line. Exit code 0: done; 1: it is not as it must be; 3: this host lacks something, named on stderr.

``--dry`` needs no GPU: the same code, small, with stand-ins for what is NVIDIA's (a libcuda over a file, tests/support; an MPS
program that computes nothing) and vLLM's CPU build for the engines.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.api import RunError
from orchestrator.ops.nvidia_driver import find_gpus
from scripts.bench.probes.probe_run import CHECKOUT, run_probe
from vllm_rlplugin.kvpool.pages.cuda_driver import LIBRARY, CudaDriver

_PAGE = 2 << 20
_LACKS = 3  # exit code


class LackingError(Exception):
    """What this host does not have."""


@contextmanager
def driver_library(dry: bool, pages: int) -> Iterator[str]:
    """NVIDIA's; or a stand-in, named in the environment, of a device with so many pages and one more for each of two engines."""
    if not dry:
        yield LIBRARY
        return
    from tests.support import fake_cuda

    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(fake_cuda.make_device(Path(folder) / "device", pages + 2, _PAGE))
        yield str(fake_cuda.load_by_name(Path(folder)))


def driver(dry: bool) -> dict[str, Any]:
    """The driver's own answers, and each of its calls that the pool makes: seconds for all pages."""
    count = 8 if dry else 512
    with driver_library(dry, count) as library:
        found = find_gpus()
        device = CudaDriver(_PAGE, library=library)
        places = np.arange(count, dtype=np.uint64)
        seconds: dict[str, float] = {}

        def timed(name: str, call: Callable[[], Any]) -> Any:
            begun = time.perf_counter()
            answer = call()
            seconds[name] = time.perf_counter() - begun
            return answer

        handles = timed("create", lambda: device.create_pages(count))
        descriptors = timed("export", lambda: [device.export_handle(int(handle)) for handle in handles])
        imported = timed("import", lambda: device.import_handles(descriptors))
        for descriptor in descriptors:
            os.close(descriptor)
        base = timed("reserve", lambda: device.reserve(count * _PAGE))
        timed("map", lambda: device.map(base, places, imported))
        timed("zero", lambda: device.zero(base, places))
        timed("unmap", lambda: device.unmap(base, places))
        timed("map_one_page_everywhere", lambda: device.map(base, places, np.full(count, imported[0])))
        device.unmap(base, places)
        device.free(base, count * _PAGE)
        timed("release", lambda: device.release_handles(np.concatenate([handles, imported])))
        return {
            "cuda": found.version,
            "devices": [asdict(gpu) for gpu in found.devices],
            "uuid": device.uuid,
            "pages": count,
            "page_bytes": _PAGE,
            "seconds": seconds,
        }


def pages(dry: bool) -> dict[str, Any]:
    """A GiB that goes from process to process (ROSE 4.1: in 5 ms)."""
    mib, rounds = (16, 2) if dry else (1024, 20)
    with driver_library(dry, mib // 2) as library:
        arguments = ["--mib", str(mib), "--rounds", str(rounds), "--library", library]
        return {kind: run_probe("remap", [*arguments, "--kind", kind], limit=120) for kind in ("kept", "created")}


def engine(dry: bool, ranks: int = 1, experts: bool = False, **options: Any) -> dict[str, Any]:
    """One engine: tokens, an update to other weights, and back: the same tokens as before. ``options``: of vLLM's."""
    if not dry and len(find_gpus().devices) < ranks:
        raise LackingError(f"{ranks} GPUs")
    from orchestrator.transfer import Publisher, RelayEndpoint
    from scripts.bench.probes.vllm.recompute_probe import greedy, publish, write_tiny_qwen3
    from vllm_rlplugin.worker.inprocess_engine import EngineOptions, InprocessEngine, prepare_process

    prepare_process(1)
    requests, tokens = (4, 16) if dry else (64, 256)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if experts:
            from tests.support.family_models import file_tensors, write_family

            sizes = {"hidden_size": 128, "moe_intermediate_size": 128}
            first_weights = file_tensors(write_family(folder / "model1", "qwen3-moe", **sizes))
            weights = [first_weights, {key: value.flip(0).contiguous() for key, value in first_weights.items()}]
        else:
            weights = [write_tiny_qwen3(folder / f"model{seed}", seed) for seed in (1, 2)]
        relay = RelayEndpoint(
            job="first-day",
            kind="fsspec",
            master=f"file://{folder / 'relay'}",
            metadata=str(folder / "metadata.sqlite"),
        )
        publisher = Publisher(relay)
        publisher.reset()
        publish(publisher, 1, weights[1])
        publish(publisher, 2, weights[0])
        begun = time.monotonic()
        if dry and ranks > 1:
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        made = InprocessEngine(
            EngineOptions(
                model=str(folder / "model1"),
                relay=relay.to_dict(),
                kv_cache_mb=16 if dry else 512,
                max_num_seqs=requests,
                tensor_parallel_size=ranks,
                **options,
            ),
            time.monotonic,
        )
        started, speeds = time.monotonic() - begun, []

        def answers(tag: str) -> list[tuple[int, ...]]:
            begun = time.monotonic()
            for index in range(requests):
                prompt = [(7 * at + 13 * index) % 60 for at in range(32)]
                made.add(greedy(f"{tag}{index}", prompt, tokens), time.monotonic())
            found: dict[str, tuple[int, ...]] = {}
            while made.has_work:
                found |= {done.request_id: done.token_ids for done in made.step(time.monotonic())}
            speeds.append(requests * tokens / (time.monotonic() - begun))
            return [found[f"{tag}{index}"] for index in range(requests)]

        first, seconds = answers("a"), []
        said = [first]
        for version in (1, 2):
            made.pause(time.monotonic())
            begun = time.monotonic()
            made.update(version)
            seconds.append(time.monotonic() - begun)
            made.resume()
            said.append(answers(f"v{version}-"))
        made.close()
    if said[1] == first or said[2] != first:
        raise RunError("the tokens after an update are not those of its weights")
    return {
        "vllm": importlib.metadata.version("vllm"),
        "ranks": ranks,
        "start_seconds": started,
        "tokens_per_second": speeds,
        "update_seconds": seconds,
    }


def idle(dry: bool) -> dict[str, Any]:
    """Stock vLLM beside one with the plugin loaded and not asked for, in turn: the same bits, and how fast."""
    from scripts.bench.micro.overhead_pairs import probes

    rounds, requests, tokens = (1, 4, 8) if dry else (20, 64, 128)
    with probes(("stock", "idle")) as (started, hooks):
        rows = []
        for index in range(rounds + 1):
            order = ("idle", "stock") if index % 2 else ("stock", "idle")
            rows.append({kind: started[kind].round(requests, tokens, index, seeded=True) for kind in order})
    if [row for row in rows if row["stock"]["digest"] != row["idle"]["digest"]]:
        raise RunError("an idle plugin changed a token or a log-prob")
    ratio = float(np.median([row["stock"]["wall"] / row["idle"]["wall"] for row in rows[1:]]))
    return {"ratio": ratio, "rounds": rounds, "hooks": hooks["idle"]["hooks"]}


def update(dry: bool) -> dict[str, Any]:
    """How long requests in flight stand still."""
    return run_probe("update", ["--rounds", "1" if dry else "10", "--gbps", "100"], limit=300)


def pool(dry: bool) -> dict[str, Any]:
    """Two engines in one pool: pages go to serving and back."""
    return _coserve(dry, ["--modes", "none", "--rounds", "1", "--seconds", "1" if dry else "10"])


def coserve(dry: bool) -> dict[str, Any]:
    """What serving's users notice of rollouts, by admission."""
    modes = ["--modes", "dual"] if dry else ["--modes", "static,none,dual"]
    return _coserve(dry, [*modes, "--rounds", "1" if dry else "5", "--seconds", "1" if dry else "12"])


def _coserve(dry: bool, arguments: list[str]) -> dict[str, Any]:
    from scripts.bench.micro.coserve_slo import excerpt

    mib = 192
    with tempfile.TemporaryDirectory() as folder, driver_library(dry, mib * (1 << 20) // _PAGE) as library:
        trace = Path(folder) / "trace.json"
        trace.write_text(json.dumps(excerpt("azure_code")), encoding="utf-8")
        size = ["--page-kib", str(_PAGE >> 10), "--pool-mib", str(mib), "--library", library]
        return run_probe("coserve", ["--trace", str(trace), *arguments, *size], limit=600)


def sleep(dry: bool) -> dict[str, Any]:
    """An engine that leaves the device and comes back."""
    model = ["--model", "tiny", "--rounds", "1", "--page-kib", "128"] if dry else ["--model", "8b"]
    return run_probe("activation", model, limit=400)


def ranks(dry: bool) -> dict[str, Any]:
    """The same as ``engine`` at TP 2."""
    return engine(dry, 2)


def fp8(dry: bool) -> dict[str, Any]:
    """The same as ``engine`` with weights that vLLM quantises as it loads them, experts included; captured graphs on a GPU."""
    ways: list[dict[str, Any]] = [{"quantization": method} for method in ("fp8_per_tensor", "fp8_per_channel")]
    if dry:  # what vLLM's CPU backend can do without AMX
        ways = [{"quantization": "online", "quantization_config": {"linear": "fp8_per_channel"}}]
    return {str(way["quantization"]): engine(dry, experts=True, dtype="bfloat16", **way) for way in ways}


def mps(dry: bool) -> dict[str, Any]:
    """The MPS daemon comes, is seen, and goes; on a GPU also what rollouts beside serving cost under it."""
    from orchestrator.ops.mps import BINARY, MpsControl

    with tempfile.TemporaryDirectory() as folder:
        program = BINARY
        if dry:
            from tests.ops.test_mps import STAND_IN

            program = str(Path(folder) / BINARY)
            Path(program).write_text(STAND_IN.format(python=sys.executable), encoding="utf-8")
            os.chmod(program, 0o755)
        control = MpsControl(Path(folder) / "mps", "0", binary=program, timeout=20.0)

        async def daemon() -> dict[str, Any]:
            await control.start()
            try:
                return asdict(await control.check())
            finally:
                await control.stop()

        found = {"health": asyncio.run(daemon())}
    tests = ["tests/kvpool/test_gpu.py", "-k", "mps", "-rs", "-s", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *tests], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RunError(f"pytest {' '.join(tests)}: {done.stdout[-800:]}")
    figures = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {**found, "figures": figures, "pytest": done.stdout.splitlines()[-1]}


STEPS: dict[str, tuple[Callable[[bool], dict[str, Any]], int]] = {  # in this order; seconds on a GPU
    "driver": (driver, 60),
    "pages": (pages, 180),
    "engine": (engine, 240),
    "fp8": (fp8, 480),
    "idle": (idle, 300),
    "update": (update, 300),
    "pool": (pool, 300),
    "sleep": (sleep, 400),
    "ranks": (ranks, 300),
    "coserve": (coserve, 600),
    "mps": (mps, 300),
}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "step", nargs="?", choices=tuple(STEPS), help="without one: the steps and their limits, a line each"
    )
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    if options.step is None:
        print("\n".join(f"{name} {limit}" for name, (_, limit) in STEPS.items()))
        return 0
    if importlib.util.find_spec("vllm") is None and options.step not in ("driver", "pages"):
        print("vLLM is not installed", file=sys.stderr)
        return _LACKS
    try:
        print(json.dumps(STEPS[options.step][0](options.dry)))
    except LackingError as error:
        print(error, file=sys.stderr)
        return _LACKS
    return 0


if __name__ == "__main__":
    sys.exit(main())
