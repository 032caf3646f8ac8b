"""What the doctor says of a machine and of a config: what is missing is named with its cure, and what is needed fails."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.api import ConfigError
from orchestrator.config import Config, parse_config
from orchestrator.ops import doctor, requirements
from orchestrator.ops import doctor_machine as machine
from orchestrator.ops.check import Check, Finding
from orchestrator.ops.doctor import CHECKS
from orchestrator.ops.doctor_config import checks_for_config

ROOT = Path(__file__).parents[2]


def named(checks: list[Check], name: str) -> Check:
    return next(check for check in checks if check.name == name)


def test_too_little_memory_fails_and_little_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cgroup_free_mb", lambda: 1 << 40)
    for free, status in ((machine.MEMORY_MIN_MB - 1, "fail"), (machine.MEMORY_TIGHT_MB - 1, "warn"), (64_000, "ok")):
        monkeypatch.setattr(machine, "meminfo_mb", lambda free=free: free)
        assert machine.check_memory().status == status


def test_the_limit_of_a_container_counts_and_not_the_memory_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "meminfo_mb", lambda: 64_000)
    monkeypatch.setattr(machine, "cgroup_free_mb", lambda: 100)
    assert machine.check_memory().detail.startswith("100 MB available")


def test_a_folder_that_is_not_there_yet_is_looked_at_where_it_would_be(tmp_path: Path) -> None:
    found = machine.check_disk(tmp_path / "runs" / "of" / "mine")
    assert found.status == "ok"
    assert found.detail.endswith(f"in {tmp_path}")


def test_a_full_disk_and_a_file_in_the_way_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    assert machine.check_disk(tmp_path / "file").status == "fail"
    for free, status in ((machine.DISK_MIN_MB - 1, "fail"), (machine.DISK_TIGHT_MB - 1, "warn")):
        monkeypatch.setattr(
            machine.shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free << 20, total=9 << 40)
        )
        found = machine.check_disk(tmp_path)
        assert (found.status, bool(found.fix)) == (status, True)
        assert machine.check_temporary_disk().status == status


def test_too_few_open_files_are_said_with_the_command_that_raises_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for limits, status, fix in (
        ((4096, 4096), "ok", ""),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), "ok", ""),
        ((256, 8192), "warn", "ulimit -n 2000"),
        ((256, 1024), "fail", "hard limit, which is 1024"),
    ):
        monkeypatch.setattr(machine.resource, "getrlimit", lambda _, limits=limits: limits)
        found = machine.check_open_files(2000)
        assert found.status == status
        assert fix in found.fix


def test_a_port_that_is_taken_is_named_with_who_has_it() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        number = listener.getsockname()[1]
        taken = machine.check_free_port(number, "127.0.0.1", "view.port")
        assert taken.status == "fail"
        assert f"view.port = {number}" in taken.detail
        assert f"process {os.getpid()} (" in taken.detail
        assert "view.port" in taken.fix
    assert machine.check_free_port(number, "127.0.0.1", "view.port").status == "ok"


def test_a_machine_without_a_gpu_is_told_so_plainly() -> None:
    """With the real NVML binding where it is installed, and without it."""
    if list(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has a GPU")
    found = machine.check_devices()
    assert (found.status, found.fix) == ("ok", "")
    assert found.detail.startswith("none (")


class TwinNvml:
    """Answers as pynvml does; there is no driver here to ask."""

    class NVMLError(Exception):
        pass

    def __init__(self, free: list[int], broken: bool = False) -> None:
        self._free, self._broken = free, broken
        self.closed = False

    def nvmlInit(self) -> None:
        if self._broken:
            raise self.NVMLError("Driver/library version mismatch")

    def nvmlShutdown(self) -> None:
        self.closed = True

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"1.2.3"

    def nvmlDeviceGetCount(self) -> int:
        return len(self._free)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "a twin's GPU"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(free=self._free[handle] << 30, total=10 << 30)


@pytest.mark.parametrize(
    ("twin", "status", "said", "fix"),
    [
        (TwinNvml([10, 10]), "ok", "driver 1.2.3; 0: a twin's GPU, 10240 of 10240 MB free; 1: ", ""),
        (TwinNvml([10, 4]), "warn", "4096 of 10240 MB free", "below 90% free: 1"),
        (TwinNvml([]), "ok", "none (driver 1.2.3, no GPU)", ""),
        (TwinNvml([], broken=True), "ok", "none (NVML finds no driver)", ""),
    ],
)
def test_gpus_of_a_twin_are_listed_with_the_memory_that_is_left(
    twin: TwinNvml, status: str, said: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", twin)
    found = machine.check_devices()
    assert found.status == status
    assert said in found.detail
    assert fix in found.fix
    assert twin.closed != twin._broken


def test_a_gpu_whose_driver_does_not_answer_a_twin_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", TwinNvml([], broken=True))
    monkeypatch.setattr(machine.Path, "glob", lambda *_: iter([Path("/dev/nvidia0")]))
    found = machine.check_devices()
    assert found.status == "fail"
    assert "version mismatch" in found.detail
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = machine.check_devices()
    assert (found.status, found.fix) == ("warn", "pip install 'rl-coserve[nvml]'")


# ------------------------------------------------------------------------------------------------------------- a config


def test_an_engine_that_a_config_needs_fails_when_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_version", lambda _: None)
    assert named(list(CHECKS), "vllm").run().status == "warn"
    checks = checks_for_config(CHECKS, parse_config({}))
    for name in ("vllm", "megatron-core", "mooncake", "ray"):
        assert named(checks, name).run().status == "fail", name


def test_a_relay_on_a_file_system_needs_no_mooncake() -> None:
    names = [check.name for check in checks_for_config(CHECKS, parse_config({"relay": {"kind": "fsspec"}}))]
    assert not {"mooncake", "mooncake store", "system libraries"} & set(names)
    over = {"relay": {"kind": "fsspec"}, "rollout": {"kv_transfer": {"carrier": "mooncake"}}}
    assert "mooncake" in [check.name for check in checks_for_config(CHECKS, parse_config(over))]


def test_a_run_on_servers_of_others_needs_no_vllm_of_its_own() -> None:
    served = {"rollout": {"workers": 0, "served": ["http://127.0.0.1:8000"]}}
    names = [check.name for check in checks_for_config(CHECKS, parse_config(served))]
    assert not {"vllm", "vllm plugin"} & set(names)
    judged = {**served, "reward": {"judge": {"path": "a/model", "criterion": "is it right?"}}}
    assert requirements.VLLM not in requirements.required_components(parse_config(served))
    assert requirements.VLLM in requirements.required_components(parse_config(judged))


ASKING: list[tuple[dict[str, Any], str, str]] = [
    ({"relay": {"kind": "fsspec"}}, "fsspec", "fsspec"),
    ({"relay": {"metadata_url": "redis://127.0.0.1:6379"}}, "redis", "redis"),
    ({"reward": {"host": "ray_serve"}}, "grpc_reflection", "ray-serve"),
    ({"environment": {"backend": "kubernetes", "kubernetes": {"image": "i"}}}, "kubernetes", "kubernetes"),
    ({"logging": {"wandb": {"enabled": True}}}, "wandb", "wandb"),
    ({"logging": {"otlp": {"endpoint": "http://127.0.0.1:4318"}}}, "opentelemetry.exporter.otlp.proto.http", "otlp"),
    ({"task": {"name": "reasoning_gym", "dataset": "chain_sum"}}, "reasoning_gym", "reasoning-gym"),
]


@pytest.mark.parametrize(("values", "module", "extra"), ASKING, ids=[extra for *_, extra in ASKING])
def test_every_extra_that_a_config_asks_for_is_looked_for(
    values: dict[str, Any], module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse_config(values)
    assert [(package.module, package.extra) for package in requirements.required_packages(config)] == [(module, extra)]
    assert extra in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == module else True)
    found = named(checks_for_config(CHECKS, config), "extras").run()
    assert (found.status, found.fix) == ("fail", f"pip install 'rl-coserve[{extra}]'")
    with pytest.raises(ConfigError, match=rf"rl-coserve\[{extra}\]"):
        requirements.require_packages(config)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    assert named(checks_for_config(CHECKS, config), "extras").run().status == "ok"
    requirements.require_packages(config)


def test_a_config_that_asks_for_nothing_needs_no_extra() -> None:
    assert requirements.required_packages(Config()) == ()


def test_ports_and_folders_of_a_config_are_looked_at(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        number = listener.getsockname()[1]
        config = parse_config({"view": {"enabled": True, "port": number}, "run": {"folder": str(tmp_path / "runs")}})
        checks = checks_for_config(CHECKS, config)
        assert named(checks, "port view.port").run().status == "fail"
        assert str(tmp_path) in named(checks, "disk").run().detail
    off = parse_config({"view": {"port": number}})
    assert not [check for check in checks_for_config(CHECKS, off) if check.name.startswith("port")]


def test_the_disk_of_a_relay_on_this_machine_is_looked_at(tmp_path: Path) -> None:
    for master, looked in ((f"file://{tmp_path}/relay", True), ("s3://bucket/relay", False), ("", False)):
        checks = checks_for_config(CHECKS, parse_config({"relay": {"kind": "fsspec", "master": master}}))
        found = [check.run() for check in checks if check.name == "relay disk"]
        assert [item.detail.endswith(f"in {tmp_path}") for item in found] == [True] * looked


def test_more_environments_want_more_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (4096, 8192))
    many = {"rollout": {"environments": 1000, "groups_per_step": 8}}
    assert named(checks_for_config(CHECKS, parse_config({})), "open files").run().status == "ok"
    assert named(checks_for_config(CHECKS, parse_config(many)), "open files").run().status == "warn"


def test_a_task_with_model_written_code_fails_without_a_sandbox() -> None:
    without = [Check("sandbox", lambda: Finding("warn", "none", "apt-get install bubblewrap"))]
    assert named(checks_for_config(without, parse_config({})), "sandbox").run().status == "warn"
    coding = parse_config({"task": {"name": "coding"}})
    assert named(checks_for_config(without, coding), "sandbox").run().status == "fail"


def test_the_command_says_what_a_config_lacks_and_ends_with_1(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text('[task]\nname = "reasoning_gym"\ndataset = "chain_sum"\n\n[logging.wandb]\nenabled = true\n')
    code = (
        "import sys, importlib.util as u\n"
        "real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name in ('wandb', 'reasoning_gym') else real(name, *a)\n"
        "from orchestrator.cli import main\n"
        f"sys.exit(main(['doctor', '--quick', '--json', {str(config)!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    answer = json.loads(done.stdout)
    (extras,) = [check for check in answer["checks"] if check["name"] == "extras"]
    assert answer["ok"] is False
    assert extras["fix"] == "pip install 'rl-coserve[wandb,reasoning-gym]'"
    assert all(set(check) == {"name", "status", "detail", "fix", "seconds"} for check in answer["checks"])


def test_the_doctor_takes_a_config_and_values_over_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from orchestrator.cli import main
    from orchestrator.ops import doctor

    monkeypatch.setattr(doctor, "CHECKS", ())
    demo = str(Path(__file__).parents[2] / "examples/frozenlake.toml")
    assert main(["doctor", demo, "relay.kind=fsspec"]) == 0
    assert "fsspec: a folder of the run" in capsys.readouterr().out
    if not Path("/dev/nvidiactl").exists():
        assert main(["doctor", demo, "relay.kind=fsspec", "rollout.workers=6400"]) == 1
        assert "6401 engines and trainer ranks would share" in capsys.readouterr().out


def test_code_of_another_version_than_what_is_installed_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an upgrade that broke off leaves it, or a checkout before an installed wheel: entry points are then another's."""
    assert doctor._requirements().status == "ok"
    monkeypatch.setattr(doctor, "__version__", "0.2.0")
    found = doctor._requirements()
    assert found.status == "fail"
    assert "is installed, but its code is that of 0.2.0: " in found.detail
