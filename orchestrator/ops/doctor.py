"""``rl-coserve doctor``: is this environment able to run, and if not, what cures it.

Guarantees: every check ends within its time limit and yields exactly one result; a check that cannot run says why and
never passes; every failure and warning carries a fix. What an engine, Mooncake or Ray is asked is asked of a real one,
in a process of its own that is killed with all it started when the limit is over, so that neither a hang nor a crash
there takes the doctor along. Nothing is installed or changed.

Exit code: 0 when no check failed, else 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.metadata
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from json import dumps, loads
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

from orchestrator import __version__
from orchestrator.api import ConfigError
from orchestrator.hooks.tested_versions import (
    MEGATRON_CORE,
    MOONCAKE,
    PYTHON,
    RAY,
    VLLM,
    EngineComponent,
    check_version,
    find_version,
)
from orchestrator.ops import doctor_machine as machine
from orchestrator.ops import nvidia_driver
from orchestrator.ops.check import Check, Finding, Status
from orchestrator.sandbox.run import diagnose_sandbox

if TYPE_CHECKING:
    from orchestrator.config import Config

PLUGIN = "rl-coserve"
PLUGIN_GROUPS = ("vllm.general_plugins", "vllm.endpoint_plugins")  # under the same name in each
_CHECKOUT = (Path(__file__).parents[2] / "Makefile").is_file()  # a wheel has none
_VENV = "`make venv`" if _CHECKOUT else f"pip install '{PLUGIN}[cpu]' (docs/install.md)"
_ANSWER = "rl-coserve-doctor-answer "  # engines print too: the answer's line starts with this


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One answer."""

    name: str
    status: Status
    detail: str
    fix: str
    seconds: float


def run_doctor(json: bool = False, quick: bool = False, config: Config | None = None) -> int:
    """Run all checks and print them; ``quick`` skips those that start processes. Returns the exit code.

    ``config``: what it needs is looked at, too, and what it cannot do without fails.
    """
    checks: Sequence[Check] = CHECKS
    if config is not None:
        from orchestrator.ops.doctor_config import checks_for_config

        checks = checks_for_config(CHECKS, config)
    results = []
    for result in run_checks(checks, quick):
        results.append(result)
        if not json:
            print(as_text(result), flush=True)
    failed = any(result.status == "fail" for result in results)
    if json:
        print(dumps({"ok": not failed, "checks": [asdict(result) for result in results]}))
    else:
        print(", ".join(f"{sum(r.status == status for r in results)} {status}" for status in _LABELS))
    return 1 if failed else 0


def run_checks(checks: Sequence[Check], quick: bool = False) -> Iterator[CheckResult]:
    """One result a check, in order."""
    for item in checks:
        begun = time.monotonic()
        if item.isolated and quick:
            finding = Finding("skip", "starts a process: left out by --quick")
        elif item.isolated:
            finding = _in_process(item)
        else:
            finding = _within_limit(item)
        yield CheckResult(item.name, finding.status, finding.detail, finding.fix, round(time.monotonic() - begun, 2))


_LABELS: dict[Status, str] = {"ok": "OK  ", "warn": "WARN", "fail": "FAIL", "skip": "SKIP"}


def as_text(result: CheckResult) -> str:
    """One line, and the fix below it."""
    line = f"{_LABELS[result.status]}  {result.name:18}  {result.detail}"
    return f"{line}\n      {'':18}  fix: {result.fix}" if result.fix else line


def _guarded(item: Check) -> Finding:
    """A check that raises has failed, with its exception as the reason."""
    try:
        return item.run()
    except ConfigError as error:
        return Finding("fail", f"{error.field}: {error.value}", error.fix)
    except ModuleNotFoundError as error:
        return Finding("fail", _short(str(error)), f"pip install '{PLUGIN}[orchestrator]'")
    except Exception as error:  # noqa: BLE001  whatever is broken in an environment is what is looked for
        return Finding("fail", f"{type(error).__name__}: {_short(str(error))}", f"see the message; then {_VENV}")


def _within_limit(item: Check) -> Finding:
    answers: list[Finding] = []
    thread = threading.Thread(target=lambda: answers.append(_guarded(item)), daemon=True)
    thread.start()
    thread.join(item.limit)
    if answers:
        return answers[0]
    return Finding("fail", f"no answer within {item.limit:g} s", "is a file system or a network mount hanging?")


def _in_process(item: Check, command: Sequence[str] = ()) -> Finding:
    command = command or (sys.executable, "-m", "orchestrator.ops.doctor", item.name)
    environment = {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", **os.environ}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        try:
            code: int | None = process.wait(item.limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:  # whatever it left behind, and on Ctrl-C itself
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        lines = log.read().splitlines()
    if code is None:
        last = _short(lines[-1]) if lines else "it printed nothing"
        fix = "run it again on an idle machine; if that does not help, look for a hung process or a blocked port"
        return Finding("fail", f"no answer within {item.limit:g} s; last line: {last}", fix)
    for line in reversed(lines):
        if line.startswith(_ANSWER):
            return Finding(**loads(line.removeprefix(_ANSWER)))
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    last = _short(lines[-1]) if lines else "it printed nothing"
    return Finding("fail", f"its process {how}; last line: {last}", f"out of memory? (dmesg); else {_VENV}")


def _answer(name: str) -> int:
    """In the process of an isolated check."""
    item = next(item for item in CHECKS if item.name == name)
    finding = _guarded(item)
    print(f"\n{_ANSWER}{dumps(asdict(finding))}", flush=True)
    return 0


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:297] + "..."


# ------------------------------------------------------------------------------------------------- versions and packages


def _tested(component: EngineComponent) -> Finding:
    """The installed version against the tested range; an engine may well live in another environment."""
    found = find_version(component)
    if found is None:
        fix = f"{_VENV}, or install {component.name} {component.tested} ({component.how})"
        return Finding("warn", "not installed in this environment", fix)
    installed = check_version(component)
    return Finding("ok", f"{installed.version} ({installed.distribution}; tested: {component.tested}, {component.how})")


def _megatron_core() -> Finding:
    """Also those that were unpacked beside the environment, to test with."""
    finding = _tested(MEGATRON_CORE)
    beside = sorted(folder.name.rsplit("-", 1)[-1] for folder in Path(sys.prefix).glob("alternates/megatron-core-*"))
    if finding.status != "ok" or not beside:
        return finding
    untested = [version for version in beside if version not in MEGATRON_CORE.tested]
    if untested:
        return Finding("warn", f"{finding.detail}; beside it {', '.join(untested)}, not tested", _VENV)
    return Finding("ok", f"{finding.detail}; beside it {', '.join(beside)}")


def _python() -> Finding:
    return Finding("ok", f"{check_version(PYTHON).version} at {sys.executable} (tested: {PYTHON.tested}, {PYTHON.how})")


def _vllm() -> Finding:
    finding = _tested(VLLM)
    if finding.status == "ok" and _version("vllm") is None:
        return Finding("warn", f"{finding.detail}; the `vllm` command cannot find its own version", _VENV)
    return finding


def _requirements() -> Finding:
    version = _version(PLUGIN)
    if version is None:
        return Finding(
            "fail", f"{PLUGIN} is not installed, only on the Python path", "pip install -e '.[orchestrator]'"
        )
    if version != __version__:
        detail = f"{PLUGIN} {version} is installed, but its code is that of {__version__}: {Path(__file__).parents[1]}"
        return Finding("fail", detail, "leave one of them: an installation that broke off, or a checkout on PYTHONPATH")
    missing = [name for name in required_distributions() if _version(name) is None]
    if missing:
        return Finding("fail", f"not installed: {', '.join(missing)}", f"pip install '{PLUGIN}[orchestrator]'")
    return Finding("ok", f"{PLUGIN} {version} and its requirements")


def required_distributions() -> list[str]:
    """Distributions that the base and its extra ``orchestrator`` require, as the installed metadata says."""
    found = []
    for text in importlib.metadata.requires(PLUGIN) or []:
        needed = Requirement(text)
        if needed.marker is None or needed.marker.evaluate({"extra": "orchestrator"}):
            found.append(needed.name)
    return found


def _torch() -> Finding:
    version = _version("torch")
    if version is None:
        return Finding("warn", "not installed in this environment", _VENV)
    strangers = [name for name in ("torchvision", "torchaudio", "torchcodec") if _is_other_build(name, version)]
    if strangers:
        names = " ".join(strangers)
        detail = f"{version}, but another build of {names}, with which `import transformers` fails"
        return Finding("fail", detail, f"pip uninstall {names}")
    torch: Any = importlib.import_module("torch")
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return Finding("ok", f"{version}, CUDA {torch.version.cuda}: {', '.join(devices)}")
    if torch.version.cuda is None:
        return Finding("ok", f"{version}, a CPU build")
    fix = f"check the NVIDIA driver (nvidia-smi) and CUDA_VISIBLE_DEVICES; without a GPU: {_VENV}"
    return Finding("warn", f"{version} is built for CUDA {torch.version.cuda}, but there is no usable GPU", fix)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_other_build(distribution: str, torch_version: str) -> bool:
    version = _version(distribution)
    return version is not None and "+cpu" in torch_version and "+cpu" not in version


# --------------------------------------------------------------------------------------------------------------- plugins


def _entry_point() -> Finding:
    shown = []
    for group in PLUGIN_GROUPS:
        found = [point.value for point in importlib.metadata.entry_points(group=group, name=PLUGIN)]
        if not found:
            # Metadata in the working folder goes before what is installed.
            again = "pip install -e . (or `make venv`)" if _CHECKOUT else "install the wheel again"
            fix = f"{again}; remove the folder rl_coserve.egg-info if there is an old one"
            return Finding("fail", f"none named {PLUGIN} in the group {group}", fix)
        if len(set(found)) > 1:
            fix = f"pip uninstall {PLUGIN} until it is gone, then install it again"
            return Finding("fail", f"several in {group}: {', '.join(found)}", fix)
        shown.append(f"{found[0]} in {group}")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        fix = f"unset VLLM_PLUGINS, or add {PLUGIN} to it (which activates it in `vllm serve`)"
        return Finding("warn", f"{shown[0]}, but VLLM_PLUGINS={allowed!r} keeps vLLM from loading it", fix)
    return Finding("ok", f"{PLUGIN} = {', '.join(shown)}")


def _vllm_plugin() -> Finding:
    """Load plugins as vLLM does, then ask ours whether every seam it uses is live."""
    if find_version(VLLM) is None:
        return Finding("skip", "vLLM is not installed in this environment")
    check_version(VLLM)
    looked: dict[str, str] = importlib.import_module("vllm_rlplugin.selfcheck").check_seams()
    wrong = [f"{name}: {problem}" for name, problem in looked.items() if problem]
    if wrong:
        fix = f"unset VLLM_PLUGINS, install {PLUGIN} again, and vLLM {VLLM.tested} ({VLLM.how})"
        return Finding("fail", _short("; ".join(wrong)), fix)
    patches: dict[str, bool] = importlib.import_module("vllm_rlplugin.patches.register").REGISTER.status()
    detail = f"loaded by vLLM, backend registered; checked: {', '.join(looked)}"
    return _hooks(detail, (), patches, VLLM)


def _megatron_plugin() -> Finding:
    """Activate the plugin in a process with Megatron-Core, as the trainer does."""
    if find_version(MEGATRON_CORE) is None:
        return Finding("skip", "Megatron-Core is not installed in this environment")
    importlib.import_module("megatron.core")
    shims = importlib.import_module("megatron_rlplugin.cpu")
    shims.activate()
    if shims.needed() and not shims.is_active():
        return Finding("fail", "the shims for machines without CUDA are not live", "please report this with `--json`")
    place = "shims for machines without CUDA live" if shims.is_active() else "CUDA: no shims needed"
    status: dict[str, Any] = importlib.import_module("megatron_rlplugin.hookpoints").engine_status()
    patches: dict[str, bool] = importlib.import_module("megatron_rlplugin.patches").REGISTER.status()
    return _hooks(place, status["hook_mismatches"], patches, MEGATRON_CORE)


def _hooks(detail: str, mismatches: Sequence[str], patches: dict[str, bool], component: EngineComponent) -> Finding:
    if mismatches:
        fix = f"install {component.name} {component.tested} ({component.how})"
        return Finding("fail", _short(f"{len(mismatches)} hooks changed: {'; '.join(mismatches)}"), fix)
    live = ", ".join(f"{name} {'live' if is_live else 'not applied'}" for name, is_live in patches.items())
    return Finding("ok", f"{detail}; all hooks as tested; patches: {live or 'none needed'}")


# ------------------------------------------------------------------------------------------------------ Mooncake and Ray


def _mooncake() -> Finding:
    """A real master on a free port, 1 KB in and out."""
    if find_version(MOONCAKE) is None:
        return Finding("skip", "Mooncake is not installed in this environment")
    from orchestrator.runtime.mooncake_master import MooncakeMaster
    from orchestrator.transfer import MooncakeRelay

    async def round_trip() -> Finding:
        master = MooncakeMaster()
        await master.start()
        try:
            relay = MooncakeRelay(master.address, segment_bytes=32 << 20)
            try:
                sent, received = bytearray(os.urandom(1024)), bytearray(1024)
                relay.put("doctor/1", memoryview(sent))
                relay.get_into("doctor/1", memoryview(received))
            finally:
                relay.close()
        finally:
            await master.stop()
        if sent != received:
            return Finding("fail", "1 KB came back changed", "reinstall the Mooncake wheel; check the memory")
        return Finding("ok", "mooncake_master started, 1 KB put and read back over TCP, stopped")

    return asyncio.run(round_trip())


def _ray() -> Finding:
    """A local Ray, one remote call."""
    if find_version(RAY) is None:
        return Finding("skip", "Ray is not installed in this environment")
    ray: Any = importlib.import_module("ray")

    def process_id() -> int:
        return os.getpid()

    ray.init(
        address="local",
        num_cpus=1,
        object_store_memory=80 << 20,  # Ray's smallest is 75 MiB
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    try:
        answer = ray.get(ray.remote(process_id).remote())
    finally:
        ray.shutdown()
    if answer == os.getpid():
        return Finding("fail", "the remote call ran in this process", "reinstall Ray")
    return Finding("ok", "local Ray started, one remote call answered, stopped")


# --------------------------------------------------------------------------------------------------------------- machine


def _sqlite() -> Finding:
    from orchestrator.transfer import SqliteMetadata

    with tempfile.TemporaryDirectory() as folder:
        store = SqliteMetadata(Path(folder) / "metadata.sqlite")
        try:
            first, second = (store.compare_and_set("key", b"value", 0) for _ in range(2))
            found = store.get("key")
        finally:
            store.close()
    if not first or second or found != (b"value", 1):
        return Finding(
            "fail", f"{sqlite3.sqlite_version}: compare-and-set is not atomic here", "use a local disk for TMPDIR"
        )
    return Finding("ok", f"{sqlite3.sqlite_version}, write-ahead log and compare-and-set work")


def _weight_codec() -> Finding:
    from orchestrator.transfer.delta.native_codec import native_status

    found = native_status()
    if found["live"] == "numpy":
        fix = "install a C compiler, then install rl-coserve again"
        return Finding("warn", f"NumPy, exact but slow: {found['reason']}", fix)
    return Finding("ok", f"native, {found['live']}")


CHECKS: tuple[Check, ...] = (
    Check("python", _python),
    Check("packages", _requirements),
    Check("vllm", _vllm),
    Check("megatron-core", _megatron_core),
    Check("mooncake", lambda: _tested(MOONCAKE)),
    Check("ray", lambda: _tested(RAY)),
    Check("torch", _torch, limit=120, isolated=True),
    Check("cuda", nvidia_driver.check_driver, limit=60, isolated=True),
    Check("entry point", _entry_point),
    Check("vllm plugin", _vllm_plugin, limit=180, isolated=True),
    Check("megatron plugin", _megatron_plugin, limit=180, isolated=True),
    Check("mooncake store", _mooncake, limit=90, isolated=True),
    Check("local ray", _ray, limit=120, isolated=True),
    Check("sqlite", _sqlite),
    Check("weight codec", _weight_codec),
    Check("system libraries", machine.check_libraries),
    Check("sandbox", lambda: Finding(*diagnose_sandbox()), limit=30),
    Check("devices", machine.check_devices, limit=30),
    Check("disk", machine.check_disk),
    Check("temporary disk", machine.check_temporary_disk),
    Check("memory", machine.check_memory),
    Check("shared memory", machine.check_shared_memory),
    Check("open files", machine.check_open_files),
)

if __name__ == "__main__":
    sys.exit(_answer(sys.argv[1]))
