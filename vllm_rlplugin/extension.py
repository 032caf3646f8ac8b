"""What our plugin adds to vLLM's worker, as ``worker_extension_cls``: methods that ``collective_rpc`` can call by name.

They return plain data, which msgpack carries, and raise nothing that is to be expected
(:mod:`vllm_rlplugin.weights.rank_votes` says why). vLLM refuses an extension with an attribute that its worker has,
hence the prefix. Imports neither vLLM nor torch.
"""

from __future__ import annotations

from typing import Any


class WorkerExtension:
    """Mixed into vLLM's Worker. The functions of :mod:`vllm_rlplugin.weights.transfer_engine` say what is returned."""

    def rl_ready(self) -> dict[str, Any]:
        """Called once after the engine has started, before its first request. {"rank", "cured": [what was set right]}."""
        from vllm_rlplugin.weights import transfer_engine

        return {**transfer_engine.attach_engine(self), "cured": _cure_pipeline_stage(self)}

    def rl_prepare(self, version: int) -> None:
        """Begin to fetch and verify a weight version while the model runs."""
        from vllm_rlplugin.weights import transfer_engine

        transfer_engine.prepare(self, version)

    def rl_receive(self, version: int, meetings: list[dict[str, Any]], place: int, limit: float) -> None:
        """Begin to receive and verify a weight version from the trainer while the model runs."""
        from vllm_rlplugin.weights import transfer_engine

        transfer_engine.receive(self, version, meetings, place, limit)

    def rl_prepared(self, version: int) -> dict[str, Any]:
        """Whether it is at hand."""
        from vllm_rlplugin.weights import transfer_engine

        return transfer_engine.prepared(self, version)

    def rl_drop_session(self) -> None:
        """A weight update that was started and never finished is none any more: vLLM begins no other one beside it."""
        from vllm_rlplugin.weights import transfer_engine

        transfer_engine.drop_session(self)

    def rl_report(self) -> dict[str, Any]:
        """What is loaded, whether it may be used, and what went wrong last."""
        from vllm_rlplugin.weights import transfer_engine

        return transfer_engine.report(self)

    def rl_verify(self) -> dict[str, Any]:
        """Digests of the live weights, recomputed."""
        from vllm_rlplugin.weights import transfer_engine

        return transfer_engine.verify(self)

    def rl_leave_weights(self, dropped: bool) -> None:
        """Before the memory of the live weights is lent: nothing reads them afterwards. ``dropped``: without what is in it."""
        from vllm_rlplugin.weights import transfer_engine

        transfer_engine.stop_reading(self, dropped=dropped)

    def rl_weights_away(self, kept: bool) -> dict[str, Any]:
        """While paused: the weights leave this worker's memory or device, until :meth:`rl_weights_back`. ``kept``: they can."""
        from vllm_rlplugin.sleep import host_offload

        return host_offload.offload_weights(self, kept=kept)

    def rl_weights_back(self) -> dict[str, Any]:
        """They are there again, verified if they were kept."""
        from vllm_rlplugin.sleep import host_offload

        return host_offload.restore_weights(self)

    def rl_give_back_kv(self) -> int:
        """On CPU: return the memory of the KV cache to the system. Bytes that were in memory and are not now."""
        from vllm_rlplugin.sleep.memory_release import return_pages

        stock: Any = self
        return return_pages(stock.model_runner.kv_caches)

    def rl_pool_facts(self) -> dict[str, Any]:
        """Of an engine of several ranks in a pool, what its scheduler needs to decide for them; {}: it is in none."""
        from vllm_rlplugin.kvpool.engine import pool_engine

        return pool_engine.rank_facts()

    def rl_map_pages(self, places: list[int], pages: list[int]) -> bool:
        """These pages of the pool appear at these places of this rank, all or none; False: there is no memory for them."""
        from vllm_rlplugin.kvpool.engine import pool_engine

        return pool_engine.current_rank().map_pages(places, pages)

    def rl_unmap_pages(self, places: list[int]) -> None:
        """Nothing of this rank uses these places any more, and no page is mapped there."""
        from vllm_rlplugin.kvpool.engine import pool_engine

        pool_engine.current_rank().unmap_pages(places)

    def rl_begin_allocating(self) -> None:
        """A scheduler is there: blocks are no longer the null block's."""
        from vllm_rlplugin.kvpool.engine import pool_engine

        pool_engine.write_to_null_block(False)

    def rl_weight_bytes(self) -> int:
        """Of this rank's parameters."""
        stock: Any = self
        return sum(int(item.nbytes) for item in stock.model_runner.get_model().parameters())

    def rl_free_memory(self) -> int:
        """Free bytes of this worker's device."""
        from vllm_rlplugin.sleep.device_memory import free_memory

        return free_memory()

    def rl_kv_part(self) -> dict[str, Any]:
        """Which part of a KV block this rank has, as :class:`~vllm_rlplugin.kv.blocks.RankPart`."""
        return dict(_connector().rank_part().to_dict())

    def rl_kv_weights(self) -> dict[str, Any]:
        """{"version", "content", "usable", "backend"}: what KV is computed with, and by what."""
        from vllm_rlplugin.weights import transfer_engine

        stock: Any = self
        found = transfer_engine.report(self)
        backends = {type(layer).__name__ for layer in _attention(stock)} | set(_instructions(stock))
        return {
            "version": int(found["version"]),
            "content": str(found.get("checksum", "")),
            "usable": found["state"] == "intact",
            "backend": " ".join(sorted(backends)),
        }

    def rl_kv_read(self, blocks: list[int]) -> bytes:
        """This rank's part of these blocks of its KV cache."""
        return bytes(_connector().cache.read(blocks))

    def rl_kv_stage(self, rank: int, names: list[bytes], data: bytes, drops: list[bytes]) -> None:
        """Keep blocks on the host until a step loads them; every rank hears of each rank's."""
        stock: Any = self
        if stock.rank == rank:
            _connector().stage(names, data, drops)


def _connector() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()


def _attention(worker: Any) -> list[Any]:
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    return [layer.impl for layer in layers if hasattr(layer, "impl")]


def _instructions(worker: Any) -> list[str]:
    """On CPU the instruction set says how keys are packed."""
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    return [str(layer.isa) for layer in layers if hasattr(layer, "isa")]


def _cure_pipeline_stage(worker: Any) -> list[str]:
    """vLLM's CPU worker makes the buffers between pipeline stages in a warm-up that eager mode skips: make them here.

    Without them the first request ends the engine (an AssertionError in the second stage).
    """
    from vllm.distributed import get_pp_group
    from vllm.platforms import current_platform

    runner = worker.model_runner
    if not current_platform.is_cpu() or get_pp_group().is_first_rank or runner.intermediate_tensors is not None:
        return []
    runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
    )
    return ["intermediate_tensors"]
