"""What runs in the simulator reads no clock but the loop's, and draws from no unseeded source.

The simulator cannot see a wall clock that is read in production code: the run would still pass, and two runs would differ
one day. So the source is checked.
"""

import ast
from pathlib import Path

import pytest

import orchestrator

ROOT = Path(orchestrator.__file__).parent
ENVIRONMENTS = ("environment_pool", "environment_session", "inprocess", "environment_wire")
CORE = sorted(
    [
        *(ROOT / f"{name}.py" for name in ("events", "ledger", "buffer", "envs", "rollout", "pipeline", "checkpoint")),
        *(ROOT / f"{name}.py" for name in ("evaluation", "tail_batching", "weight_sync", "train_samples")),
        *(ROOT / "environments" / f"{name}.py" for name in ENVIRONMENTS),
        *(file for name in ("api", "colocation", "policies", "proxy", "sim") for file in (ROOT / name).rglob("*.py")),
    ]
)
FORBIDDEN = {
    "time": {"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "sleep"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
    "uuid": {"uuid1", "uuid4"},
    "os": {"urandom", "getpid"},
    "asyncio": {"to_thread", "run_coroutine_threadsafe"},
    "secrets": {"token_hex", "token_bytes", "token_urlsafe", "choice"},
    "random": {
        *("random", "randint", "randrange", "choice", "choices", "shuffle", "sample", "uniform", "gauss", "seed"),
        *("expovariate", "lognormvariate", "getrandbits", "randbytes", "SystemRandom"),
    },
}
MODULES = {"threading", "multiprocessing", "concurrent", "secrets", "uuid", "time"}
ALLOWED = {
    ("virtual_loop.py", "threading"),  # it asks which thread it is in, to refuse another one
    ("bearer.py", "time"),  # how old a file is, which no simulated run has
}


def problems(file: Path) -> list[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        where = f"{file.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in FORBIDDEN.get(node.value.id, ()) and (file.name, node.value.id) not in ALLOWED:
                found.append(f"{where}: {node.value.id}.{node.attr}")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            for name in names:
                top = name.split(".")[0]
                if top in MODULES and (file.name, top) not in ALLOWED:
                    found.append(f"{where}: import {name}")
        elif isinstance(node, ast.For | ast.comprehension) and isinstance(node.iter, ast.Set | ast.SetComp):
            found.append(f"{where}: iterates over a set")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hash":
            found.append(f"{where}: hash()")
    return found


@pytest.mark.parametrize("file", CORE, ids=lambda file: str(file.relative_to(ROOT)))
def test_core_code_takes_time_from_the_loop_and_chance_from_a_seed(file: Path) -> None:
    assert problems(file) == []


def test_the_check_finds_what_it_looks_for(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(
        "import time, threading\nimport random\nimport asyncio\n"
        "a = time.monotonic()\nb = random.random()\nc = asyncio.to_thread\nd = hash('x')\n"
        "for e in {1, 2}:\n    pass\nf = [g for g in {h for h in 'ab'}]\n"
    )
    assert len(problems(bad)) == 8
