"""What every benchmark returns, in one form: the figure, what it is compared with, the machine and versions, how it was measured.

It is what ``docs/results/NAME.json`` holds.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from typing import Any

from orchestrator.run_folder import describe_machine


def now() -> str:
    """Of the wall clock, in ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat()


def frame(
    name: str,
    kind: str,
    *,
    value: float,
    unit: str,
    reference: str,
    reference_value: float,
    bar: str,
    holds: bool,
    detail: dict[str, Any],
    quick: bool,
    nonce: str = "",
    begun: str = "",
    pids: Sequence[int] = (),
) -> dict[str, Any]:
    """The result, ended now. ``kind``: real or simulated. ``begun``: see :func:`now`. ``nonce`` comes back as it was given.
    ``pids``: of processes that took part beside this one. ``detail`` may say all these itself, where parts are put together."""
    return {
        "name": name,
        "kind": kind,
        "value": value,
        "unit": unit,
        "reference": reference,
        "reference_value": reference_value,
        "bar": bar,
        "holds": holds,
        **describe_machine(),
        "detail": {
            "quick": quick,
            "started": begun,
            "ended": now(),
            "pids": [os.getpid(), *pids],
            "nonce": nonce,
            **detail,
        },
    }
