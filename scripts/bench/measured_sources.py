"""Which sources a figure was measured on, and which of the committed ones are older than the code as it is.

The sources of a benchmark are the files of this project that its module imports, theirs, and so on (found in the text, imports in
functions too) but what only writes results down, the packed data and the scenarios that they name, and all of a plugin, its
patches and its C code where the benchmark needs that engine: processes import those. Of a simulated figure what only real runs
enter is left out (:data:`ONLY_REAL`). Every result carries their hash, and so does each part of one that was measured in parts.

``python -m scripts.bench.measured_sources`` lists each committed result: what it was measured on, and how many lines of its
sources changed since (a file that was only moved has none). A result without a commit of its own is taken to be of the one that
brought its file. ``--page`` writes ``docs/results/measured_on.md``: commit, seeds and intervals of each.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
RESULTS = Path("docs/results")
_OURS = ("orchestrator", "vllm_rlplugin", "megatron_rlplugin", "scripts")
# of an engine that a benchmark names among its needs: what its processes import
_OF_ENGINE = {
    "vllm": ("vllm_rlplugin", "patches/vllm", "csrc"),
    "megatron-core": ("megatron_rlplugin", "patches/megatron"),
    "ray": ("orchestrator",),
}
_KINDS = (".py", ".toml", ".c", ".h", ".xz")
_SETUPS, _SCENARIOS = "orchestrator.sim.paper_setups", Path("orchestrator/sim/scenarios")
# what writes results down, or says something about them: no figure is another one for it
_WRITES_DOWN = tuple(
    f"scripts.bench{name}"
    for name in (
        "",
        ".result",
        ".measured_sources",
        ".cells",
        ".papers.calibration",
        ".papers.refusals",
        ".papers.sweep",
    )
)
# what the composition root imports for real runs alone: no simulated one enters it
ONLY_REAL = tuple(
    f"orchestrator.{name}."
    for name in (
        "agents.agent_manager",
        "child_process",
        "environments.pod_manifests",
        "environments.pods",
        "environments.subprocesses",
        "ops",
        "sandbox",
    )
)


class Age(NamedTuple):
    """A committed result. ``commit``: what it was measured on; ``said``: by itself, not by its file's history. ``files`` and
    ``lines`` of its sources changed since; None where that is not known. ``same``: its hash is that of the sources now; None
    without one."""

    name: str
    commit: str
    said: bool
    clean: bool | None
    same: bool | None
    files: int | None
    lines: int | None


def sources_of(name: str) -> tuple[Path, ...]:
    """The files, in order, as paths from the checkout; none for what is no benchmark."""
    from scripts.bench import BENCHES  # it imports nothing of this

    bench = BENCHES.get(name)
    if bench is None:
        return ()
    mine = _file_of(bench.module)
    simulated = mine is not None and "scripts.bench.papers.runner.Figure" in _imports(ROOT / mine)
    found = set(_closure(bench.module, simulated))
    found.update(_data_of(found))
    for engine in re.findall(r"[\w-]+", bench.needs):
        for folder in _OF_ENGINE.get(engine, ()):
            found.update(_files_under(folder))
    return tuple(sorted(found))


def _data_of(modules: Iterable[Path]) -> set[Path]:
    """The scenarios that they name, and the packed data beside them that they name, or the beginning of."""
    found, names = set[Path](), set[str]()
    for file in modules:
        texts = _texts(ROOT / file)
        if any(f"{name}.".startswith(f"{_SETUPS}.") for name in (*_imports(ROOT / file), _name_of(file))):
            names |= texts
        for packed in (ROOT / file).parent.glob("*.json.xz"):
            if any(packed.name.startswith(text) for text in texts if text.endswith("_")):
                found.add(packed.relative_to(ROOT))
    return found | {file.relative_to(ROOT) for file in (ROOT / _SCENARIOS).glob("*.toml") if file.stem in names}


@cache
def _texts(file: Path) -> frozenset[str]:
    """All strings that a module has."""
    parts = ast.walk(ast.parse(file.read_bytes()))
    return frozenset(part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str))


@cache
def _files_under(folder: str) -> tuple[Path, ...]:
    return tuple(path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.suffix in _KINDS)


def digest_of(files: Iterable[Path], root: Path = ROOT) -> str:
    """Of the names and contents of files; "" for none."""
    found, empty = hashlib.sha256(), True
    for file in files:
        empty = False
        found.update(f"{file.as_posix()}\0{len(text := (root / file).read_bytes())}\0".encode() + text)
    return "" if empty else found.hexdigest()[:16]


@cache
def _closure(module: str, simulated: bool) -> frozenset[Path]:
    """What a module imports, theirs, and so on."""
    todo, seen = [_file_of(module)], set[Path]()
    while todo:
        file = todo.pop()
        if file is None or file in seen:
            continue
        seen.add(file)
        for name in _imports(ROOT / file):
            left_out = name in _WRITES_DOWN or (simulated and f"{name}.".startswith(ONLY_REAL))
            if name.partition(".")[0] in _OURS and not left_out:
                todo.append(_file_of(name))
    return frozenset(seen)


def _name_of(file: Path) -> str:
    return ".".join(file.with_suffix("").parts)


def _file_of(module: str) -> Path | None:
    place = Path(*module.split("."))
    return next((file for file in (place.with_suffix(".py"), place / "__init__.py") if (ROOT / file).is_file()), None)


@cache
def _imports(file: Path) -> frozenset[str]:
    found = set[str]()
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return frozenset(found)


@cache
def changes_since(commit: str, root: Path = ROOT) -> dict[str, int] | None:
    """Lines by which each file differs from what it was, under its name of now; None where git does not know the commit."""
    try:
        said = _git(root, "diff", "--numstat", "--find-renames", "-z", commit).split("\0")
    except (OSError, subprocess.CalledProcessError):
        return None
    found, place = dict[str, int](), 0
    while place < len(said) and said[place]:
        added, removed, name = said[place].split("\t")
        moved = not name  # then its two names follow
        found[said[place + 2] if moved else name] = sum(int(part) for part in (added, removed) if part.isdigit())
        place += 3 if moved else 1
    return found


def ages(root: Path = ROOT) -> list[Age]:
    """Of every committed result that a benchmark makes."""
    found = []
    for file in sorted((root / RESULTS).glob("*.json")):
        data: Any = json.loads(file.read_text(encoding="utf-8"))
        files = sources_of(data["name"]) if isinstance(data, dict) and "name" in data else ()
        if not files:
            continue
        source: dict[str, Any] = data.get("source") or {}
        said, measured = source.get("commit") or "", source.get("sources")
        commit = said or _brought(root, file)
        changes = changes_since(commit, root)
        lines = None if changes is None else [changes[one] for path in files if changes.get(one := path.as_posix())]
        counts = (None, None) if lines is None else (len(lines), sum(lines))
        same = measured == digest_of(files, root) if measured else None
        found.append(Age(file.stem, commit, bool(said), source.get("clean"), same, *counts))
    return found


_PAGE = """# What each figure was measured on

Made by `python -m scripts.bench.measured_sources --page`; without `--page` it says how many lines of a figure's sources
changed since. **Its own**: the file says the commit. **Of its file**: it does not, and this is the commit that brought
it, so it was measured on that code or on somewhat older. A dash under seeds: the file names none (one seed, pairs or
rounds of something real, or nothing that a seed decides). A dash under interval: the file has none, so that the figure
is quoted with its runs, with their worst, or as one observation.

| figure | kind | commit | tree | seeds | interval |
| --- | --- | --- | --- | --- | --- |
"""


def page(root: Path = ROOT, known: dict[str, str] | None = None) -> str:
    """The page, of all committed results. ``known``: commits of files that say none, by name; else git is asked."""
    lines = []
    for file in sorted((root / RESULTS).glob("*.json")):
        data: Any = json.loads(file.read_text(encoding="utf-8"))
        found: dict[str, Any] = data if isinstance(data, dict) else {}
        source, detail = found.get("source") or {}, found.get("detail") or {}
        if said := source.get("commit") or detail.get("commit"):
            commit = f"{said[:8]}, its own"
        else:
            brought = known[file.stem] if known is not None else _brought(root, file)[:8]
            commit = f"{brought}, of its file"
        tree = {True: "clean", False: "with changes", None: "-"}[source.get("clean")]
        seeds = detail.get("seeds", found.get("seeds")) or _seeds_of(detail.get("runs"), data)
        said_seeds = ", ".join(map(str, seeds)) if isinstance(seeds, list) and len(seeds) < 9 else seeds and "many"
        kind = str(found.get("kind", "simulated")).partition(",")[0].partition(";")[0]
        interval = "yes" if _has_interval(data) else "-"
        lines.append(f"| [{file.stem}]({file.name}) | {kind} | {commit} | {tree} | {said_seeds or '-'} | {interval} |")
    return _PAGE + "\n".join(lines) + "\n"


def _seeds_of(runs: Any, rows: Any) -> list[int]:
    """Of a file that names them run by run, or of an ablation's rows, which count them from 0."""
    if isinstance(rows, list):
        return list(range(len(rows[0]["step_seconds"])))
    if not isinstance(runs, list):
        return []
    return sorted({run["seed"] for run in runs if isinstance(run, dict) and "seed" in run})


def _has_interval(found: Any) -> bool:
    """Whether a file has an interval of anything."""
    if isinstance(found, dict):
        named = any(found[name] is not None and "interval" in name for name in found) or {"low", "high"} <= set(found)
        return named or any(_has_interval(value) for value in found.values())
    return isinstance(found, list) and any(_has_interval(value) for value in found)


def _brought(root: Path, file: Path) -> str:
    return _git(root, "log", "-1", "--format=%H", "--", str(file.relative_to(root)))


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip("\n")


def main() -> None:
    """Print the list, those that changed most first; or write the page."""
    if sys.argv[1:] == ["--page"]:
        (ROOT / RESULTS / "measured_on.md").write_text(page(), encoding="utf-8")
        return
    rows = ages()
    older = [row for row in rows if row.same is not True and row.lines != 0]
    print(
        f"{len(rows) - len(older)} of {len(rows)} results are of the sources as they are; of the others, lines changed:"
    )
    for row in sorted(older, key=lambda row: -(row.lines or 0)):
        where = row.commit[:8] + ("" if row.said else ", that of its file")
        tree = {True: "", False: ", with changes", None: ""}[row.clean]
        print(f"{row.name:24} {row.lines!s:>7} in {row.files!s:>3} files, since {where}{tree}")


if __name__ == "__main__":
    main()
