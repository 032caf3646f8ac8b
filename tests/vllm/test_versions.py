"""Both supported vLLM versions have every hook as we use it, and run: the installed one, and the other on its CPU libraries.

The other one is read from its wheel on pip's index, the needed files only (some megabytes). Without an index its tests
are skipped and say why; ``python scripts/next_vllm.py`` does the same by hand.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import importlib.util
import io
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from orchestrator.hooks.signatures import signature_mismatches
from orchestrator.hooks.tested_versions import VLLM, find_version
from scripts import next_vllm, vllm_sources
from vllm_rlplugin import hookpoints
from vllm_rlplugin.worker.inprocess_engine import prepare_process

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed() -> vllm_sources.SignatureTree:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return vllm_sources.SignatureTree.installed(Path(spec.origin).parent.parent)


@pytest.fixture(scope="module")
def other() -> vllm_sources.SignatureTree:
    """The sources of the supported version that is not installed."""
    sources = vllm_sources.Sources(vllm_sources.OTHER_VERSION, vllm_sources.default_cache())
    try:
        sources.read("vllm/version.py")
        tree = vllm_sources.SignatureTree(sources.read)
        tree.has("vllm.v1.request:Request")
    except vllm_sources.UnavailableError as error:
        pytest.skip(f"sources of vLLM {vllm_sources.OTHER_VERSION}: {error}")
    return tree


def test_the_two_versions_are_different_and_both_in_the_tested_range() -> None:
    found = find_version(VLLM)
    assert found is not None
    versions = (found[1], vllm_sources.OTHER_VERSION)
    assert versions[0].split("+")[0] != versions[1]
    assert all(version in VLLM.tested for version in versions)
    assert all(version.split("+")[0] in VLLM.how for version in versions)


@pytest.mark.engine
def test_every_hook_of_the_installed_vllm_is_as_it_was_tested() -> None:
    prepare_process(1)  # this may be the first import of vLLM in the test process
    assert hookpoints.check_all() == ()
    checked, differing = hookpoints.check_loaded()  # all of it is imported now
    assert (checked, differing) == (len(hookpoints.HOOKS) + len(hookpoints.attribute_targets()), ())


@pytest.mark.engine
def test_a_server_that_says_again_what_is_live_reads_no_source_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its event loop waits while it looks: 0.7 s for every status, when that parsed vLLM's sources anew."""
    prepare_process(1)
    hookpoints.check_all()
    monkeypatch.setattr(hookpoints.SourceTree, "installed", lambda folder: pytest.fail("the sources are read again"))
    assert hookpoints.check_loaded()[1] == ()
    scheduler = importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler
    monkeypatch.setattr(scheduler, "add_request", lambda self, changed: None)
    (differs,) = hookpoints.check_loaded()[1]
    assert "Scheduler.add_request" in differs, "what can change in a process is looked at again"


def test_every_hook_and_import_is_in_the_installed_sources(installed: vllm_sources.SignatureTree) -> None:
    assert vllm_sources.differences(installed) == []


def test_every_hook_and_import_is_in_the_sources_of_the_other_version(other: vllm_sources.SignatureTree) -> None:
    assert vllm_sources.differences(other) == []


def wheel(files: dict[str, bytes], recorded: dict[str, bytes]) -> zipfile.ZipFile:
    """One whose RECORD speaks of other contents."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        lines = []
        for name, content in recorded.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(content)}")
        archive.writestr("vllm-9.9.dist-info/RECORD", "\n".join(lines))
    return zipfile.ZipFile(data)


def test_an_overlay_has_the_python_files_that_the_record_of_the_wheel_names_and_no_other(tmp_path: Path) -> None:
    files = {"vllm/one.py": b"x = 1\n", "vllm/sub/two.json": b"{}", "vllm/_C.so": b"code", "other/three.py": b"y = 2\n"}
    next_vllm._unpack(wheel(files, files), "9.9", tmp_path / "whole")
    found = {str(path.relative_to(tmp_path / "whole")) for path in (tmp_path / "whole").rglob("*") if path.is_file()}
    assert found == {"vllm/one.py", "vllm/sub/two.json"}
    with pytest.raises(vllm_sources.UnavailableError, match=r"vllm/one\.py of vLLM 9\.9 is not what"):
        next_vllm._unpack(wheel(files, files | {"vllm/one.py": b"x = 2\n"}), "9.9", tmp_path / "changed")
    with pytest.raises(
        vllm_sources.UnavailableError, match=f"RECORD of vLLM {vllm_sources.OTHER_VERSION} has the sha256"
    ):
        next_vllm._unpack(wheel(files, files), vllm_sources.OTHER_VERSION, tmp_path / "forged")


def test_a_release_that_nobody_tried_says_that_it_is_the_newest_tested_one_and_one_that_is_not_there_is_code_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the plugin would be inert there, and nothing would be tried."""
    next_vllm._describe("99.1.0", tmp_path)
    (info,) = tmp_path.iterdir()
    version = info.name.removeprefix("vllm-").removesuffix(".dist-info")
    assert version in VLLM.tested

    def locate(version: str, options: list[str]) -> None:
        raise vllm_sources.UnavailableError(f"no vLLM {version} there")

    monkeypatch.setattr(next_vllm.vllm_sources, "locate", locate)
    assert next_vllm.main(["99.1.0", "--folder", str(tmp_path / "alternates")]) == 3
    assert "vLLM 99.1.0: not run: no vLLM 99.1.0 there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "version", "tests"),
    [
        (["--", "-k", "one"], vllm_sources.OTHER_VERSION, ["-k", "one"]),
        (["99.1.0", "--", "tests/vllm"], "99.1.0", ["tests/vllm"]),
        (["--whole"], vllm_sources.OTHER_VERSION, ["-m", "not gpu and not long", *next_vllm.WHOLE]),
        ([], vllm_sources.OTHER_VERSION, ["-m", "not gpu and not long", *next_vllm.SUBSET]),
    ],
)
def test_what_follows_two_dashes_is_given_to_pytest(
    given: list[str], version: str, tests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(next_vllm, "overlay", lambda version, folder: seen.append(version))
    monkeypatch.setattr(next_vllm, "run", lambda folder, arguments: seen.append(arguments) or 0)
    monkeypatch.setattr(next_vllm.vllm_sources, "differences", lambda tree: [])
    monkeypatch.setattr(next_vllm.SignatureTree, "installed", lambda folder: None)
    assert next_vllm.main(given) == 0
    assert seen == [version, tests]


def run_other(*options: str) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "next_vllm.py"), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 3:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "nothing broke" in done.stdout


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_the_other_version_runs_tests_of_each_seam() -> None:
    run_other()


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.timeout(3000)
def test_the_other_version_runs_all_tests_of_the_plugin() -> None:
    run_other("--whole")


@pytest.mark.engine
def test_sources_and_import_give_the_same_parameters(installed: vllm_sources.SignatureTree) -> None:
    """So that what is read of the other version is what importing it would find."""
    prepare_process(1)
    for target, expected in hookpoints.HOOKS.items():
        names = tuple(parameter.name for parameter in installed.parameters(target))
        assert signature_mismatches({target: names}) == ()
        assert [name for name in names if name in expected] == list(expected)


@pytest.mark.slow
def test_a_hook_that_was_renamed_or_changed_is_named(installed: vllm_sources.SignatureTree) -> None:
    """The comparison of the other version can fail: the same sources, with upstream changes made in them."""
    scheduler = "vllm/v1/core/sched/scheduler.py"
    changes = {
        scheduler: [
            ("def _preempt_request(", "def _evict_request("),
            ("def add_request(self, request: Request)", "def add_request(self, request: Request, tenant: str)"),
            ("self.prev_step_scheduled_req_ids", "self.last_step_scheduled_req_ids"),
        ],
        "vllm/v1/core/sched/interface.py": [("UNPAUSED", "RUNNING")],
    }

    def read(path: str) -> str | None:
        text = installed._read(path)
        for old, new in changes.get(path, []):
            assert text is not None
            assert old in text
            text = text.replace(old, new)
        return text

    found = vllm_sources.differences(vllm_sources.SignatureTree(read))
    for part in (
        "Scheduler._preempt_request: expected parameters",
        "where tenant is new and has no default",
        "Scheduler.prev_step_scheduled_req_ids: nothing there",
        "PauseState.UNPAUSED: nothing there",
    ):
        assert [line for line in found if part in line], part
    assert len(found) == 4


def test_a_file_that_is_gone_is_a_difference_and_no_error() -> None:
    found = vllm_sources.differences(vllm_sources.SignatureTree(lambda path: None))
    assert len(found) >= len(hookpoints.HOOKS) + len(hookpoints.attribute_targets())


def test_our_imports_from_vllm_are_found_wherever_they_are() -> None:
    files = [
        ROOT / "vllm_rlplugin" / "worker" / "inprocess_engine.py",
        ROOT / "patches" / "vllm" / "cpu_keep_weights.py",
    ]
    names = vllm_sources.imported_names(files, "vllm")
    assert "vllm.v1.engine.llm_engine:LLMEngine" in names  # in a function
    assert "vllm.model_executor.layers.utils:" in names
    assert not [name for name in names if name.startswith("vllm_rlplugin")]


class _Index(BaseHTTPRequestHandler):
    """Serves one file by range requests, and counts the bytes."""

    data = b""
    sent = 0
    ranges = True

    def do_GET(self) -> None:
        first, last = (int(part) for part in self.headers["Range"].removeprefix("bytes=").split("-"))
        part = self.data[first : last + 1] if self.ranges else self.data
        self.send_response(206 if self.ranges else 200)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(self.data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        type(self).sent += len(part)  # before it can be read
        self.wfile.write(part)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Index]]:
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/one.py", "def one(a, b=1): ...\n")
        archive.writestr("vllm/heavy.so", bytes(4 << 20))
        archive.writestr("vllm/two.py", "from vllm.one import one\n")
    handler = type("Index", (_Index,), {"data": wheel.getvalue(), "sent": 0})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    found = vllm_sources.Wheel(f"http://127.0.0.1:{server.server_port}/vllm.whl", "")
    monkeypatch.setattr(vllm_sources, "locate", lambda version, pip_options: found)
    yield handler
    server.shutdown()
    server.server_close()
    thread.join()


def test_only_the_files_that_are_needed_are_read_and_only_once(index: type[_Index], tmp_path: Path) -> None:
    tree = vllm_sources.SignatureTree(vllm_sources.Sources("9.9", tmp_path).read)
    assert [parameter.name for parameter in tree.parameters("vllm.two:one")] == ["a", "b"]
    assert not tree.has("vllm.three:x")
    assert 0 < index.sent < len(index.data) / 2
    index.sent = 0
    again = vllm_sources.SignatureTree(vllm_sources.Sources("9.9", tmp_path).read)
    assert again.has("vllm.two:one")
    assert not again.has("vllm.three:x")
    assert index.sent == 0


def test_a_damaged_file_is_not_taken(index: type[_Index], tmp_path: Path) -> None:
    index.data = index.data.replace(b"def one(a", b"def one(x")
    with pytest.raises(zipfile.BadZipFile, match="CRC"):
        vllm_sources.Sources("9.9", tmp_path).read("vllm/one.py")
    assert not list(tmp_path.rglob("*.py"))


def test_an_index_that_does_not_answer_is_said(index: type[_Index], tmp_path: Path) -> None:
    index.ranges = False
    with pytest.raises(vllm_sources.UnavailableError, match="no range requests"):
        vllm_sources.Sources("9.9", tmp_path).read("vllm/one.py")


def test_pip_is_asked_and_its_refusal_is_passed_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = (tmp_path / "index").as_uri()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
            patch.setenv(name, "")
        code = vllm_sources.main(["--check", "--cache", str(tmp_path), "--version", "9.9.9", "--index-url", nowhere])
    assert code == 3
    assert "vLLM 9.9.9: pip: ERROR" in capsys.readouterr().err


def test_a_downloaded_wheel_is_taken_only_with_the_announced_sha256(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "vllm-9.9"

    def pip(arguments: list[str], timeout: float) -> str:
        with zipfile.ZipFile(folder / "vllm-9.9-py3-none-any.whl", "w") as archive:
            archive.writestr("vllm/one.py", "x = 1\n")
        return ""

    monkeypatch.setattr(vllm_sources, "_pip", pip)
    monkeypatch.setattr(vllm_sources, "locate", lambda version, pip_options: vllm_sources.Wheel("", "0" * 64))
    with pytest.raises(vllm_sources.UnavailableError, match="the index announces 0000"):
        vllm_sources.Sources("9.9", tmp_path, whole=True).read("vllm/one.py")
    assert not list(folder.glob("*.whl"))
