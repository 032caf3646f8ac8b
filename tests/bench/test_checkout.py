"""``rl-coserve bench``: found from a checkout, and one clear error where there is none, as after `pip install`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator import cli
from orchestrator.ops import bench_checkout
from scripts import bench
from scripts.bench.measured_sources import sources_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package lies in a folder of its own, as in site-packages, and so does the working directory."""
    monkeypatch.setattr(
        bench_checkout, "__file__", str(tmp_path / "site" / "orchestrator" / "ops" / "bench_checkout.py")
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    return tmp_path


@pytest.mark.parametrize("arguments", [["--list"], [], ["routing", "--quick"], ["no-such-bench"]])
def test_outside_a_checkout_the_error_says_where_benchmarks_are(
    installed: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "git clone" in said.err
    assert "make venv" in said.err
    assert "Traceback" not in said.err


def test_an_installed_package_finds_the_checkout_it_is_started_in(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert bench_checkout.import_bench() is bench
    assert str(ROOT) in os.environ["PYTHONPATH"].split(os.pathsep)  # for probes in processes of their own


def test_every_benchmark_is_listed_with_what_it_measures(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--list"]) == 0
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert [name for name, _ in rows] == sorted(bench.BENCHES)
    assert all(len(about) > 20 and "[needs " in about and about.endswith("a minute]") for _, about in rows)


def test_an_unknown_benchmark_or_a_model_that_it_does_not_take_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "no-such-bench"]) == 2
    assert "see rl-coserve bench --list" in capsys.readouterr().err
    assert cli.main(["bench", "routing", "--model", "some/folder"]) == 2
    assert "leave it out" in capsys.readouterr().err


@pytest.mark.slow
def test_what_a_benchmark_imports_or_starts_is_among_its_needs() -> None:
    for name, (module, _, needs) in bench.BENCHES.items():
        text = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        engine = any(str(file).startswith("megatron_rlplugin") for file in sources_of(name))
        assert not engine or "megatron-core" in needs, name
        for word, need in {"bubblewrap": "bubblewrap", "_DUCKDB": "duckdb", "run_probe(": "vllm"}.items():
            if word in text and not (need == "vllm" and engine):
                assert need in needs, (name, need)
