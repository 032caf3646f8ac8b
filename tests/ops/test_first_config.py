"""The files that ``rl-coserve init`` writes are what they say, and the shell completes what there is."""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

import orchestrator
from orchestrator import cli
from orchestrator.cli import main
from orchestrator.config import load_config
from orchestrator.ops.first_config import WAYS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("way", WAYS)
def test_a_first_file_is_written_once(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", way]) == 0
    written = Path(WAYS[way][1])
    assert str(written) in capsys.readouterr().out
    before = written.read_bytes()
    assert main(["init", way]) == 2
    assert "already exists" in capsys.readouterr().err
    assert written.read_bytes() == before
    assert main(["init", way, "no/such/folder"]) == 2


@pytest.mark.parametrize(
    "name", [None, "first.toml", "no suffix", "a folder/it's mine.toml", "-dashed.toml", "a=b.toml"]
)
@pytest.mark.parametrize("way", ["train", "lend"])
def test_what_is_said_to_be_next_can_be_typed_as_it_stands(
    way: str, name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a folder").mkdir()
    given = [] if name is None else ["--", name] if name.startswith("-") else [name]
    assert main(["init", way, *given]) == 0
    said = capsys.readouterr().out
    (typed,) = (shlex.split(line)[1:] for line in re.findall(r"(rl-coserve train .*)", said))
    written = Path(name or WAYS[way][1])
    assert said.startswith(f"wrote {written}\n")
    arguments = cli._parser().parse_args(typed)
    assert arguments.dry_run
    assert Path(arguments.config).samefile(written)
    in_comments = re.findall(r"^# +(rl-coserve train .*?)(?:    .*)?$", written.read_text(), re.M)
    assert len(in_comments) == 2
    assert {shlex.split(line)[2] for line in in_comments} == {arguments.config}


@pytest.mark.parametrize("name", [None, "X", "my loop.txt"])
def test_what_is_next_for_a_megatron_script_is_no_command_whatever_the_files_name(
    name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "megatron", *([name] if name else [])]) == 0
    said = capsys.readouterr().out
    assert "rl-coserve" not in said
    assert "docs/recipes/existing.md" in said
    compile(Path(name or "rl_loop.py").read_text(), "rl_loop.py", "exec")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["lend", "two\nlines.toml"], "must be printable"),
        (["train", "no/such/folder.toml"], "cannot be written: No such file or directory"),
        (["train", "."], "already exists"),
    ],
)
def test_a_file_that_cannot_be_written_or_typed_is_one_error(
    words: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", *words]) == 2
    assert why in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_three_ways_in_are_three_files() -> None:
    assert len({name for _, name in WAYS.values()}) == len(WAYS)


def test_the_first_run_passes_all_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "_placed", lambda config: [])
    monkeypatch.setattr(cli, "_about", lambda config: "nothing")
    assert main(["init", "train"]) == 0
    assert main(["train", "run.toml", "--dry-run"]) == 0
    assert "OK" in capsys.readouterr().err


@pytest.mark.parametrize("way", ["train", "lend"])
def test_a_config_holds_only_keys_that_exist_also_in_its_comments(way: str, tmp_path: Path) -> None:
    text = (ROOT / "orchestrator/ops/templates" / WAYS[way][0]).read_text(encoding="utf-8")
    (tmp_path / "as_is.toml").write_text(text)
    assert load_config(tmp_path / "as_is.toml").run.steps == 200
    data = re.search(r"^# (name = \"dataset\"\n(?:# .*\n)+)", text, re.M)
    offered = re.findall(r"^# ([a-z_]+ = [^\n]+)$", text.replace(data[0], "") if data else text, re.M)
    for line in offered:
        (tmp_path / "one.toml").write_text(text.replace(f"# {line}", line))
        load_config(tmp_path / "one.toml")
    assert len(offered) >= 1
    if data:
        (tmp_path / "data.toml").write_text("[task]\n" + re.sub(r"^# ", "", data[1], flags=re.M))
        assert load_config(tmp_path / "data.toml").task.name == "dataset"


def test_the_script_for_megatron_is_python_and_names_what_there_is() -> None:
    text = (ROOT / "orchestrator/ops/templates/megatron.txt").read_text(encoding="utf-8")
    compile(text, "rl_loop.py", "exec")
    pytest.importorskip("megatron.core")
    for module, name in re.findall(r"^from (megatron_rlplugin\S+) import (\w+)$", text, re.M):
        assert hasattr(importlib.import_module(module), name)
    wrapped = importlib.import_module("megatron_rlplugin.install").RLTraining
    assert all(hasattr(wrapped, name) for name in re.findall(r"\brl\.(\w+)\(", text))


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["rl-coserve", "tr"], {"train", "trace"}),
        (["rl-coserve", "train", "--re"], {"--resume", "--replay"}),
        (["rl-coserve", "init", "m"], {"megatron"}),
        (["rl-coserve", "train", "rollout.al"], {"rollout.alpha="}),
        (["rl-coserve", "show", "la"], {"latest"}),
    ],
)
def test_the_shell_completes_what_there_is(
    words: list[str], expected: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    quoted = " ".join(f"'{word}'" for word in words)
    place = len(words) - 1
    asked = (
        f'source ./script; COMP_WORDS=({quoted}); COMP_CWORD={place}; _rl_coserve; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "-c", asked], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=True)
    assert set(done.stdout.split()) == expected, done.stderr


def test_zsh_gets_the_same_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("autoload")


def test_the_citation_is_of_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version: {orchestrator.__version__}\n" in text
    assert "The rl-coserve authors" in text
