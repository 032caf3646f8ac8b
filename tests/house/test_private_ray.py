"""The Ray of a run is its own: a folder that nobody else may enter, and a token that is in no home folder."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.api import ConfigError
from orchestrator.config import load_config
from orchestrator.runtime import real_run

PROGRAM = """
import json, os, stat, sys
from pathlib import Path
from orchestrator.runtime.real_run import _start_local_ray
_start_local_ray(num_cpus=1, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False)
import ray
answer = ray.get(ray.remote(lambda: 7).remote())
folder = Path(ray._private.worker._global_node.get_session_dir_path()).parent.parent
token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, token)]
mode, shown, seen = os.environ.get("RAY_AUTH_MODE"), [], 0
for file in [*Path("/proc").glob("[0-9]*/environ"), *Path("/proc").glob("[0-9]*/cmdline")]:
    try:
        text = file.read_bytes()
    except OSError:
        continue
    seen += str(folder).encode() in text
    shown += [str(file)] if token.read_bytes() in text else []
ray.shutdown()
print(json.dumps([answer, str(folder), str(token.parent), modes, mode, seen, shown]))
"""


def test_the_folder_is_its_owners_alone_and_holds_the_token() -> None:
    folder = Path(real_run._ray_folder.__wrapped__())
    try:
        token = folder / "token"
        assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, token)] == [0o700, 0o600]
        assert len(token.read_text()) == 64
    finally:
        shutil.rmtree(folder)


def test_folders_of_processes_that_were_killed_are_removed_and_others_stay() -> None:
    code = "from orchestrator.runtime import real_run; import time; print(real_run._ray_folder(), flush=True); time.sleep(60)"
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    foreign = Path(tempfile.mkdtemp(prefix="rl-ray-", dir="/tmp"))  # without a lock: of a version before there was one
    try:
        folders = [Path(process.stdout.readline().strip()) for process in processes if process.stdout is not None]
        processes[0].kill()
        processes[0].wait()
        assert [folder.is_dir() for folder in folders] == [True, True]
        mine = Path(real_run._ray_folder.__wrapped__())
        assert [folder.is_dir() for folder in (*folders, foreign, mine)] == [False, True, True, True]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for folder in (*folders, foreign, mine):
            shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize(
    ("raised", "calls", "fails"),
    [
        ([Exception("no head in 30 s"), RuntimeError("another's port")], 3, False),
        ([RuntimeError("another's port")] * 3, 3, True),
        ([ValueError("num_cpus")], 1, True),
    ],
)
def test_a_start_that_met_another_ray_is_tried_again(
    raised: list[Exception], calls: int, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []

    def init(**options: object) -> None:
        seen.append(options["_temp_dir"])
        if len(seen) <= len(raised):
            raise raised[len(seen) - 1]

    stand_in = SimpleNamespace(_raylet=None, init=init, shutdown=lambda: None, is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "ray", stand_in)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "x")
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        real_run._start_local_ray()
    assert len(seen) == calls
    assert set(seen) == {f"{real_run._ray_folder()}/r"}, "in the private folder"


@pytest.mark.long
def test_a_local_ray_has_a_private_folder_and_a_token_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**clean, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer, folder, of_token, modes, mode, seen, shown = json.loads(done.stdout.splitlines()[-1])
    assert seen > 2, "Ray's processes name the folder"
    assert shown == [], "and none shows the token"
    assert (answer, folder, mode) == (7, of_token, "token")
    assert modes == [0o700, 0o600]
    assert not (tmp_path / ".ray" / "auth_token").exists()
    assert not Path(folder).exists()


IN_A_FOLDER_WITH_A_SPACE = """
import os, sys
from orchestrator.runtime.real_run import _start_local_ray
_start_local_ray(num_cpus=1, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False)
import ray
@ray.remote
class Engine:
    def say(self):
        return os.environ["OF_ITS_OWN"], sys.executable
engine = Engine.options(runtime_env={"env_vars": {"OF_ITS_OWN": "7"}}).remote()
print(*ray.get(engine.say.remote(), timeout=100))
ray.shutdown()
"""


@pytest.mark.parametrize("folder", ["new comer", "plain"])
def test_only_an_interpreter_that_a_shell_would_misread_is_quoted_for_ray(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, object]] = []
    stand_in = SimpleNamespace(
        _raylet=None, init=lambda **options: seen.append(options), is_initialized=lambda: False, shutdown=None
    )
    monkeypatch.setitem(sys.modules, "ray", stand_in)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "x")
    monkeypatch.setattr(sys, "executable", f"/home/{folder}/python")
    real_run._start_local_ray()
    quoted = {"py_executable": "'/home/new comer/python'"} if " " in folder else None
    assert [options.get("runtime_env") for options in seen] == [quoted]


@pytest.mark.parametrize("of_nodes", [["/opt/ray/python"], ["/opt/ray/python", "/home/new comer/python"]])
def test_a_cluster_whose_interpreter_a_shell_would_misread_is_refused(
    of_nodes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Task:
        def __init__(self, function: object) -> None:
            self.options = lambda scheduling_strategy: asked.append(scheduling_strategy.node_id) or self

        def remote(self) -> str:
            return of_nodes[len(asked) - 1]

    nodes = [{"NodeID": f"{n:056x}", "NodeManagerAddress": f"10.0.0.{n}", "Alive": True} for n in range(len(of_nodes))]
    gone = {"NodeID": "9" * 56, "NodeManagerAddress": "10.0.0.9", "Alive": False}
    ray = pytest.importorskip("ray")
    for name, stand_in in {
        "init": lambda **_: None, "nodes": lambda: [*nodes, gone], "remote": lambda **_: Task, "get": lambda refs, timeout: refs,
    }.items():  # fmt: skip
        monkeypatch.setattr(ray, name, stand_in)
    for executable, misread in (("/home/me/python", False), ("/home/new comer/python", len(of_nodes) > 1)):
        monkeypatch.setattr(sys, "executable", executable)
        refused = pytest.raises(ConfigError, match=r"Ray on 10\.0\.0\.1 runs /home/new comer/python, which")
        with refused if misread else contextlib.nullcontext():
            real_run.start_ray(load_config(None, ["ray.address=10.0.0.0:6379"]))
    assert len(asked) == len(of_nodes)  # only where one's own path has a space


@pytest.mark.long
def test_a_process_with_variables_of_its_own_starts_in_a_folder_with_a_space(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    (tmp_path / "a checkout").symlink_to(sys.prefix)
    python = tmp_path / "a checkout" / "bin" / "python"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    words = [python, "-c", IN_A_FOLDER_WITH_A_SPACE]
    done = subprocess.run(words, env={**clean, "HOME": str(tmp_path)}, capture_output=True, text=True, timeout=180)
    assert done.stdout.splitlines()[-1:] == [f"7 {python}"], done.stderr[-2000:]


AFTER_ANOTHER = """
import os
os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"] = "token", "a" * 64
import ray
ray.init(address="local", num_cpus=1, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False)
ray.shutdown()
del os.environ["RAY_AUTH_TOKEN"]
from orchestrator.runtime.real_run import _start_local_ray
_start_local_ray(num_cpus=1, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False)
print(ray.get(ray.remote(lambda: 7).remote()))
ray.shutdown()
"""


@pytest.mark.long
def test_a_local_ray_starts_in_a_process_that_had_one_with_another_token(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    words = [sys.executable, "-c", AFTER_ANOTHER]
    done = subprocess.run(words, env={**clean, "HOME": str(tmp_path)}, capture_output=True, text=True, timeout=180)
    assert done.stdout.splitlines()[-1:] == ["7"], done.stderr[-2000:]
