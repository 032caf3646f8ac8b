"""The forward-backward function of a stock ``pretrain()``, fed to a gradient stream; see ``patches/megatron``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron_rlplugin.flags import STREAM
from megatron_rlplugin.stream.gradient_stream import GradientStream
from orchestrator.api import ConfigError


def streamed_schedule(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's forward-backward function, with training steps fed part by part and merged once; evaluation is stock's.

    The optimizer stays the caller's, so gradients end up where and as the stock function leaves them.
    """
    streams: dict[int, GradientStream] = {}

    def forward_backward(
        *, model: Any, num_microbatches: int, forward_only: bool = False, **schedule: Any
    ) -> list[Any]:
        if forward_only:
            answer: list[Any] = stock(model=model, num_microbatches=num_microbatches, forward_only=True, **schedule)
            return answer
        if schedule.pop("force_all_reduce", None):
            raise ConfigError("force_all_reduce", True, f"cannot be combined with {STREAM}")
        chunks = model if isinstance(model, list) else [model]
        stream = streams.get(id(chunks[0]))
        if stream is None:
            stream = streams[id(chunks[0])] = GradientStream(chunks, None)
        reports: list[Any] = []
        stream.begin_step()
        for size in _parts(num_microbatches, feed_size(chunks)):
            reports += stream.feed(num_microbatches=size, **schedule)
        stream.merge_gradients()
        return reports

    return forward_backward


def part_size(chunks: Sequence[Any]) -> int:
    """Micro-batches that fill the pipeline once."""
    return int(chunks[0].config.pipeline_model_parallel_size)


def feed_size(chunks: Sequence[Any]) -> int:
    """Micro-batches of one feed from a source that may block: enough that a pipeline of p stages idles for (p - 1) / (5 p - 1) of
    it, where filling it once would idle for (p - 1) / (2 p - 1). A schedule bounds by the stages, not by this, of how many it
    holds activations at once."""
    stages = part_size(chunks)
    return 4 * stages if stages > 1 else 1


def _parts(total: int, size: int) -> list[int]:
    """``total`` as parts of ``size``; what is left over goes with the last one, which the pipeline could not hold alone."""
    whole, rest = divmod(total, size)
    return [size] * (whole - 1) + [size + rest] if whole else [total]
