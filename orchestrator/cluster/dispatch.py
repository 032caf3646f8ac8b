"""What a cluster does with arguments and results: cut the first, put the second together. Pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from orchestrator.api import ConfigError


def scatter(method: str, value: Any, parts: int) -> list[Any]:
    """Contiguous parts, in order, whose sizes differ by one at most; at most as many as there are items."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence | np.ndarray):
        raise ConfigError(
            f"{method}: argument", type(value).__name__, "scatter cuts a list, tuple or array: pass one first"
        )
    count = min(parts, len(value)) or 1
    edges = [len(value) * index // count for index in range(count + 1)]
    return [value[begin:end] for begin, end in itertools.pairwise(edges)]


def aggregate(method: str, how: str, values: Sequence[Any]) -> Any:
    """The workers' results, by rank, as one. Raises ConfigError for results that cannot be put together so."""
    if how == "list":
        return list(values)
    if how == "first":
        return values[0]
    try:
        if how == "concat":
            return _concatenated(values)
        total = _added(values)
        return total if how == "sum" else _scaled(total, len(values))
    except (TypeError, ValueError, KeyError) as error:
        kinds = ", ".join(sorted({type(value).__name__ for value in values}))
        fix = f"these results ({kinds}) have no {how} ({error}); use aggregate='list'"
        raise ConfigError(f"{method}: aggregate", how, fix) from error


def _concatenated(values: Sequence[Any]) -> Any:
    if all(isinstance(value, np.ndarray) for value in values):
        return np.concatenate(list(values))
    if not all(isinstance(value, list | tuple) for value in values):
        raise TypeError("only lists, tuples and arrays can be joined")
    return [item for value in values for item in value]


def _added(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        if any(not isinstance(value, Mapping) or value.keys() != first.keys() for value in values):
            raise KeyError("their keys differ")
        return {key: _added([value[key] for value in values]) for key in first}
    if not all(isinstance(value, int | float | np.ndarray | np.generic) for value in values):
        raise TypeError("only numbers and arrays can be added")
    total = first
    for value in values[1:]:
        total = total + value
    return total


def _scaled(total: Any, count: int) -> Any:
    if isinstance(total, Mapping):
        return {key: _scaled(value, count) for key, value in total.items()}
    return total / count
