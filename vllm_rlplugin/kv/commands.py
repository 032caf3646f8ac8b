"""What the front end asks of an engine core about KV, between two steps: find, read and stage the blocks of a prefix.

Plain data in and out (msgpack carries it). What cannot be is an answer with ``refused`` (a word) and ``detail``, never an error.
Both sides are checked at the moment of the copy: which weights made the KV, and how it is laid out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from vllm_rlplugin.kv.blocks import KvLayout, RankPart
from vllm_rlplugin.worker.cache_salt import make_salt

SAMPLE = 1 << 20  # bytes of each end of a weight file that its fingerprint is taken from
_LAYOUT = "_rl_kv_layout"


def run_command(core: Any, command: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """One command to vLLM's ``EngineCore``. ``tokens``: token ids as uint32 bytes.

    * ``kv_ask`` {"tokens"}: what to ask another engine for -> {"first": blocks that are here, "blocks": full blocks that the
      tokens have (the last token's is computed in any case), "room": blocks that can be staged beside them, "block_size",
      "block_bytes", "facts"}
    * ``kv_read`` {"tokens", "first", "facts", "most" (bytes; default: all)}: the cached blocks from ``first`` on, at least one
      -> {"blocks", "payload", "more": whether there are more}
    * ``kv_stage`` {"tokens", "first", "facts", "payload", "total" (blocks that come in all; default: these)}: -> {"blocks"}
    * ``kv_counts`` {}: -> {"loaded", "failed", "staged"}, in blocks
    """
    connector = core.scheduler.connector
    if connector is None or not hasattr(connector, "is_staged"):
        return make_refusal("off", "this engine was started without KV transfer")
    if command == "kv_counts":
        return {"loaded": connector.loaded, "failed": connector.failed, "staged": connector.staged}
    try:
        layout = _layout(core)
    except ValueError as error:  # ranks that do not make a whole row
        return make_refusal("layout", str(error))
    facts = _facts(core, layout)
    if "refused" in facts:
        return facts
    names = _block_names(core.scheduler, np.frombuffer(arguments["tokens"], np.uint32))
    if command == "kv_ask":
        here, staged = _count_present(core.scheduler, connector, names)
        size = int(core.scheduler.block_size)
        return {
            "first": here,
            "blocks": len(names),
            "room": max(0, connector.staging_room(layout.block_bytes) - staged),
            "block_size": size,
            "block_bytes": layout.block_bytes,
            "facts": facts,
        }
    if arguments["facts"] != facts:
        return make_refusal("differs", _difference(arguments["facts"], facts))
    if command == "kv_read":
        blocks = _cached_blocks(core.scheduler, names)[arguments["first"] :]
        if not blocks:
            return make_refusal("gone", "the prefix is not cached here any more")
        read = blocks[: max(1, arguments.get("most", len(blocks) * layout.block_bytes) // layout.block_bytes)]
        rows = layout.join_parts(core.model_executor.collective_rpc("rl_kv_read", args=(read,)))
        return {"blocks": len(read), "payload": rows.tobytes(), "more": len(read) < len(blocks)}
    if command == "kv_stage":
        return _stage(core, connector, layout, names, arguments)
    raise ValueError(f"{command!r} is not a KV command: kv_ask, kv_read, kv_stage, kv_counts")


def make_refusal(reason: str, detail: str) -> dict[str, Any]:
    """An answer without KV."""
    return {"refused": reason, "detail": detail}


def _stage(
    core: Any, connector: Any, layout: KvLayout, names: Sequence[bytes], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    rows = np.frombuffer(arguments["payload"], np.uint8).reshape(-1, layout.block_bytes)
    first = int(arguments["first"])
    wanted = list(names[first : first + len(rows)])
    if len(wanted) != len(rows):
        return make_refusal("malformed", f"{len(rows)} blocks from {first} on of {len(names)}")
    total = int(arguments.get("total", len(rows)))
    taken, dropped = connector.choose_staged(wanted, layout.block_bytes, total)
    if not taken:
        return make_refusal(
            "no_room", f"{total} blocks of {layout.block_bytes} bytes are more than is staged at a time"
        )
    for index, part in enumerate(layout.cut_rows(rows)):
        core.model_executor.collective_rpc("rl_kv_stage", args=(index, taken, part, dropped))
    return {"blocks": len(taken)}


def _layout(core: Any) -> KvLayout:
    found: KvLayout | None = getattr(core, _LAYOUT, None)
    if found is None:
        ranks = core.model_executor.collective_rpc("rl_kv_part")
        found = KvLayout.from_ranks([RankPart.from_dict(part) for part in ranks])
        setattr(core, _LAYOUT, found)
    return found


def _facts(core: Any, layout: KvLayout) -> dict[str, Any]:
    """What two engines must have in common: the weights by content and as they are rounded, the way KV lies in memory."""
    scheduler, config = core.scheduler, core.vllm_config
    reports = core.model_executor.collective_rpc("rl_kv_weights")
    report, version = reports[0], int(reports[0]["version"])
    if any(one != report for one in reports) or not report["usable"] or max(version, 0) != scheduler._rl_version:
        versions = ", ".join(str(one["version"]) for one in reports)
        return make_refusal("updating", f"weights of version {versions}, KV of version {scheduler._rl_version}")
    cache = config.cache_config
    return {
        **layout.facts,
        "weights": f"v{version}:{report['content']}" if version >= 0 else f"start:{_start_fingerprint(core)}",
        "dtype": str(config.model_config.dtype),
        "quantization": f"{config.model_config.quantization} {config.model_config.quantization_config}",
        "kv_dtype": str(cache.cache_dtype),
        "block_size": int(scheduler.block_size),
        "backend": str(report["backend"]),
    }


def _start_fingerprint(core: Any) -> str:
    """A fingerprint of the files that the engine was started with."""
    found: str | None = getattr(core, "_rl_kv_start", None)
    if found is None:
        model = core.vllm_config.model_config
        folder = Path(str(model.model))
        digest = xxhash.xxh3_128(f"{model.model if not folder.is_dir() else ''} {model.revision}".encode())
        for path in sorted(folder.glob("*")) if folder.is_dir() else ():
            if path.suffix in (".safetensors", ".bin", ".pt") or path.name == "config.json":
                size = path.stat().st_size
                digest.update(f"{path.name} {size}".encode())
                with path.open("rb") as file:
                    digest.update(file.read(SAMPLE))
                    file.seek(max(0, size - SAMPLE))
                    digest.update(file.read(SAMPLE))
        found = digest.hexdigest()
        core._rl_kv_start = found
    return found


def _difference(theirs: Any, ours: Mapping[str, Any]) -> str:
    if not isinstance(theirs, dict):
        return "no facts"
    names = [name for name in sorted({*theirs, *ours}) if theirs.get(name) != ours.get(name)]
    return "; ".join(
        f"{name}: {json.dumps(theirs.get(name))[:80]} asked for, {json.dumps(ours.get(name))[:80]} here"
        for name in names
    )


def _block_names(scheduler: Any, tokens: Any) -> list[bytes]:
    """vLLM's names of the full blocks before the last token, under the present weights, computed by vLLM's own code."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    algorithm = scheduler.vllm_config.cache_config.prefix_caching_hash_algo
    salt = make_salt(None, scheduler._rl_version, scheduler._rl_history) if scheduler._rl_salted else None
    request = Request(
        "kv",
        [int(token) for token in tokens],
        SamplingParams(max_tokens=1),
        None,
        cache_salt=salt,
        block_hasher=get_request_block_hasher(scheduler.hash_block_size, get_hash_fn_by_name(algorithm)),
    )
    return [bytes(name) for name in request.block_hashes[: (len(tokens) - 1) // scheduler.block_size]]


def _cached_blocks(scheduler: Any, names: Sequence[bytes]) -> list[int]:
    """The blocks of the longest cached prefix."""
    pool = scheduler.kv_cache_manager.block_pool
    found: list[int] = []
    for name in names:
        blocks = pool.get_cached_block(name, [0])
        if blocks is None:
            break
        found.append(int(blocks[0].block_id))
    return found


def _count_present(scheduler: Any, connector: Any, names: Sequence[bytes]) -> tuple[int, int]:
    """How many blocks need not be fetched, and how many of them are staged."""
    here = cached = len(_cached_blocks(scheduler, names))
    while here < len(names) and connector.is_staged(names[here]):
        here += 1
    return here, here - cached
