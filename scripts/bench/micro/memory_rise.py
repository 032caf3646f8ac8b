"""Resident memory of a process, and whether it rises: the slope over time with its interval."""

from __future__ import annotations

import os
from array import array

_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_mib() -> float:
    """Of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * _PAGE / 2**20


def slope(points: list[tuple[float, float]]) -> tuple[float, float, float]:
    """(MiB an hour, low, high): least squares over the medians of one-minute windows, 95 % interval of Student's t. Raises
    ValueError for fewer than three windows."""
    windows: dict[int, array[float]] = {}
    for seconds, mib in points:
        windows.setdefault(int(seconds // 60), array("d")).append(mib)
    rows = [((minute + 0.5) / 60, sorted(values)[len(values) // 2]) for minute, values in sorted(windows.items())]
    count = len(rows)
    if count < 3:
        raise ValueError(f"{count} minutes are too few for a slope")
    mean_x, mean_y = sum(x for x, _ in rows) / count, sum(y for _, y in rows) / count
    spread = sum((x - mean_x) ** 2 for x, _ in rows)
    rise = sum((x - mean_x) * (y - mean_y) for x, y in rows) / spread
    left = sum((y - mean_y - rise * (x - mean_x)) ** 2 for x, y in rows)
    half = _student(count - 2) * (left / (count - 2) / spread) ** 0.5
    return rise, rise - half, rise + half


def _student(freedom: int) -> float:
    """Quantile 0.975 of Student's t."""
    table = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
    return table[freedom - 1] if freedom <= len(table) else 1.96 + 2.5 / freedom
