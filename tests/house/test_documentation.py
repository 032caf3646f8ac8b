"""What the pages tell a reader to type works: each command runs here, or says what it needs; each snippet is what it says.

A command that cannot run on any machine ends with ``# needs: ...`` in words of :data:`NEEDS` (on a line of its own above, for a
whole block). Even then its form is checked: options, config keys, files and names have to exist.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from orchestrator import cli
from orchestrator.api import ConfigError
from orchestrator.cli import _parser, main
from orchestrator.config import load_config, parse_config
from orchestrator.ops.doctor import CHECKS
from orchestrator.ops.doctor_config import checks_for_config
from scripts.bench import BENCHES as BENCHMARKS
from tests.support import view_runs
from tests.support.report_runs import write_trajectories
from vllm_rlplugin.options import FrontendOptions, PluginOptions

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "AGENTS.md", "SECURITY.md", "CHANGELOG.md", "csrc/README.md"]
PAGES += sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))
LANGUAGES = {"sh", "toml", "python", "yaml", "text"}
NEEDS = {
    "minutes": "it installs, or starts engines, and takes minutes",
    "a run": "the folder of a run of before, in place of RUN or by default the newest",
    "a live run": "a run that goes on, in place of RUN or by default the newest",
    "a model": "a Hugging Face folder, in place of MODEL",
    "a config": "a TOML file of yours, in place of CONFIG",
    "traces": "CSV, JSON lines or Parquet files of yours, in place of FILE",
    "a server": "a `vllm serve` with the plugin that is running",
    "a pool": "engines that share a KV pool, running",
    "an environment": "it installs into an environment of yours",
    "a GPU": "an NVIDIA GPU",
    "a cluster": "Kubernetes or Slurm",
}
PLACES = {
    "CONFIG": "examples/frozenlake.toml",
    "run.toml": "examples/frozenlake.toml",
    "rows.toml": "examples/frozenlake.toml",  # these three run as they stand in tests/tasks
    "shop.toml": "examples/frozenlake.toml",
    "agent.toml": "examples/frozenlake.toml",
}
WRITTEN = {"guess.toml": "examples/frozenlake.toml"}  # a page has it; it lies in the checkout where commands run
OPTIONS = {field.name for kind in (PluginOptions, FrontendOptions) for field in dataclasses.fields(kind)}


RUN_BY = {  # (page, a line of the block) -> the test that runs a snippet as it stands, or "not run: " and why
    ("README.md", "wrap(model"): "tests/megatron/test_install.py::test_the_two_lines_of_the_page_wrap_a_model",
    ("docs/adapters.md", "coserve"): "tests/adapters/test_adapters.py::test_the_settings_of_the_page_are_read",
    ("docs/megatron.md", "wrap(model"): "tests/megatron/test_install.py::test_the_two_lines_of_the_page_wrap_a_model",
    ("docs/megatron.md", "cpu.activate()"): (
        "tests/megatron/test_install.py::test_the_line_for_a_machine_without_cuda_changes_nothing_twice"
    ),
    ("docs/megatron.md", "begin_step"): (
        "tests/megatron/test_install.py::test_the_stream_of_the_page_takes_the_step_that_rl_step_takes"
    ),
    ("docs/megatron.md", "pretrain("): (
        "tests/megatron/test_flags.py::test_stock_pretrain_logs_the_same_losses_and_norms_with_streaming"
    ),
    ("docs/megatron.md", "def clipped"): (
        "tests/megatron/test_objectives.py::test_the_loss_of_the_page_is_trained_by_the_config_of_the_page"
    ),
    ("docs/megatron.md", "def centred"): (
        "tests/megatron/test_objectives.py::test_the_loss_of_the_page_is_trained_by_the_config_of_the_page"
    ),
    ("docs/recipes/agent.md", "OpenAI()"): (
        "tests/tasks/test_tutorials.py::test_the_agent_of_the_page_calls_its_tool_and_prints_its_reward"
    ),
    ("docs/recipes/data_set.md", "def right"): "tests/tasks/test_dataset.py::test_the_page_works_as_it_says",
    ("docs/recipes/environment.md", "class ShopTask"): (
        "tests/tasks/test_tutorials.py::test_the_environment_of_the_page_is_played_in_the_words_of_a_tokenizer"
    ),
    ("docs/recipes/other_model.md", "AutoBridge"): (
        "tests/megatron/test_install.py::test_the_converter_of_the_page_names_what_is_published"
    ),
    ("docs/seeing.md", "scrape_configs"): "not run: it is Prometheus's own; tests/observe asks /metrics as it would",
    ("docs/tasks.md", "class GuessTask"): "tests/tasks/test_tasks.py::test_the_task_of_the_page_works_as_it_says",
    ("docs/tasks.md", "Sandbox("): "tests/tasks/test_tasks.py::test_the_sandbox_example_of_the_page_runs",
    ("docs/vllm.md", "import requests"): (
        "tests/vllm/test_served_lifecycle.py::test_the_client_of_the_documentation_runs_as_shown"
    ),
}
TASK = (("guess.py", "docs/tasks.md", "python"), ("guess.toml", "docs/recipes/write_a_task.md", "toml"))


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str


@dataclasses.dataclass(frozen=True)
class Command:
    """A line to type."""

    page: str
    line: int
    text: str
    needs: frozenset[str]

    def __str__(self) -> str:
        return f"{self.page}:{self.line} {self.text}"

    @property
    def words(self) -> list[str]:
        """Without variables in front, and without the folder of the environment."""
        words = shlex.split(self.text.removesuffix("&").strip())
        while words and re.match(r"[A-Z][A-Z_]*=", words[0]):
            words.pop(0)
        return [words[0].removeprefix(".venv/bin/"), *words[1:]] if words else []


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        begin, language, lines = 0, "", []
        for number, line in enumerate((ROOT / page).read_text(encoding="utf-8").splitlines(), 1):
            if line.lstrip().startswith("```"):
                if begin:
                    found.append(Block(page, begin, language, "\n".join(lines) + "\n"))
                begin, language, lines = (0, "", []) if begin else (number, line.strip()[3:], [])
            elif begin:
                lines.append(line)
    return found


def commands() -> list[Command]:
    found = []
    for block in blocks():
        if block.language != "sh":
            continue
        whole: frozenset[str] = frozenset()
        text = block.text.replace("\\\n", " ")
        for line in text.splitlines():
            command, _, needs = line.partition("# needs:")
            tags = frozenset(part.strip() for part in needs.split(",") if part.strip())
            command = re.sub(r"(^|\s{2,}|\s)#\s.*$", "", command).strip()
            if tags and not command:
                whole = tags
            if command:
                found.append(Command(block.page, block.line, command, tags | whole))
    return found


def quoted_commands() -> list[Command]:
    """What stands in backticks in running text and begins like one of ours."""
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        for quote in re.findall(r"`([^`\n]+)`", text):
            if re.match(r"(\.venv/bin/)?rl-coserve [a-z]+ ", quote):
                found.append(
                    Command(page, 0, re.sub(r"\[section\.key=value \.\.\.\]|\[--json\]", "", quote), frozenset())
                )
    return found


BLOCKS = blocks()
COMMANDS = commands()


def parsed(words: list[str]) -> argparse.Namespace:
    """Of a line ``rl-coserve ...``. AssertionError: the command line does not take it."""
    try:
        return _parser().parse_args([(PLACES | WRITTEN).get(word, word) for word in words])
    except SystemExit as error:
        raise AssertionError(f"the command line refuses it: {words}") from error


def checked(words: list[str]) -> argparse.Namespace:
    """The same, its config and overrides loaded, the name of its benchmark known."""
    arguments = parsed(words)
    given = [text.replace("...", "1") for text in getattr(arguments, "overrides", [])]
    config = getattr(arguments, "config", None)
    if words[0] in ("train", "sim", "cost", "profile"):
        overrides = [text for text in given if not text.startswith(("key=", "section.key="))]
        if words[0] == "train" and "--resume" in words:
            assert not overrides
        else:
            load_config(ROOT / config if config else None, overrides)
    if words[0] == "bench" and arguments.name:
        assert arguments.name in BENCHMARKS
    return arguments


# -- what a page holds ----------------------------------------------------------------------------------------------------


def test_the_pages_have_commands_and_snippets_at_all() -> None:
    assert len(PAGES) > 20
    assert len(COMMANDS) > 25
    assert {block.language for block in BLOCKS} == LANGUAGES


@pytest.mark.parametrize("page", PAGES)
def test_every_code_block_says_what_it_is(page: str) -> None:
    assert [(b.line, b.language) for b in BLOCKS if b.page == page and b.language not in LANGUAGES] == []


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "toml"], ids=lambda b: f"{b.page}:{b.line}")
def test_every_toml_snippet_is_a_config_by_itself(block: Block) -> None:
    parse_config(tomllib.loads(block.text))


def test_a_snippet_with_a_key_that_does_not_exist_would_be_noticed() -> None:
    with pytest.raises(ConfigError, match=r"did you mean rollout\.alpha"):
        parse_config(tomllib.loads("[rollout]\nalfa = 1\n"))


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python"], ids=lambda b: f"{b.page}:{b.line}")
def test_every_python_snippet_is_python_and_imports_what_is_there(block: Block) -> None:
    tree = compile(block.text, block.page, "exec", flags=ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("orchestrator", "vllm_rlplugin"):
            names = [f"{node.module}.{name.name}" for name in node.names]
            assert [name for name in names if not importable(name)] == []


def importable(name: str) -> bool:
    """Whether this is a module, or something in one."""
    module, _, last = name.rpartition(".")
    return hasattr(importlib.import_module(module), last) or importlib.util.find_spec(name) is not None


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "yaml"], ids=lambda b: f"{b.page}:{b.line}")
def test_every_yaml_snippet_is_yaml(block: Block) -> None:
    yaml = pytest.importorskip("yaml")
    assert isinstance(yaml.safe_load(block.text), dict)


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.language in ("python", "yaml")], ids=lambda b: f"{b.page}:{b.line}"
)
def test_every_snippet_is_run_by_a_test_or_says_why_not(block: Block) -> None:
    """A snippet in TOML is loaded above; a command runs below, or says in words of NEEDS what it needs."""
    (said,) = (by for (page, line), by in RUN_BY.items() if page == block.page and line in block.text)
    file, _, name = said.partition("::")
    if not said.startswith("not run: "):
        text = (ROOT / file).read_text(encoding="utf-8")
        assert f"def {name}(" in text
        assert Path(block.page).name in text


def test_no_snippet_is_said_to_run_that_is_gone() -> None:
    gone = {key for key in RUN_BY if not any(block.page == key[0] and key[1] in block.text for block in BLOCKS)}
    assert gone == set()


# -- the form of commands -------------------------------------------------------------------------------------------------


def test_what_commands_need_is_said_in_known_words() -> None:
    assert {str(command): command.needs - set(NEEDS) for command in COMMANDS if command.needs - set(NEEDS)} == {}


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.words[:1] == ["rl-coserve"]], ids=str)
def test_every_command_of_ours_is_one_that_the_command_line_takes(command: Command) -> None:
    checked(command.words[1:])


@pytest.mark.parametrize("command", quoted_commands(), ids=str)
def test_every_command_of_ours_in_running_text_is_taken_too(command: Command) -> None:
    checked(command.words[1:])


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.words[:2] == ["vllm", "serve"]], ids=str)
def test_every_option_of_a_server_is_one_of_the_plugin(command: Command) -> None:
    flags = [word.partition("=")[0] for word in command.words if word.startswith("--rl-")]
    assert [f for f in flags if f[5:].removeprefix("no-").replace("-", "_") not in OPTIONS] == []
    assert "--plugin" in command.words or "VLLM_PLUGINS=" in command.text


def test_every_other_command_names_what_is_there() -> None:
    extras = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    )
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    wrong = []
    for command in COMMANDS:
        words = command.words
        if words[:1] == ["make"]:
            wrong += [str(command)] * (words[1] not in targets)
        elif words[:2] == ["pip", "install"]:
            named = set(re.findall(r"[\w-]+", "".join(re.findall(r"\[(.*?)\]", command.text))))
            wrong += [str(command)] * (not named <= extras)
        elif words[:1] in (["python"], ["torchrun"]) or words[0].startswith("scripts/"):
            wrong += [f"{command}: {word}" for word in words if word.endswith((".py", ".sh")) and not exists(word)]
            if "-m" in words:
                wrong += [str(command)] * (importlib.util.find_spec(words[words.index("-m") + 1]) is None)
    assert wrong == []


def exists(path: str) -> bool:
    return (ROOT / path).is_file()


# -- they run -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like a checkout in which one run is."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "examples", folder / "examples")
    run = view_runs.write_run(folder / "runs" / "frozenlake-001")
    write_trajectories(run, {"trained": 2, "failed: env_timeout": 1})
    pages = {
        name: next(b.text for b in BLOCKS if b.page == page and b.language == language) for name, page, language in TASK
    }
    for name, text in pages.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "runs" / "latest").symlink_to(run.name if isinstance(run, Path) else "frozenlake-001")
    return folder


@pytest.fixture
def inside(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(checkout)
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.syspath_prepend(str(checkout))
    return checkout


def distinct(chosen: list[Command]) -> list[Any]:
    """Each command once, whatever number of pages tells it."""
    return list({command.text: pytest.param(command, id=str(command)) for command in chosen}.values())


@pytest.mark.slow
@pytest.mark.parametrize("command", distinct([c for c in COMMANDS if not c.needs]))
def test_every_command_that_needs_nothing_runs(
    command: Command, inside: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_placed", lambda config: [])  # tests/config/test_config.py has a real one
    monkeypatch.setattr(cli, "_about", lambda config: "nothing")
    if command.words[0] != "rl-coserve":
        subprocess.run(["bash", "-c", command.text], cwd=inside, check=True, timeout=60, capture_output=True)
        return
    words = command.words[1:]
    less = {"doctor": ["--quick"], "sim": ["run.steps=3"] if len(words) > 2 else []}  # one simulation is played whole
    assert main([*words, *less.get(words[0], [])]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    "command", distinct([c for c in COMMANDS if c.needs == {"a run"} and c.words[:2] != ["rl-coserve", "view"]])
)
def test_every_command_that_needs_a_run_works_on_one(
    command: Command, inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.words[0] == "rl-coserve"
    words = ["runs/latest" if word == "RUN" else word for word in command.words[1:]]
    assert main(words) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    "command",
    distinct([c for c in COMMANDS if c.words[:2] == ["rl-coserve", "train"] and c.needs <= {"a config", "minutes"}]),
)
def test_every_training_passes_all_checks_that_come_before_it_starts(
    command: Command, inside: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_placed", lambda config: [])  # a Ray for each
    monkeypatch.setattr(cli, "_about", lambda config: "nothing")
    words = [PLACES.get(word, word) for word in command.words[1:]]
    assert main([*words, *(() if "--dry-run" in words else ["--dry-run"])]) == 0
    sys.modules.pop("guess", None)
    assert json.loads(capsys.readouterr().out)["run"]["steps"] > 0


# -- symptoms -------------------------------------------------------------------------------------------------------------


def literals(pattern: str) -> set[str]:
    """What the first group of the pattern is in the orchestrator's sources."""
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "orchestrator").rglob("*.py"))
    return set(re.findall(pattern, text))


def test_every_cause_that_a_trajectory_may_end_with_is_among_the_symptoms() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").partition("## Where trajectories went")[2]
    causes = literals(r'TrajectoryError\(\s*"([a-z_]+)"') | literals(
        r'(?:end_members\(|cause(?:, replace)? = )"failed", "([a-z_]+)"'
    )
    assert len(causes) >= 20
    assert {cause for cause in causes if not re.search(rf"\b{cause}\b", page)} == set()


def test_every_check_of_the_doctor_is_on_the_page_of_installing() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8").partition("| checks |")[2].partition("\n\n")[0]
    told = {name.strip() for row in page.splitlines()[2:] for name in row.split("|")[1].split(",")}
    checks = checks_for_config(
        CHECKS,
        load_config(None, ["environment.backend=kubernetes", "environment.kubernetes.image=i", "relay.kind=fsspec"]),
    )
    assert {check.name for check in (*CHECKS, *checks)} - told == set()


def test_every_extra_is_on_the_page_of_installing() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8").partition("| extra |")[2].partition("\n\n")[0]
    assert set(extras) - set(re.findall(r"`([\w-]+)`", page)) == {"audit", "dev", "docs"}, "those of a checkout alone"


def test_every_alarm_is_among_the_symptoms() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").partition("## Alarms")[2]
    alarms = literals(r'emit\(\s*"alarm",\s*what="(\w+)"') | literals(r'\bAlarm\(\s*"(\w+)"')
    assert len(alarms) >= 9
    assert {alarm for alarm in alarms if f"| `{alarm}` |" not in page} == set()
