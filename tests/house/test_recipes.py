"""Two recipes as a stranger walks them: each command of the page, in its order, with real servers on this machine.

Only names of this machine are replaced: ports, the pool's name, the folder of the relay.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import free_port

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def blocks(page: str, heading: str) -> list[str]:
    """The commands of a section, block by block."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    return re.findall(r"```sh\n(.*?)```", text.partition("\n## ")[0], re.DOTALL)


def walk(folder: Path, commands: str, names: dict[str, str]) -> list[str]:
    """Type them; what was said, command by command. A command that fails, but ``wait`` and ``kill``, fails the walk."""
    for old, new in names.items():
        assert old in commands, old
        commands = commands.replace(old, new)
    shutil.copytree(ROOT / "examples", folder / "examples")
    environment = {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # of in-process engines of other tests
    script = "set -eu -o pipefail\n" + re.sub(r"^(?=rl-coserve|curl|torchrun)", "echo @@@\n", commands, flags=re.M)
    with (folder / "said").open("wb") as said, (folder / "errors").open("wb") as errors:
        process = subprocess.Popen(
            ["bash", "-c", script], cwd=folder, env=environment, stdout=said, stderr=errors, start_new_session=True
        )
        try:
            code = process.wait(timeout=600)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the servers, too
            process.wait()
    text = (folder / "said").read_text(errors="replace")
    assert code == 0, text[-4000:] + (folder / "errors").read_text(errors="replace")[-4000:]
    return text.split("@@@\n")[1:]


def test_a_serving_engine_lends_to_a_run_and_takes_back_by_the_recipes_commands(tmp_path: Path) -> None:
    pool = f"recipe-{os.getpid()}"
    first, second = free_port(), free_port()
    names = {
        "reclaim --pool laptop\n": "reclaim --pool laptop || [ $? = 1 ]\n",  # what an engine cannot give is out
        "127.0.0.1:8000": f"127.0.0.1:{first}",
        "--rl-kv-pool-role serving": f"--rl-kv-pool-role serving --port {first}",
        "127.0.0.1:8001": f"127.0.0.1:{second}",
        "--port 8001": f"--port {second}",
        "laptop": pool,
        "run.steps=3": "run.steps=3 warmup.steps=4 evaluation.prompts=5 rollout.environments=16",
    }
    said = walk(tmp_path, "".join(blocks("recipes/lend.md", "Try it on a laptop")), names)
    _, _, lent, trained, status, metrics, back, killed = said
    assert "lent at most: 50%" in lent
    assert "success on held-out prompts:" in trained
    assert re.search(r"rollout .*: process \d+, .*; [1-9][\d,]* tokens in [1-9][\d,]* admitted steps", status), status
    assert "rl_coserve:kv_pool_admitted_tokens_total" in metrics
    assert "remain in use, the minimum of running engines; --kill frees them" in back
    assert re.search(r"^everything is back; killed: processes \d+", killed, re.M), killed


def test_a_megatron_loop_of_ones_own_trains_while_its_server_generates_by_the_recipes_commands(tmp_path: Path) -> None:
    port = free_port()
    names = {
        "127.0.0.1:8000": f"127.0.0.1:{port}",
        "vllm serve policy": f"vllm serve policy --port {port}",
        "--model policy": f"--model policy --server http://127.0.0.1:{port}",
        "/tmp/rl-relay": str(tmp_path / "relay"),
    }
    _, trained = walk(tmp_path, "".join(blocks("recipes/existing.md", "Your own loop")), names)
    rows = re.findall(r"iteration +\d+ \| reward: ([\d.]+) \| lag: (\d+) .* logprob gap: ([\d.E+-]+)", trained)
    assert len(rows) == 30
    rewards = [float(reward) for reward, _, _ in rows]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1  # it learns
    assert {lag for _, lag, _ in rows} == {"0", "1"}  # answers that were begun before an update are ended after it
    assert max(float(gap) for _, _, gap in rows) < 1e-4  # the server has the script's own weights
