"""The house as its imports show it: no circle, no name of a module in a string that leads nowhere, folders that one can read."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from scripts.draw_house import PACKAGES, import_graph, modules
from tests.house.test_repository import tracked

ROOT = Path(__file__).parents[2]
PRODUCT = ("orchestrator", "vllm_rlplugin", "megatron_rlplugin")
OURS = r"(?:orchestrator|vllm_rlplugin|megatron_rlplugin|scripts)"

# Circles that are left, each with its reason. One that is no more must go from here.
CIRCLES: dict[frozenset[str], str] = {}
# Modules of one name, where a name may be asked for by itself.
SAME_NAME = {
    "hookpoints": "what either plugin needs of its engine",
    "judge_server": "the name that users start it by, and the server",
    "stream_training": "one step fed in parts: as the loop sees it, and as Megatron does",
}
FILES = {"orchestrator.log"}  # names of files that look like those of modules
# What users' own scripts, command lines and configs may name.
PUBLIC = [
    "megatron_rlplugin.cpu.activate",
    "megatron_rlplugin.flags.add_rl_args",
    "megatron_rlplugin.install.install",
    "megatron_rlplugin.install.wrap",
    "orchestrator.adapters.verl.CoserveAgentLoopManager",
    "orchestrator.adapters.verl.CoserveCheckpointManager",
    "orchestrator.adapters.rollout_side.RolloutSide",
    "orchestrator.api.ConfigError",
    "orchestrator.api.RolloutWorker",
    "orchestrator.cli.main",
    "orchestrator.cluster.ActorGenCls",
    "orchestrator.cluster.ActorTrainCls",
    "orchestrator.cluster.Cluster",
    "orchestrator.config.Config",
    "orchestrator.resources.ResourceManager",
    "orchestrator.resources.cluster_resources",
    "orchestrator.rewards.code_judge.judge_solution",
    "orchestrator.store.read_trajectories",
    "orchestrator.tasks.registry.find",
    "orchestrator.tasks.rewards.checked",
    "orchestrator.tasks.rewards.frozenlake_success",
    "orchestrator.tasks.scoring.score_apart",
    "orchestrator.tasks.text.Reply",
    "orchestrator.tasks.text.TextTask",
    "orchestrator.tasks.text.replay_now",
    "orchestrator.tasks.vocabulary.words",
    "orchestrator.transfer.Publisher",
    "orchestrator.transfer.RelayEndpoint",
    "orchestrator.transfer.Subscriber",
    "vllm_rlplugin.activate",
    "vllm_rlplugin.endpoints.ControlPlugin",
    "vllm_rlplugin.extension.WorkerExtension",
    "vllm_rlplugin.kv_connector.PrefixConnector",
    "vllm_rlplugin.options.engine_arguments",
    "vllm_rlplugin.register",
    "vllm_rlplugin.scheduler.create_scheduler",
]


def circles(graph: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """The largest sets of modules of which each reaches each."""

    @cache
    def reached(start: str) -> frozenset[str]:
        found: set[str] = set()
        waiting = [start]
        while waiting:
            for name in graph.get(waiting.pop(), set()) - found:
                found.add(name)
                waiting.append(name)
        return frozenset(found)

    return {
        frozenset(other for other in reached(name) if name in reached(other))
        for name in graph
        if name in reached(name)
    }  # fmt: skip


def test_a_circle_is_seen_and_a_chain_is_none() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == set()
    found = circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}})
    assert found == {frozenset("abc"), frozenset("de")}


def test_no_module_imports_itself_through_others() -> None:
    assert circles(import_graph()) == set(CIRCLES)


# -- names of modules in strings ---------------------------------------------------------------------------------------


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def known() -> Mapping[str, Path]:
    return modules()


def top_names(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """What a module or class has by name, and the statement that gives it."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name, node) for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = (item for target in targets for item in ast.walk(target))
            yield from ((item.id, node) for item in names if isinstance(item, ast.Name))
        elif isinstance(node, ast.If | ast.Try):
            yield from top_names([*node.body, *node.orelse])


def is_there(module: str, names: list[str]) -> bool:
    """Whether a module, or a name in it, exists; an imported name where it is defined. Nothing is imported."""
    if not names:
        return module in known()
    if module not in known():
        return False
    if f"{module}.{names[0]}" in known():
        return is_there(f"{module}.{names[0]}", names[1:])
    tree = tree_of(known()[module])
    have = dict(top_names(tree.body))
    found = have.get(names[0])
    if found is None and "__getattr__" in have:  # it makes what it names when it is asked for
        return names[0] in whole_strings(tree)
    if isinstance(found, ast.ImportFrom) and re.match(rf"{OURS}\b", str(found.module)):
        original = next(alias.name for alias in found.names if (alias.asname or alias.name) == names[0])
        return is_there(str(found.module), [original, *names[1:]])
    if isinstance(found, ast.ClassDef) and names[1:]:
        own = {name for node in ast.walk(found) for name in stored(node)}
        return bool(found.bases) or names[1] in own
    return found is not None


def stored(node: ast.AST) -> list[str]:
    """What this part of a class gives it: a method, a field, an attribute of its instances."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        return [node.id if isinstance(node, ast.Name) else node.attr]
    return []


def leads_nowhere(name: str) -> bool:
    """Of ``package.module``, ``package.module:attribute`` or ``package.module.attribute``."""
    module, colon, inside = name.partition(":")
    if colon:
        return not is_there(module, inside.split("."))
    first, *rest = name.split(".")
    return not is_there(first, rest)


@pytest.mark.parametrize(
    "name",
    [
        "orchestrator.nothing",
        "orchestrator.pipeline:nothing",
        "orchestrator.pipeline.nothing",
        "vllm_rlplugin.scheduler.create_schedulers",
        "vllm_rlplugin.patches.nothing",
        "vllm_rlplugin.endpoints.nothing",
        "orchestrator.pipeline.Pipeline.nothing",
    ],
)
def test_what_is_not_there_is_seen(name: str) -> None:
    assert leads_nowhere(name)


@pytest.mark.parametrize("name", PUBLIC)
def test_what_users_import_stays_where_it_was(name: str) -> None:
    assert not leads_nowhere(name)


def python_files() -> list[Path]:
    roots = {*PRODUCT, "patches", "scripts", "examples"}
    return [path for path in tracked() if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in roots]


def whole_strings(tree: ast.Module) -> Iterator[str]:
    """Constants, but no parts of f-strings."""
    parts: set[int] = set()
    for node in ast.walk(tree):  # parents come before their children
        if isinstance(node, ast.JoinedStr):
            parts.update(map(id, node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


def test_every_string_that_names_a_module_of_ours_leads_there() -> None:
    wrong, seen = [], 0
    for path in python_files():
        for text in whole_strings(tree_of(path)):
            if not any(root in text for root in (*PRODUCT, "scripts")):
                continue
            named = re.findall(rf":(?:mod|class|func|meth|data|attr|exc):`~?({OURS}(?:\.\w+)+)`", text)
            if re.fullmatch(rf"{OURS}(\.\w+)+(:\w+)?", text) and text not in FILES:
                named.append(text)
            seen += len(named)
            wrong += [f"{path.relative_to(ROOT)}: {name}" for name in named if leads_nowhere(name)]
    assert wrong == []
    assert seen > 300


def test_what_is_taken_from_a_module_that_is_imported_by_its_name_is_there() -> None:
    found = []
    for path in python_files():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call) and node.value.args:
                name, called = node.value.args[0], ast.unparse(node.value.func)
                if isinstance(name, ast.Constant) and called.endswith("import_module"):
                    found.append(f"{name.value}.{node.attr}")
    ours = [name for name in found if re.match(rf"{OURS}\.", name)]
    assert len(ours) > 3
    assert [name for name in ours if leads_nowhere(name)] == []


def test_every_file_that_a_package_reads_from_its_own_folder_is_there() -> None:
    """``files("package") / "name"``, and rows of (package, file, ...)."""
    asked: list[tuple[str, str]] = []
    for path in python_files():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Tuple) and len(node.elts) > 1:
                first, second = node.elts[:2]
            elif isinstance(node, ast.BinOp) and isinstance(node.left, ast.Call) and node.left.args:
                first, second = node.left.args[0], node.right
            else:
                continue
            if isinstance(first, ast.Constant) and isinstance(second, ast.Constant):
                package, file = str(first.value), str(second.value)
                names_one = re.fullmatch(r"[\w-]+(\.\w+)?", file) and not file.isupper()  # that is a module's constant
                if package in known() and file not in known() and names_one:
                    asked.append((package, file))
    assert len(asked) > 5
    assert [pair for pair in asked if not (known()[pair[0]].parent / pair[1]).exists()] == []


def test_every_entry_point_of_the_distribution_is_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    groups = [project["project"]["scripts"], *project["project"]["entry-points"].values()]
    points = [target for group in groups for target in group.values()]
    points.append(project["tool"]["setuptools"]["dynamic"]["version"]["attr"])
    assert len(points) >= 4
    assert [name for name in points if leads_nowhere(name)] == []


def test_every_program_that_a_script_or_a_container_starts_is_there() -> None:
    """``python -m module``, ``from module import name`` and ``module:name`` in what is no Python and no page."""
    started = []
    for path in tracked():
        parts = path.relative_to(ROOT).parts
        if path.suffix in (".py", ".md", ".svg", ".json", ".xz", ".png") or parts[0] in ("tests", "docs"):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        started += re.findall(rf"-m\"?,?[ ]\"?({OURS}(?:\.\w+)+)", text)
        started += re.findall(rf"\b({OURS}(?:\.\w+)+:[A-Za-z_]\w*)", text)
        started += [f"{module}.{name}" for module, name in re.findall(rf"from ({OURS}[\w.]*) import (\w+)", text)]
    assert len(started) > 5
    assert [name for name in started if leads_nowhere(name)] == []


def test_the_connector_that_vllm_loads_by_two_names_is_there() -> None:
    from vllm_rlplugin.options import KV_CONNECTOR, KV_CONNECTOR_MODULE, SCHEDULER, WORKER_EXTENSION

    names = (f"{KV_CONNECTOR_MODULE}.{KV_CONNECTOR}", SCHEDULER, WORKER_EXTENSION)
    assert [name for name in names if leads_nowhere(name)] == []


# -- folders -----------------------------------------------------------------------------------------------------------


def product_files() -> dict[str, list[Path]]:
    """Folder -> its modules, without ``__init__.py``."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path in tracked():
        parts = path.relative_to(ROOT).parts
        if path.suffix == ".py" and parts[0] in (*PRODUCT, "patches") and path.name != "__init__.py":
            found["/".join(parts[:-1])].append(path)
    return found


def test_no_two_modules_have_one_name() -> None:
    named: dict[str, list[str]] = defaultdict(list)
    for paths in product_files().values():
        for path in paths:
            named[path.stem].append(str(path.relative_to(ROOT)))
    assert {name for name, paths in named.items() if len(paths) > 1} == set(SAME_NAME)


def test_no_folder_holds_more_than_a_reader_can_look_through() -> None:
    sizes = {folder: len(paths) for folder, paths in product_files().items()}
    assert set(PRODUCT) <= set(sizes)
    assert {folder: size for folder, size in sizes.items() if size > (20 if folder in PRODUCT else 30)} == {}


def test_the_graph_has_every_module_of_the_tree() -> None:
    folders = set(PACKAGES.values())
    files = {
        path
        for path in tracked()
        if path.suffix == ".py" and {str(p) for p in path.relative_to(ROOT).parents} & folders
    }
    assert set(known().values()) >= files
