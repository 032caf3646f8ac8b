"""For the serving team: what is lent of a device's pool, to whom, and how to take it back.

``rl-coserve lend`` and ``rl-coserve reclaim`` are carried out by :func:`run_command`. Guarantees: who may use the
pool's file (its owner only) may decide; what was said stays in the pool until something else is said, and holds for
rollout engines that join later. The serving engine carries it out, also when it is idle; where there is none, budgets
are set here. ``--kill`` ends rollout engines at once, whatever they do, by their process, which must have the pool's
file open; nothing is lent afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from dataclasses import asdict
from typing import Any

from orchestrator.api import ConfigError, RetryableError
from vllm_rlplugin.kvpool.engine.pool_engine import pool_path
from vllm_rlplugin.kvpool.ledger.page_ledger import PagePool, TenantGone
from vllm_rlplugin.kvpool.ledger.tenant_processes import kill_tenants
from vllm_rlplugin.kvpool.ledger.tenant_words import ControlWord, RolloutWords, ServingWords
from vllm_rlplugin.server.server_lease import LeaseBook, lease_path

WAIT = 5.0  # seconds that `reclaim` waits until everything is back
_PART = 1_000_000
_TOLERATED = 0.01  # share of tokens that may be late where the SLO is of the 99th percentile


def lending_status(pool: PagePool) -> dict[str, Any]:
    """What is lent, by whom and to whom. Plain data; pages, seconds, tokens. Who is gone is not in it."""
    pool.reap()
    view, controls = pool.view(), pool.controls()
    serving = view.serving
    said = ServingWords.unpack(pool.read(serving.slot)) if serving is not None else None
    rollouts = []
    for tenant in view.tenants:
        if tenant.role == "rollout":
            told = RolloutWords.unpack(pool.read(tenant.slot)) or RolloutWords()
            row = {"name": tenant.name, "pid": tenant.pid, "pages": tenant.used, "budget": tenant.budget}
            rollouts.append({**row, **asdict(told)})
    return {
        "pages": view.pages,
        "page_bytes": view.page_bytes,
        "free": view.free,
        "headroom": view.headroom,
        "most": (most - 1) / _PART if (most := controls[ControlWord.LENT] or controls[ControlWord.FLAG]) else None,
        "dry_run": bool(controls[ControlWord.DRY]),
        "serving": None if serving is None else {"name": serving.name, "pid": serving.pid, "pages": serving.used},
        "slo": None if said is None else _plain(asdict(said)),
        "rollouts": rollouts,
    }


def lease_status(pool: PagePool) -> dict[str, Any] | None:
    """Which RL job has the pool's GPU, and for how long unless it renews that; None: none. Raises ConfigError."""
    try:
        lease = LeaseBook("", lease_path(pool.path)).current_lease()
    except RetryableError as error:
        raise ConfigError("--pool", str(pool.path), str(error)) from error
    return None if lease is None else {"job": lease.job, "seconds": round(lease.seconds_left(time.monotonic()), 3)}


def set_lent(pool: PagePool, most: float | None, dry: bool | None) -> None:
    """Say how much of the pool is lent at most, and whether rollouts only say what they would run; None: as before."""
    if most is not None:
        if not 0 <= most <= 1:
            raise ConfigError("--max", most, "give a share of the pool, from 0 to 1")
        pool.control(ControlWord.LENT, round(most * _PART) + 1)
        pool.reap()  # a serving engine that died a moment ago will not carry it out
        if pool.view().serving is None:
            _share(pool, int(most * pool.pages))
    if dry is not None:
        pool.control(ControlWord.DRY, int(dry))


def reclaim_pages(pool: PagePool, *, end: bool, wait: float = WAIT) -> dict[str, Any]:
    """Take everything back; ``end``: kill whoever has any. Returns how many pages are still out, and who was killed."""
    set_lent(pool, 0.0, None)
    killed: list[int] = []
    deadline = time.monotonic() + wait
    while True:
        tenants = [tenant for tenant in pool.view().tenants if tenant.role == "rollout"]
        if end:
            left = [pid for tenant in tenants for pid in tenant.pids if pid not in killed]
            killed += kill_tenants(left, pool.path)
        pool.reap()
        least = {
            tenant.slot: (RolloutWords.unpack(pool.read(tenant.slot)) or RolloutWords()).minimum for tenant in tenants
        }
        out = 0 if not tenants else sum(tenant.used for tenant in pool.view().tenants if tenant.role == "rollout")
        if out <= (0 if end else sum(least.values())) or time.monotonic() >= deadline:
            return {"out": out, "kept": 0 if end else min(out, sum(least.values())), "killed": killed}
        time.sleep(0.02)


def _share(pool: PagePool, pages: int) -> None:
    """Without a serving engine: equal shares, at once."""
    found = [tenant for tenant in pool.view().tenants if tenant.role == "rollout"]
    told = [(tenant, RolloutWords.unpack(pool.read(tenant.slot)) or RolloutWords()) for tenant in found]
    active = [(tenant, said) for tenant, said in told if not said.inactive]
    for tenant, said in active:
        with contextlib.suppress(TenantGone):  # it left since it was looked at
            pool.set_budget(tenant.slot, pages // len(active) + said.minimum, tenant.revision + 1)


def _plain(values: Any) -> Any:
    """Without infinities, which JSON has not."""
    if isinstance(values, dict):
        return {key: _plain(value) for key, value in values.items()}
    return None if isinstance(values, float) and abs(values) == float("inf") else values


def _open(name: str) -> PagePool:
    path = pool_path(name)
    if not path.exists():
        prefix = pool_path("").name
        files = [file for file in path.parent.glob(f"{prefix}*") if file.suffix not in (".pages", ".log", ".lock")]
        there = sorted(file.name.removeprefix(prefix) for file in files)
        known = (
            f"yours are: {', '.join(there)}" if there else "you have none: a `vllm serve` with --rl-kv-pool makes it"
        )
        raise ConfigError("--pool", name, f"this user has no such pool; {known}; only its owner may lend it")
    return PagePool.open(path)


def describe_status(found: dict[str, Any]) -> str:
    """For people; the first line is the verdict."""
    serving, slo = found["serving"], found["slo"]
    held = sum(row["pages"] for row in found["rollouts"])
    owners = ", ".join(f"{row['name']} {row['pages']}" for row in found["rollouts"] if row["pages"])
    verdict = f"rollouts hold {_amount(found, held)}{': ' if owners else ''}{owners}"
    lines = [verdict + (f"; {_kept_slos(slo)}" if slo is not None else "")]
    most = found["most"]
    may = (
        "what a serving engine's --rl-kv-pool-lent will say, 0 unless it is given"
        if most is None
        else f"{most:.0%}"
        if most
        else "nothing, until `rl-coserve lend --max` says otherwise"
    )
    dry = "; dry run: rollouts compute nothing" if found["dry_run"] else ""
    lines.append(f"lent at most: {may}{dry}")
    lines.append(
        f"pool: {_amount(found, found['pages'])}; free {found['free']}, {found['headroom']} of them kept for serving's bursts"
    )
    lines.append(
        "serving: no engine"
        if serving is None
        else f"serving: process {serving['pid']}, {_amount(found, serving['pages'])}"
    )
    if slo is not None:
        state = slo["state"]
        slack = ", ".join(
            f"{what} {'-' if (value := state[name]) is None else f'{1000 * value:.1f} ms'}"
            for what, name in (("TTFT", "ttft_slack"), ("TPOT", "tpot_slack"), ("arriving", "arriving"))
        )
        lines.append(f"  slack: {slack} ({'busy' if state['busy'] else 'idle'}); admission: {slo['mode']}")
        for what, every, late, blamed in _misses(slo):
            lines.append(f"  {what} misses: {late:,} of {every:,} tokens ({blamed:,} caused by rollouts)")
    if (lease := found.get("lease")) is not None:
        lines.append(f"lease: job {lease['job']}, for {lease['seconds']:.0f} s unless it is renewed")
    for row in found["rollouts"]:
        lines.append(
            f"rollout {row['name']}: process {row['pid']}, {_state(row)}; {row['tokens']:,} tokens in "
            f"{row['steps']:,} admitted steps, {row['would']:,} in dry runs; {row['refused']:,} steps refused, "
            f"{row['stalls']:,} requests stalled, {row['returned']:,} handed back"
        )
    return "\n".join(lines)


def _amount(found: dict[str, Any], pages: int) -> str:
    size = pages * found["page_bytes"] / (1 << 20)
    share = "" if pages == found["pages"] else f", {pages / found['pages']:.0%} of the pool"
    return f"{pages:,} pages ({size:,.4g} MiB{share})"


def _misses(slo: dict[str, Any]) -> list[tuple[str, int, int, int]]:
    """(which SLO, tokens, late ones, those that rollouts made late)."""
    return [
        ("TTFT", slo["firsts"], slo["late_first"], slo["blamed_first"]),
        ("TPOT", slo["nexts"], slo["late_next"], slo["blamed_next"]),
    ]


def _kept_slos(slo: dict[str, Any]) -> str:
    """The SLO is of the 99th percentile: it is kept while at most one token of a hundred is late."""
    missed = [(what, late, every) for what, every, late, _ in _misses(slo) if late > _TOLERATED * every]
    if not missed:
        return "users' P99 is within its SLOs"
    return "users' P99 misses " + " and ".join(f"{what} ({late / every:.1%} late)" for what, late, every in missed)


def _describe_reclaimed(found: dict[str, Any], page_bytes: int) -> str:
    killed = f"; killed: processes {', '.join(map(str, found['killed']))}" if found["killed"] else ""
    if not found["out"]:
        return f"everything is back{killed}"
    size = found["out"] * page_bytes / (1 << 20)
    least = (
        "the minimum of running engines; --kill frees them" if found["out"] <= found["kept"] else "not given back yet"
    )
    return f"{found['out']:,} pages ({size:,.4g} MiB) remain in use, {least}{killed}"


def _state(row: dict[str, Any]) -> str:
    weights = f", weights {row['weights'] / (1 << 20):.1f} MiB" if row["weights"] or row["inactive"] else ""
    took = f", last activated in {row['activation']:.3f} s" if row["activation"] else ""
    return ("inactive" if row["inactive"] else f"{row['pages']} of {row['budget']} pages") + weights + took


def run_command(options: argparse.Namespace) -> int:
    """``rl-coserve lend`` or ``reclaim``, as ``orchestrator/cli.py`` has parsed it; returns the exit code. Raises ConfigError."""
    pool = _open(options.pool)
    try:
        if options.command == "reclaim":
            found = reclaim_pages(pool, end=options.kill)
            print(json.dumps(found) if options.json else _describe_reclaimed(found, pool.page_bytes))
            return 1 if found["out"] else 0
        if options.max is not None or options.dry_run is not None:
            set_lent(pool, options.max, options.dry_run)
        elif not options.status:
            raise ConfigError("--max", None, "give --max SHARE, --dry-run or --status")
        found = {**lending_status(pool), "lease": lease_status(pool)}
        print(json.dumps(found) if options.json else describe_status(found))
        return 0
    finally:
        pool.close()
