"""How benchmarks start a whole run: the command, its folder, and what its failure says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from orchestrator.api import RunError
from scripts.bench.probes.training_run import train

STAND_IN = """#!{python}
import pathlib, sys
assert sys.argv[1:5] == ["-m", "orchestrator.cli", "train", "some.toml"]
given = dict(argument.split("=", 1) for argument in sys.argv[5:])
if given["run.seed"] == "7":
    sys.exit("error: seven is not played")
folder = pathlib.Path(given["run.folder"].strip('"')) / (given["run.name"] + "-001")
folder.mkdir()
(folder / "seed").write_text(given["run.seed"])
"""


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the interpreter, as a run takes minutes."""
    program = tmp_path / "python"
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


def test_the_folder_of_the_run_is_returned(tmp_path: Path) -> None:
    found = train(Path("some.toml"), tmp_path, "whole-1", ["run.seed=3"])
    assert found == tmp_path / "whole-1-001"
    assert (found / "seed").read_text() == "3"


def test_a_run_that_fails_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="the run whole-1 ended with exit code 1: error: seven is not played"):
        train(Path("some.toml"), tmp_path, "whole-1", ["run.seed=7"])
