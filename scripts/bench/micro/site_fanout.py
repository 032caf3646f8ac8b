"""Bytes over the slow link per update, over the bytes of the version, with four engines behind that link; and the time of an
update over the time that the link needs for one copy.

Real publisher, Mooncake Store, cache of a site (``rl-coserve site-cache``) and receivers of the plugin, one of them in a vLLM;
two hosts are network namespaces whose link the kernel limits to 1 Gbit/s (tbf); bytes are those that the kernel counted on the
far host's interface, of everything that crossed. An update begins with the push and ends when the last receiver has the version
verified, and the vLLM has it loaded. Without a cache: the same, where every receiver asks the relay itself.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.api import ConfigError, RunError
from orchestrator.transfer import RelayEndpoint
from orchestrator.transfer.site_relay import TOKEN_FILE
from scripts.bench.probes.probe_run import CHECKOUT
from scripts.bench.result import frame, now
from tests.support.hosts import Host, Hosts, end, why_not

NAME = "site-fanout"
ENGINES = 4
RATE = 1e9  # bits per second
LAYERS, QUICK_LAYERS = 12, 2
_BYTES_BAR, _TIME_BAR = 1.1, 1.3
_PROBE = "scripts.bench.probes.vllm.fanout_probe"
_TOKEN = "site-fanout-0123456789"


class Peer:
    """A process that is told what to do by lines of JSON."""

    def __init__(self, host: Host, command: list[str], variables: dict[str, str]) -> None:
        variables = {"PYTHONPATH": str(CHECKOUT), **variables}
        self.process = host.start(
            [sys.executable, "-m", *command],
            variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if not os.environ.get("SITE_FANOUT_LOUD") else None,
        )

    def tell(self, what: dict[str, Any]) -> None:
        """Without waiting for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """The next answer. Raises RunError when it ended."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        said = self.process.stderr.read()[-1500:] if self.process.stderr else ""
        raise RunError(f"a process of the bench ended: {said}")

    def close(self) -> None:
        """Idempotent."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            end(self.process)


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. Raises ConfigError where there can be no hosts, RunError when a process ends."""
    if why := why_not():
        raise ConfigError("bench", NAME, f"needs network namespaces with links of a limited rate: {why}")
    begun, load = now(), os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="rl-coserve-bench-") as folder:
        model = Path(folder) / "model"
        write = [sys.executable, "-m", _PROBE, "model", str(QUICK_LAYERS if quick else LAYERS), str(model)]
        subprocess.run(write, check=True, cwd=CHECKOUT, capture_output=True)
        with_cache = _measure(Path(folder) / "with", model, cached=True, rounds=2 if quick else 7, engine=not quick)
        without = _measure(Path(folder) / "without", model, cached=False, rounds=1 if quick else 3, engine=not quick)
    value = max(row["bytes_ratio"] for row in with_cache)
    control = min(row["bytes_ratio"] for row in without)  # less than a copy each: somebody did not read
    times = [row["time_ratio"] for row in with_cache]
    size = with_cache[0]["version_bytes"]
    return frame(
        NAME,
        "real code, store and cache; hosts are network namespaces, their link limited by the kernel",
        value=value,
        unit=f"bytes that came in over the slow link / bytes of the version, {ENGINES} receivers, worst update",
        reference="the same without a cache, best update",
        reference_value=control,
        bar=f"<= {_BYTES_BAR}; an update <= {_TIME_BAR} x the link's time for one copy",
        holds=None
        if quick
        else value <= _BYTES_BAR and statistics.median(times) <= _TIME_BAR and control > ENGINES - 0.5,
        detail={
            "version_bytes": size,
            "link_bits_per_second": RATE,
            "link_seconds": 8 * size / RATE,
            "time_ratio": {"median": statistics.median(times), "worst": max(times), "best": min(times)},
            "time_ratio_without": {"median": statistics.median(row["time_ratio"] for row in without)},
            "with_cache": with_cache,
            "without_cache": without,
            "samples": len(with_cache),
            "shrunk": f"{QUICK_LAYERS} layers for {LAYERS}, no vLLM, 2 updates for 7" if quick else "",
            "load_average": {"start": load, "end": os.getloadavg()},
        },
        quick=quick,
        nonce=nonce,
        begun=begun,
    )


def _measure(folder: Path, model: Path, *, cached: bool, rounds: int, engine: bool) -> list[dict[str, Any]]:
    """Updates one after the other; the first is a warm-up."""
    folder.mkdir()
    with Hosts(2, "1gbit") as hosts, ExitStack() as stack:
        near, far = hosts.all
        size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        endpoint = RelayEndpoint(
            "fanout",
            "mooncake",
            f"{near.address}:1",
            str(folder / "metadata.sqlite"),
            host=near.address,
            segment_bytes=4 * size + (256 << 20),
            bucket_bytes=16 << 20,
        )
        publisher = Peer(near, [_PROBE, "publisher", json.dumps(endpoint.to_dict()), str(model)], {})
        stack.callback(publisher.close)
        endpoint = replace(endpoint, master=publisher.hear()["master"], host="", segment_bytes=0)
        token = folder / "token"
        token.write_text(_TOKEN)
        if cached:
            place = stack.enter_context(_cache(far, token))
            endpoint = replace(endpoint, cache=place)
        roles = ["receiver"] * (ENGINES - engine) + ["engine"] * engine
        told = json.dumps(endpoint.to_dict())
        peers = [Peer(far, [_PROBE, role, told, str(model)], {TOKEN_FILE: str(token)}) for role in roles]
        for peer in peers:
            stack.callback(peer.close)
        for peer in peers:
            peer.hear()
        rows = [_update(version, far, publisher, peers) for version in range(rounds + 1)]
    for row in rows:
        print(NAME, "with" if cached else "without", json.dumps(row), file=sys.stderr)
    return rows[1:]


@contextmanager
def _cache(far: Host, token: Path) -> Iterator[str]:
    peer = Peer(far, ["orchestrator.cli", "site-cache", "--token-file", str(token)], {})
    try:
        yield peer.hear()["place"]
    finally:
        end(peer.process)


def _update(version: int, far: Host, publisher: Peer, peers: list[Peer]) -> dict[str, Any]:
    time.sleep(0.5)  # what the last one left on its way
    before = far.received()
    publisher.tell({"publish": version})
    pushed = publisher.hear()
    for peer in peers:
        peer.tell({"fetch": version})
    got = [peer.hear() for peer in peers]
    came = far.received() - before
    if wrong := [answer for answer in got if answer["error"] or answer["content"] != pushed["content"]]:
        raise RunError(f"version {version} did not arrive: {wrong}")
    seconds = max(answer["ended"] for answer in got) - pushed["began"]
    return {
        "version_bytes": pushed["bytes"],
        "came_in": came,
        "bytes_ratio": came / pushed["bytes"],
        "seconds": seconds,
        "time_ratio": seconds / (8 * pushed["bytes"] / RATE),
        "push_seconds": pushed["ended"] - pushed["began"],
        "receivers": [answer["ended"] - pushed["began"] for answer in got],
        "engine": {name: got[-1][name] for name in ("seconds",) if name in got[-1]},
        "prepared": got[-1].get("prepared", got[-1]["ended"]) - pushed["began"],
        "past_cache": [answer["past_cache"] for answer in got if answer["past_cache"]],
    }
