"""Rows of a data set on this disk: JSONL, Parquet, or a folder of Hugging Face's.

Guarantees: rows come in the order of the file; of each only the columns that were asked for are read, as JSON values; nothing
of a folder is run, nothing is downloaded; memory is bounded by what the caller keeps. A row that cannot be read is a
:class:`BadRow`, which names the file and the line (of Parquet and Arrow, the row), both counted from 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.api import ConfigError, jsontext

MOST_LINE = 1 << 20  # bytes of a row
_FOLDER = "hf:"
_KINDS = (".jsonl", ".parquet", ".arrow")
_BATCH = 1024


@dataclass(frozen=True, slots=True)
class DataRow:
    """``place``: ``rows.jsonl:3``."""

    place: str
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that is none, and why."""

    place: str
    why: str


def read_rows(field: str, name: str, columns: Sequence[str]) -> Iterator[DataRow | BadRow]:
    """Of ``rows.jsonl``, ``rows.parquet``, ``hf:FOLDER`` (its split ``train``) or ``hf:FOLDER:SPLIT``. ``field``: the config's
    name of it, for the ConfigError that says that there is no such file, or no such column in any row."""
    for file in _files(field, name):
        if file.suffix == ".jsonl":
            yield from _lines(field, file, columns)
        else:
            yield from _table(field, file, columns)


def _files(field: str, name: str) -> list[Path]:
    if name.startswith(_FOLDER):
        return _of_folder(field, name)
    file = Path(name)
    if file.is_dir():
        raise ConfigError(field, name, f"is a folder: write {_FOLDER}{name} if it is a Hugging Face data set")
    if not file.is_file():
        raise ConfigError(field, name, "no such file; paths are relative to the folder in which the run is started")
    if file.suffix not in _KINDS:
        raise ConfigError(field, name, f"must be one of {', '.join(_KINDS)}: write it as JSONL, an object per line")
    return [file]


def _of_folder(field: str, name: str) -> list[Path]:
    """What ``save_to_disk`` wrote (SPLIT/data-00000-of-00001.arrow, or those files alone), or a repository as it was downloaded
    (data/train-00000-of-00002.parquet, train.jsonl)."""
    folder, colon, split = name.removeprefix(_FOLDER).rpartition(":")
    if not colon:
        folder, split = split, "train"
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(
            field, name, "no such folder here; nothing is downloaded: `hf download` or `save_to_disk` it first"
        )
    found = [file for file in sorted(root.rglob("*")) if file.suffix in _KINDS and file.is_file()]
    inside = [file for file in found if _is_split(file.relative_to(root), split)]
    if not inside and not colon and all(file.parent == root and file.stem.startswith("data-") for file in found):
        inside = found  # one data set, saved without splits
    if not inside:
        there = ", ".join(str(file.relative_to(root)) for file in found[:5]) or "no such file"
        fix = f"has no split {split!r} in {', '.join(_KINDS)} (there is: {there}); write {_FOLDER}{folder}:SPLIT"
        raise ConfigError(field, name, fix)
    sets = sorted({_set_of(file.relative_to(root), split) for file in inside})
    if len(sets) > 1:
        suffix = f":{split}" if colon else ""
        named = ", ".join(_FOLDER + str(Path(folder) / one) + suffix for one in sets[:5])
        raise ConfigError(field, name, f"holds {len(sets)} data sets, whose rows are not mixed: name one, of {named}")
    return inside


def _is_split(file: Path, split: str) -> bool:
    """By the names that Hugging Face gives: a folder of the split, or a file that begins with it."""
    return split in file.parts[:-1] or file.stem == split or file.stem.startswith((f"{split}-", f"{split}_"))


def _set_of(file: Path, split: str) -> Path:
    """The folder of the data set (Hugging Face's configuration) that a file of the split belongs to."""
    folders = file.parts[:-1]
    return Path(*folders[: folders.index(split)] if split in folders else folders)


def _lines(field: str, file: Path, columns: Sequence[str]) -> Iterator[DataRow | BadRow]:
    number = 0
    try:
        with file.open("rb") as lines:
            while line := lines.readline(MOST_LINE + 1):
                number += 1
                place = f"{file}:{number}"
                if len(line) > MOST_LINE:
                    yield BadRow(place, f"over {MOST_LINE >> 10} KiB")
                    while line and not line.endswith(b"\n"):
                        line = lines.readline(MOST_LINE)
                    continue
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.strip():
                    yield _row(place, line, columns)
    except OSError as error:
        raise ConfigError(field, str(file), f"cannot be read: {error}") from error


def _row(place: str, line: bytes, columns: Sequence[str]) -> DataRow | BadRow:
    try:
        found = jsontext.parse_object(line, finite=True)
    except ValueError as error:
        return BadRow(place, f"is not a JSON object: {error}")
    missing = [column for column in columns if column not in found]
    if missing:
        return BadRow(place, f"has no {', '.join(missing)}; it has: {', '.join(list(found)[:10])}")
    return DataRow(place, {column: found[column] for column in columns})


def _table(field: str, file: Path, columns: Sequence[str]) -> Iterator[DataRow | BadRow]:
    import pyarrow
    from pyarrow import ipc, parquet

    number = 0
    try:
        with pyarrow.memory_map(str(file)) as source:
            if file.suffix == ".parquet":
                table = parquet.ParquetFile(source)
                names, batches = table.schema_arrow.names, table.iter_batches(_BATCH, columns=list(columns))
            else:
                table = ipc.open_stream(source)  # what `save_to_disk` writes
                names, batches = table.schema.names, (batch for batch in table)
            missing = [column for column in columns if column not in names]
            if missing:
                fix = f"has no column {', '.join(missing)}; it has: {', '.join(names[:10])}"
                raise ConfigError(field, str(file), fix)
            for batch in batches:
                batch.validate(full=True)
                for part in range(0, batch.num_rows, _BATCH):
                    for values in batch.select(list(columns)).slice(part, _BATCH).to_pylist():
                        number += 1
                        yield _value(f"{file}:{number}", values)
    except (
        pyarrow.ArrowException,
        OSError,
        ValueError,
        OverflowError,
    ) as error:  # the last two: values that Python has not
        raise ConfigError(field, str(file), f"cannot be read behind row {number}: {error}") from error


def _value(place: str, values: dict[str, Any]) -> DataRow | BadRow:
    try:
        text = json.dumps(values, allow_nan=False)
    except (TypeError, ValueError) as error:
        return BadRow(place, f"holds what is no JSON: {error}")
    return BadRow(place, f"over {MOST_LINE >> 10} KiB") if len(text) > MOST_LINE else DataRow(place, values)
