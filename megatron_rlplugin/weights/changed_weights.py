"""Which weights a step changed: this rank's part as (indices, new values), from the version before it.

Guarantees: putting the values at the indices of the previous version's tensors gives the present ones, bit for bit (values
replace, they are never added: differences in bfloat16 do not add up to the same bits). Over all ranks every change comes
exactly once. The version before is kept in one of three ways, which differ only in where the memory goes:

* :class:`Snapshot` on the ``"device"``: a copy of what this rank exports. Any optimizer.
* :class:`Snapshot` on the ``"host"``: the same copy in host memory (pinned where there is CUDA). Any optimizer.
* :class:`Masters`: nothing is kept. A distributed optimizer holds fp32 masters of its own part of the weights; in the moment
  before it writes them into the bfloat16 model, one is the new version and the other still the old one.

Only bits are compared, so a NaN that stays is no change, and 0 that becomes -0 is one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_rlplugin.weights.tensor_places import TensorPiece, tensor_pieces
from megatron_rlplugin.weights.weight_export import BUCKET_BYTES, ENCODING, serving_shards
from orchestrator.api import ConfigError, RunError, ShardKey

_HOOKED = "_copy_main_params_to_model_params"  # of Megatron's optimizers, 0.16.1 and 0.19.2
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class WeightChange:
    """What changed in one shard. ``indices``: row-major positions in the shard, ascending, int32 (int64 where the shard is
    larger than that reaches); ``values``: what stands there now, in the shard's dtype."""

    key: ShardKey
    indices: Tensor
    values: Tensor

    def apply(self, shard: Tensor) -> None:
        """Make the previous version of the shard (contiguous) the present one, in place."""
        shard.view(-1)[self.indices.long()] = self.values.to(shard.device)


@dataclass(slots=True)
class Cost:
    """What keeping the previous version cost so far: bytes kept between steps, seconds spent to find changes."""

    kept_bytes: int = 0
    seconds: float = 0.0


class Snapshot:
    """A copy of what this rank exports. ``where`` is "device" or "host"."""

    def __init__(
        self,
        chunks: Sequence[Any],
        where: str,
        dtype: str = "bfloat16",
        *,
        bucket_bytes: int = BUCKET_BYTES,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if where not in ("device", "host"):
            raise ConfigError("where", where, "must be 'device' or 'host'")
        self._chunks, self._dtype, self._bucket_bytes, self._clock = list(chunks), dtype, bucket_bytes, clock
        self._host = where == "host"
        self._kept = {key: self._copy(value) for key, value in self._shards()}
        self.cost = Cost(sum(value.nbytes for value in self._kept.values()))

    def changes(self) -> Iterator[WeightChange]:
        """What changed since the last call (or the beginning). To be consumed completely: the copy moves along with it."""
        started = self._clock()
        for key, value in self._shards():
            kept = self._kept[key]
            indices = _changed(kept.to(value.device, non_blocking=True), value)
            if len(indices):
                kept.copy_(value)  # all of it: on the host, scattered writes cost more than one copy
                change = WeightChange(key, indices, value.view(-1)[indices.long()])
                self.cost.seconds += self._clock() - started
                yield change
                started = self._clock()
        self.cost.seconds += self._clock() - started

    def close(self) -> None:
        """Free the copy. Idempotent."""
        self._kept = {}
        self.cost.kept_bytes = 0

    def _shards(self) -> Iterator[tuple[ShardKey, Tensor]]:
        return serving_shards(self._chunks, self._dtype, bucket_bytes=self._bucket_bytes)

    def _copy(self, value: Tensor) -> Tensor:
        if not self._host:
            return value.clone()
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        return host.copy_(value)


class Masters:
    """Changes found while the distributed optimizer writes its masters into the model; until :meth:`close`.

    Works on bfloat16 models with the stock distributed optimizer. Beside the model only one parameter's new values are
    alive at a time, and the changes themselves until they are taken.
    """

    def __init__(
        self, chunks: Sequence[Any], optimizer: Any, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self.cost = Cost()
        self._changes: dict[ShardKey, WeightChange] = {}
        inner = getattr(optimizer, "chained_optimizers", [optimizer])
        for one in inner:
            _require_masters(one)
        self._pieces: dict[int, list[TensorPiece]] = {}
        for piece in tensor_pieces(chunks):
            self._pieces.setdefault(id(piece.parameter), []).append(piece)
        self._hooked = list(inner)
        for one in inner:
            stock = getattr(one, _HOOKED)
            setattr(one, _HOOKED, self._before(one, stock))

    def changes(self) -> Iterator[WeightChange]:
        """What the steps since the last call changed. A value that one step changed and a later one changed back is in it."""
        found, self._changes = self._changes, {}
        yield from found.values()

    def close(self) -> None:
        """Leave the optimizer as it was. Idempotent."""
        for one in self._hooked:
            delattr(one, _HOOKED)  # the class's own method shows again
        self._hooked = []
        self._changes = {}

    def _before(self, optimizer: Any, stock: Callable[[], Any]) -> Callable[[], Any]:
        def copy_main_params_to_model_params() -> Any:
            started = self._clock()
            with torch.no_grad():
                self._compare(optimizer)
            self.cost.seconds += self._clock() - started
            return stock()

        return copy_main_params_to_model_params

    def _compare(self, optimizer: Any) -> None:
        groups = zip(optimizer.shard_fp32_from_float16_groups, optimizer.model_float16_groups, strict=True)
        for mains, parameters in groups:
            for main, parameter in zip(mains, parameters, strict=True):
                own = optimizer._get_model_param_range_map(parameter)["param"]
                old = parameter.data
                new = old.clone()
                new.view(-1)[own.start : own.end].copy_(main.view(-1))
                for piece in self._pieces.get(id(parameter), ()):
                    if _first_of_model_parallel(piece):
                        self._note(piece, old, new)

    def _note(self, piece: TensorPiece, old: Tensor, new: Tensor) -> None:
        after = piece.cut_from(new)
        indices = _changed(piece.cut_from(old), after)
        if not len(indices):
            return
        dtype = str(after.dtype).removeprefix("torch.")
        start, stop = (0, 0) if piece.dim < 0 else (piece.start, piece.stop)
        key = ShardKey(piece.name, piece.dim, start, stop, piece.shape, dtype, ENCODING, 0)
        change = WeightChange(key, indices, after.view(-1)[indices.long()])
        earlier = self._changes.get(key)
        self._changes[key] = change if earlier is None else _followed_by(earlier, change)


def _changed(old: Tensor, new: Tensor) -> Tensor:
    bits = _BITS[new.element_size()]
    found = (old.reshape(-1).view(bits) != new.reshape(-1).view(bits)).nonzero().squeeze(-1)
    return found.to(torch.int32) if new.numel() < 1 << 31 else found


def _followed_by(earlier: WeightChange, later: WeightChange) -> WeightChange:
    """Both in one: where both changed something, the later value."""
    stays = ~torch.isin(earlier.indices, later.indices)
    indices = torch.cat([earlier.indices[stays], later.indices])
    values = torch.cat([earlier.values[stays], later.values])
    order = indices.argsort()
    return replace(later, indices=indices[order], values=values[order])


def _first_of_model_parallel(piece: TensorPiece) -> bool:
    """The optimizer divides a parameter among its data-parallel holders; of tensor or pipeline holders the first speaks."""
    from megatron.core import parallel_state as groups

    index, count = piece.holder  # data-parallel ones vary slowest
    if "dp" in piece.replicated:
        dense = groups.get_data_parallel_world_size(with_context_parallel=True)
        count //= groups.get_expert_data_parallel_world_size() if piece.expert else dense
    return index % count == 0


def _require_masters(optimizer: Any) -> None:
    """ConfigError unless its fp32 masters are this rank's own part of a bfloat16 model's weights."""
    use = "keep a Snapshot instead"
    name = type(optimizer).__name__
    if not hasattr(optimizer, "shard_fp32_from_float16_groups"):
        raise ConfigError(
            "optimizer", name, f"has no fp32 masters of its own part: use the distributed optimizer, or {use}"
        )
    config = optimizer.config
    if getattr(config, "use_precision_aware_optimizer", False):
        raise ConfigError("optimizer.use_precision_aware_optimizer", True, f"its masters cannot be read; {use}")
    if getattr(optimizer.ddp_config, "num_distributed_optimizer_instances", 1) > 1:
        fix = f"several instances hold the same part, so changes would come twice; {use}"
        raise ConfigError(
            "ddp.num_distributed_optimizer_instances", optimizer.ddp_config.num_distributed_optimizer_instances, fix
        )
    if any(optimizer.model_fp32_groups):
        raise ConfigError("model.dtype", "float32", f"an fp32 weight is its own master, so nothing old is left; {use}")
    if _HOOKED in vars(optimizer):
        raise RunError(f"{name}: its masters are being compared already; close the other one first")
