"""A KV connector of stock vLLM that loads blocks which were brought before (``kv_connector_module_path``; Heddle 5.3).

Blocks are fetched, verified and put into host memory while the engine goes on; a request whose prefix they are then has them
copied into its own blocks in front of its first step. Guarantees:

* Staged blocks have the names that vLLM's prefix cache gives them: a hash over all tokens up to their end and the cache salt, in
  which the weight version is. A request can only find KV of just its prefix and just its weights.
* Nothing waits: what is not there when the request is scheduled is computed. A block that a rank lacks is reported to vLLM, which
  computes it (``kv_load_failure_policy = "recompute"``).
* With nothing staged every step is stock's. What was loaded, and what old weights made, is forgotten.

Why none of vLLM's own: docs/kv_transfer.md.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from orchestrator.api import ConfigError
from vllm_rlplugin.kv.blocks import RankCache, RankPart, owned_heads

STAGING_MB = "staging_mb"  # in kv_connector_extra_config


@dataclass
class BlockLoads(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is untyped here
    """What the ranks do in front of a step. ``blocks``: (block, name); ``drops``: names that nobody will ask for."""

    blocks: list[tuple[int, bytes]] = field(default_factory=list)
    drops: list[bytes] = field(default_factory=list)


class PrefixConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Both roles, as vLLM has it: one object in the scheduler's process, one in each rank's."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        _require_plain(vllm_config, kv_cache_config)
        self._size = int(vllm_config.cache_config.block_size)
        self._capacity = int(self._kv_transfer_config.get_from_extra_config(STAGING_MB, 256)) << 20
        # The scheduler's.
        self._names: OrderedDict[bytes, None] = OrderedDict()  # staged; the longest ago first
        self._found: dict[str, int] = {}  # request -> its first block that is not in the cache
        self._next = BlockLoads()
        self.loaded = self.failed = 0  # blocks
        # A rank's.
        self.cache: RankCache | None = None
        self._rows: dict[bytes, Any] = {}
        self._missing: set[int] = set()

    # ---- the scheduler's half ----

    @property
    def requires_kv_delivery(self) -> bool:
        """A best-effort cache: what is not there is computed."""
        return False

    @property
    def staged(self) -> int:
        """Blocks that are staged."""
        return len(self._names)

    def is_staged(self, name: bytes) -> bool:
        """Whether a block is."""
        return name in self._names

    def staging_room(self, block_bytes: int) -> int:
        """How many blocks are staged at most at a time."""
        return self._capacity // max(1, block_bytes)

    def choose_staged(
        self, names: Sequence[bytes], block_bytes: int, total: int = 0
    ) -> tuple[list[bytes], list[bytes]]:
        """(which of these to stage, which others to drop for them). None are to be staged when not all fit: these, or the
        ``total`` that they are a piece of."""
        room = self.staging_room(block_bytes)
        if max(total, len(names)) > room:
            return [], []
        if self._next.drops:  # what is staged anew must not be dropped with the next step
            again = set(names)
            self._next.drops = [name for name in self._next.drops if name not in again]
        for name in names:
            self._names[name] = None
            self._names.move_to_end(name)
        dropped = [self._names.popitem(last=False)[0] for _ in range(max(0, len(self._names) - room))]
        return list(names), dropped

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """The tokens of the staged blocks that follow on what is cached; the last token is always computed."""
        first = num_computed_tokens // self._size
        count = 0
        if self._names:
            for name in request.block_hashes[first : (request.num_tokens - 1) // self._size]:
                if name not in self._names:
                    break
                count += 1
            self._found[request.request_id] = first
        return count * self._size, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request got its blocks, and starts in this step."""
        first = self._found.pop(request.request_id, 0)
        count = num_external_tokens // self._size
        if count:
            places = blocks.get_block_ids()[0][first : first + count]
            names = [bytes(name) for name in request.block_hashes[first : first + count]]
            self._next.blocks += zip(places, names, strict=True)

    def build_connector_meta(self, scheduler_output: Any) -> BlockLoads:
        """What the ranks load in front of this step. It is in vLLM's prefix cache then, and need not be kept."""
        loads, self._next = self._next, BlockLoads()
        for _, name in loads.blocks:
            self._names.pop(name, None)
        self.loaded += len(loads.blocks)
        self._found.clear()
        return loads

    def update_connector_output(self, connector_output: Any) -> None:
        """Blocks that could not be loaded are computed."""
        self.failed += len(connector_output.invalid_block_ids or ())

    def reset_cache(self) -> bool:
        """The weights are others now."""
        self._next.drops += self._names
        self._names.clear()
        return True

    # ---- a rank's half ----

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """vLLM's cache, as it lies in memory."""
        self.cache = RankCache(kv_caches, self._size)

    def rank_part(self) -> RankPart:
        """Which part of a block this rank has."""
        from vllm.distributed import get_tp_group

        group, cache = get_tp_group(), self._cache()
        total = int(self._vllm_config.model_config.get_total_num_kv_heads())
        if self._vllm_config.model_config.use_mla:
            total = 1  # one latent for all heads, in every rank
        head, heads = owned_heads(total, int(group.rank_in_group), int(group.world_size))
        if heads != cache.heads:
            raise ConfigError("kv_transfer", heads, f"vLLM's KV cache has {cache.heads} heads here, not {heads}")
        return RankPart(cache.layers, cache.parts, head, heads, total, cache.tokens, cache.width)

    def stage(self, names: Sequence[bytes], data: bytes, drops: Sequence[bytes]) -> None:
        """Keep rows of this rank's part until they are loaded."""
        for name in drops:
            self._rows.pop(name, None)
        if names:
            rows = np.frombuffer(data, np.uint8).reshape(len(names), -1)
            self._rows.update(zip(names, rows, strict=True))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Copy into the cache what this step's requests begin with."""
        loads = self._get_connector_metadata()
        found = [(block, self._rows[name]) for block, name in loads.blocks if name in self._rows]
        self._missing = {block for block, name in loads.blocks if name not in self._rows}
        if found:
            self._cache().write([block for block, _ in found], [row for _, row in found])
        for name in [*loads.drops, *(name for _, name in loads.blocks)]:
            self._rows.pop(name, None)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of this step that this rank had nothing for."""
        missing, self._missing = self._missing, set()
        return missing

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All was loaded in front of the step."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved layer by layer: whoever wants a prefix reads it out of the prefix cache."""

    def wait_for_save(self) -> None:
        """Nothing is."""

    def _cache(self) -> RankCache:
        if self.cache is None:
            raise ConfigError("kv_transfer", "no KV cache", "vLLM has not registered one in this rank")
        return self.cache


def _require_plain(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises ConfigError for a model whose prefix is more than the full blocks of one kind of attention."""
    groups = kv_cache_config.kv_cache_groups
    kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
    # vLLM may describe layers with a window as full attention and keep all of their blocks: no engine was seen to move those.
    if any(getattr(group.kv_cache_spec, "sliding_window", None) for group in groups):
        kinds = ["layers with a sliding window"]
    if len(groups) != 1 or kinds not in (["FullAttentionSpec"], ["MLAAttentionSpec"]):
        fix = "KV transfer needs full attention in every layer: disable kv_transfer for this model"
        raise ConfigError("kv_transfer", ", ".join(kinds) or "no KV cache", fix)
    if not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError(
            "kv_transfer", "enable_prefix_caching=False", "moved prefixes are kept in the prefix cache: enable it"
        )


__all__ = ["BlockLoads", "KVConnectorRole", "PrefixConnector"]
