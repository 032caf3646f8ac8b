"""Pause of in-flight requests in a weight update over a 1 Gbit/s link, over the same with the transfer not overlapped.

Real engine, a model of about 64 MB, ``vllm_rlplugin.update_probe`` in a process of its own. The pause is the time from
SUSPEND until RESUME took effect; the longest gap between two tokens of a request, which holds the recomputation of its KV
too, stands in the detail. The reference is abort, update, resubmit: what it loses in tokens. The link is an in-memory
relay whose reader sleeps as long as the bytes would take.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from typing import Any

from orchestrator.api import RunError
from orchestrator.runfolder import describe_machine

NAME = "update-pause"
_BAR = 0.1
_LIMIT = 900.0  # seconds


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. Raises RunError when the probe fails."""
    begun = datetime.datetime.now(datetime.UTC).isoformat()
    command = [sys.executable, "-m", "vllm_rlplugin.update_probe", "--rounds", "1" if quick else "15"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LIMIT)
    except subprocess.TimeoutExpired as error:
        raise RunError(f"the update probe took longer than {_LIMIT:.0f} s") from error
    if done.returncode != 0:
        raise RunError(f"the update probe ended with exit code {done.returncode}: {done.stderr[-800:]}")
    probe: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    ways = probe["ways"]
    ratio = ways["overlapped"]["pause_ms"] / ways["blocking"]["pause_ms"]
    lost = ways["overlapped"]["tokens_lost"] + ways["blocking"]["tokens_lost"]
    return {
        "name": NAME,
        "kind": "real",
        "value": ratio,
        "unit": "pause over the pause with the transfer not overlapped",
        "reference": "tokens lost by abort and resubmit, for each update",
        "reference_value": ways["resubmit"]["tokens_lost"],
        "bar": f"<= {_BAR}, 0 tokens lost",
        "holds": ratio <= _BAR and lost == 0 and ways["overlapped"]["spanning"] > 0,
        **describe_machine(),
        "detail": {
            "quick": quick,
            **probe,
            "samples": probe["rounds"],
            "started": begun,
            "ended": datetime.datetime.now(datetime.UTC).isoformat(),
            "pids": [os.getpid(), int(probe["pid"])],
            "nonce": nonce,
        },
    }
