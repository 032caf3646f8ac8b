"""Recorded trajectories as training batches: a run folder's Parquet files, without the orchestrator that wrote them.

Guarantees: only trajectories that were trained are read, each batch holds exactly those of one training step, in the order
in which they stood in it; the version of a batch is the one that it was trained at. What cannot be told from the files is
an error, never a guess: a folder without trajectories, a missing column, a step with a trajectory twice.

The order comes from the column ``position``. Writer and column meanings: ``orchestrator.store``. Needs pyarrow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.api import ConfigError, TrainBatch, TrainSample, VersionSpans, merge_spans

FIELD = "--rl-trajectories"
TRAINED = "trained"
_POSITION, _WEIGHT = "position", "weight"
_CONTEXTS = "contexts"  # of long episodes that were shown several
_COLUMNS = (
    *("trajectory_id", "group_id", "turns", "total_reward", "outcome", "step"),
    *(_POSITION, _WEIGHT, _CONTEXTS),
)
_LAYOUT = "task=*/date=*/version=*/part-*.parquet"


def read_batches(folder: str | Path, *, first_version: int = 0, steps: int | None = None) -> Iterator[TrainBatch]:
    """The batches of a run in the order of training, at most ``steps`` of them (None: all).

    ``folder`` is the run's, or its ``trajectories`` folder. Step ``s`` (0-based) was trained at version
    ``first_version + s``: a run publishes once a step. Raises ConfigError for a folder that holds no such thing.
    """
    where: dict[int, list[Path]] = {}
    for file in trajectory_files(folder):
        for step in _trained_steps(file):
            where.setdefault(step, []).append(file)
    if not where:
        raise ConfigError(
            FIELD, str(folder), "holds no trained trajectory; the run ended before its first training step"
        )
    numbers = sorted(where)
    for step in numbers if steps is None else numbers[:steps]:
        rows = [row for file in where[step] for row in _rows(file, step)]
        samples = tuple(sample for row in _in_order(rows, step, folder) for sample in to_samples(row))
        yield TrainBatch(step=step, version=first_version + step, samples=samples)


def trajectory_files(folder: str | Path) -> list[Path]:
    """The Parquet files of a run folder, what was rolled back not included. Raises ConfigError when there is none."""
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(FIELD, str(folder), "is not a folder; give a run folder, or the trajectories folder in it")
    for root in (path / "trajectories", path):
        # The store's layout; names that begin with an underscore (rolled back) do not match.
        if files := sorted(root.glob(_LAYOUT), key=lambda file: (file.name, str(file))):
            return files
    fix = f"holds no trajectories ({_LAYOUT}); give a run folder, or the trajectories folder in it"
    raise ConfigError(FIELD, str(folder), fix)


def to_samples(row: Mapping[str, Any]) -> list[TrainSample]:
    """One row as the trainer needs it: a sample for each context. Raises ConfigError when its sequences do not fit each
    other."""
    begins = {int(start["turn"]): start["token_ids"] for start in row.get(_CONTEXTS) or ()}
    starts = [0, *sorted(turn for turn in begins if turn)]
    ends = [*starts[1:], len(row["turns"])]
    return [_sample(row, first, end, begins.get(first, [])) for first, end in zip(starts, ends, strict=True)]


def _sample(row: Mapping[str, Any], first: int, end: int, before: Sequence[int]) -> TrainSample:
    """The turns from ``first`` to ``end``, behind the tokens ``before``."""
    name = row["trajectory_id"]
    token_ids: list[int] = list(before)
    loss_mask: list[int] = [0] * len(before)
    logprobs: list[float] = [0.0] * len(before)
    spans: list[tuple[int, int]] = []
    for turn in row["turns"][first:end]:
        observed, acted = turn["observation_ids"], turn["action_ids"]
        made = [(span["version"], span["count"]) for span in turn["versions"]]
        if len(turn["logprobs"]) != len(acted) or sum(count for _, count in made) != len(acted):
            raise ConfigError(FIELD, name, "has a turn whose tokens, log-probs and versions differ in number")
        token_ids += [*observed, *acted]
        loss_mask += [0] * len(observed) + [1] * len(acted)
        logprobs += [0.0] * len(observed) + list(turn["logprobs"])
        spans += made
    if row["total_reward"] is None:
        raise ConfigError(FIELD, name, "was trained but has no reward; the file is damaged")
    versions: VersionSpans = merge_spans(spans)
    weight = row.get(_WEIGHT)
    return TrainSample(
        name,
        row["group_id"],
        tuple(token_ids),
        tuple(loss_mask),
        tuple(logprobs),
        versions,
        row["total_reward"],
        first,
        1.0 if weight is None else weight,
    )


def _trained_steps(file: Path) -> set[int]:
    table = _read(file, ("step", "outcome"))
    pairs = zip(table["step"].to_pylist(), table["outcome"].to_pylist(), strict=True)
    return {step for step, outcome in pairs if outcome == TRAINED}


def _rows(file: Path, step: int) -> list[dict[str, Any]]:
    """Rows of one step that were trained."""
    rows: list[dict[str, Any]] = _read(file, _COLUMNS).to_pylist()
    return [row for row in rows if row["step"] == step and row["outcome"] == TRAINED]


def _in_order(rows: Sequence[dict[str, Any]], step: int, folder: str | Path) -> list[dict[str, Any]]:
    names = [row["trajectory_id"] for row in rows]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(FIELD, str(folder), f"has trajectory {twice} twice in step {step}; are two runs mixed here?")
    positions = [row[_POSITION] for row in rows]
    if None in positions:
        raise ConfigError(FIELD, str(folder), f"step {step}: some of its trajectories have no position in the batch")
    if sorted(positions) != list(range(len(rows))):
        raise ConfigError(FIELD, str(folder), f"step {step}: {len(rows)} trajectories at positions {sorted(positions)}")
    return sorted(rows, key=lambda row: int(row[_POSITION]))


def _read(file: Path, columns: Sequence[str]) -> Any:
    """These columns, all of which the file must have."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ConfigError(FIELD, "pyarrow", f"is needed to read Parquet files; install it ({error})") from error
    try:
        with pq.ParquetFile(file, page_checksum_verification=True) as data:
            names = data.schema_arrow.names
            missing = [name for name in columns if name not in names]
            if missing:
                fix = f"has no column {missing[0]!r}, so it is not a run's trajectory file"
                raise ConfigError(FIELD, str(file), fix)
            return data.read(columns=list(columns), use_threads=False)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ConfigError(FIELD, str(file), f"cannot be read as Parquet: {error}") from error
