"""How the ranks of an engine agree while it starts, over vLLM's own CPU group (gloo); JSON, as nothing is unpickled here.

Guarantees: all ranks make the same calls in the same order, and each call ends in the same way on all of them: what one rank
could not do, or what they do not have in common, is one ConfigError on every rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from orchestrator.api import ConfigError, RunError


class PoolAgreement:
    """Of this ``rank`` with the others of its tensor-parallel group of ``ranks``."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def require_same(self, facts: dict[str, Any]) -> None:
        """Raises ConfigError with the first fact that is not the same everywhere. Plain data."""
        every = self._gather(facts)
        for name in facts:
            said = [found[name] for found in every]
            for rank, value in enumerate(said):
                if value != said[0]:
                    fix = f"rank {rank} has {name} {value!r}, rank 0 {said[0]!r}: start all ranks with the same options and model"
                    raise ConfigError("kv_pool", name, fix)

    def each_does(self, work: Callable[[], Any]) -> list[Any]:
        """What each rank's work returned (plain data). Raises ConfigError: the first rank's that could not do it."""
        error: ConfigError | RunError | OSError | None = None
        answer: dict[str, Any] = {}
        try:
            answer["done"] = work()
        except ConfigError as caught:
            error, answer = caught, {"field": caught.field, "value": str(caught.value), "fix": caught.fix}
        except (RunError, OSError) as caught:
            error, answer = caught, {"field": "kv_pool", "value": f"rank {self.rank}", "fix": str(caught)}
        every = self._gather(answer)
        for found in every:
            if "fix" in found:
                raise ConfigError(found["field"], found["value"], found["fix"]) from error
        return [found["done"] for found in every]

    def _gather(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """Of each rank, by rank."""
        import torch
        from vllm.distributed import parallel_state

        group = parallel_state.get_tp_group().cpu_group
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        size = torch.tensor([text.numel()])
        sizes = [torch.empty_like(size) for _ in range(self.ranks)]
        torch.distributed.all_gather(sizes, size, group=group)
        most = max(int(found) for found in sizes)
        parts = [torch.empty(most, dtype=torch.uint8) for _ in range(self.ranks)]
        torch.distributed.all_gather(parts, torch.nn.functional.pad(text, (0, most - text.numel())), group=group)
        return [dict(json.loads(bytes(part[: int(size)].tolist()))) for part, size in zip(parts, sizes, strict=True)]
