"""Full weight updates from the relay, as a backend of vLLM's own weight-transfer factory (name ``rl_coserve``).

Guarantees:

* A received version equals a fresh load of the same checkpoint bit for bit, packed CPU linears and lm_head included.
* All or nothing: every byte is fetched, verified and checked against the checkpoint's layout before the model is
  touched. When ``receive_weights`` raises, the model is as it was. Only ``finish_weight_update`` writes; if that raises,
  the model is in no defined state (``damaged``) and the engine must not serve again.
* No patch of vLLM: the stock layerwise reload does the sharding, packing and in-place copy.

Staged tensors are views of the relay's buffers, no copies: a buffer is reused only when nothing refers to it any more
(``orchestrator.transfer.buffers``), and staging ends with the update.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from orchestrator.api import RetryableError, ShardKey, WeightManifest
from orchestrator.transfer import CorruptWeightsError, RelayEndpoint, Subscriber

# ShardKey.dtype (numpy's and torch's common names) -> torch. What a checkpoint may hold; vLLM casts on load.
DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
}

Layout = dict[str, tuple[int, ...]]  # tensor name -> full shape, in checkpoint coordinates


@dataclass
class RelayInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is untyped here
    """Where the relay is: ``RelayEndpoint.to_dict()``."""

    endpoint: dict[str, Any]


@dataclass
class RelayUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which published version to load."""

    version: int


class RelayWeightTransferEngine(WeightTransferEngine[RelayInitInfo, RelayUpdateInfo]):  # type: ignore[misc]
    """One per vLLM worker process. Every rank fetches the whole version and lets vLLM's loader take its part."""

    init_info_cls = RelayInitInfo
    update_info_cls = RelayUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.damaged = False
        self.received_bytes = 0  # of the last version that was received
        self._subscriber: Subscriber | None = None
        self._staged: dict[str, torch.Tensor] | None = None
        self._layout = checkpoint_layout(self.model_config.model)

    def init_transfer_engine(self, init_info: RelayInitInfo) -> None:
        """Connect to the relay; replaces an earlier connection."""
        endpoint = RelayEndpoint.from_dict(init_info.endpoint)
        self.shutdown()
        self._subscriber = Subscriber(endpoint)

    def start_weight_update(self) -> None:
        """Begin a session. The model is not touched yet."""
        if self.damaged:
            raise RuntimeError("an earlier weight update failed while it was applied; restart the engine")
        self._staged = None

    def receive_weights(self, update_info: RelayUpdateInfo) -> None:
        """Fetch, verify and stage a version. Raises RetryableError; the model is not touched."""
        if self._subscriber is None:
            raise RetryableError("the weight-transfer engine was not initialised with a relay endpoint")
        try:
            manifest = self._subscriber.manifest(update_info.version)
            staged = stage(manifest, self._subscriber.fetch(manifest))
        except CorruptWeightsError as error:
            raise RetryableError(f"weight version {update_info.version}: {error}") from error
        if self._layout is not None:
            self._match_layout(staged, self._layout, update_info.version)
        self.received_bytes = manifest.bytes
        self._staged = staged

    def finish_weight_update(self) -> None:
        """Load what was staged into the model, in place (tensor storages stay, so CUDA graphs stay valid)."""
        if self._staged is None:
            raise RuntimeError("finish_weight_update without received weights")
        staged, self._staged = self._staged, None
        self.damaged = True  # until everything below has succeeded
        expected = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)
        loaded = self.model.load_weights(iter(staged.items()))
        with _quiet_reload():
            finalize_layerwise_reload(self.model, self.model_config)
        if loaded is not None and (missing := sorted(expected - loaded)):
            raise RuntimeError(f"the version lacks weights that the model has: {', '.join(missing[:8])}")
        self._repack_tied_heads()
        self.damaged = False

    def shutdown(self) -> None:
        """Close the relay connection. Idempotent."""
        self._staged = None
        if self._subscriber is not None:
            self._subscriber.close()
            self._subscriber = None

    def _match_layout(self, staged: dict[str, torch.Tensor], layout: Layout, version: int) -> None:
        """Refuse, before anything is written, what vLLM's loader would refuse half-way."""
        if getattr(self.model_config.hf_text_config, "tie_word_embeddings", False) and "lm_head.weight" not in layout:
            staged.pop("lm_head.weight", None)  # some trainers publish the tied head too; it is the embedding
        missing = [name for name in layout if name not in staged]
        unknown = [name for name in staged if name not in layout]
        reshaped = [
            f"{name} {tuple(tensor.shape)} (the model has {layout[name]})"
            for name, tensor in staged.items()
            if name in layout and tuple(tensor.shape) != layout[name]
        ]
        problems = [
            f"{what}: {', '.join(names[:4])}{' ...' if len(names) > 4 else ''}"
            for what, names in (("missing", missing), ("unknown", unknown), ("other shape", reshaped))
            if names
        ]
        if problems:
            raise RetryableError(
                f"weight version {version} does not fit {self.model_config.model}: {'; '.join(problems)}"
            )

    def _repack_tied_heads(self) -> None:
        """Let a tied lm_head pack the new embedding.

        The stock reload processes a shared parameter for one of its owners only (vLLM's reload/layerwise.py, limitation
        2): on CPU, where lm_head computes with a packed copy, it would go on with the old weights, silently.
        """
        owners: dict[int, torch.nn.Module] = {}
        for module in self.model.modules():
            weight = getattr(module, "weight", None)
            if not isinstance(weight, torch.Tensor) or weight.numel() == 0:
                continue
            shared = owners.setdefault(id(weight), module) is not module
            method = getattr(module, "quant_method", None)
            if shared and isinstance(module, ParallelLMHead) and isinstance(method, QuantizeMethodBase):
                method.process_weights_after_loading(module)


@contextlib.contextmanager
def _quiet_reload() -> Iterator[None]:
    """Drop vLLM's "Failed to load weights" for layers that have only buffers (rotary caches) or tied weights.

    It would come with every update. Nothing is hidden: the caller compares what was loaded with the parameters there are.
    """

    def keep(record: logging.LogRecord) -> bool:
        return "Failed to load weights" not in record.getMessage()

    logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def stage(
    manifest: WeightManifest, tensors: Iterable[tuple[ShardKey, np.ndarray[Any, np.dtype[np.uint8]]]]
) -> dict[str, torch.Tensor]:
    """Make whole tensors of all shards of a full version. Raises RetryableError when elements are missing."""
    if manifest.base_version != -1:
        raise RetryableError(
            f"weight version {manifest.version} is a difference to {manifest.base_version}, not a full snapshot"
        )
    staged: dict[str, torch.Tensor] = {}
    covered: dict[str, int] = {}
    for key, data in tensors:
        dtype = DTYPES.get(key.dtype)
        if dtype is None:
            raise RetryableError(f"{key.tensor}: dtype {key.dtype!r} is not one of {', '.join(DTYPES)}")
        shape = list(key.global_shape)
        if key.dim >= 0:
            shape[key.dim] = key.stop - key.start
        piece = torch.from_numpy(data).view(dtype).view(shape)
        if key.dim < 0:
            staged[key.tensor] = piece
        else:
            whole = staged.get(key.tensor)
            if whole is None:
                whole = staged[key.tensor] = torch.empty(key.global_shape, dtype=dtype)
            whole.narrow(key.dim, key.start, key.stop - key.start).copy_(piece)
        covered[key.tensor] = covered.get(key.tensor, 0) + piece.numel()
    partial = [name for name, tensor in staged.items() if covered[name] != tensor.numel()]
    if partial or not staged:
        raise RetryableError(
            f"weight version {manifest.version} is incomplete: {', '.join(partial[:8]) or 'no tensors'}"
        )
    return staged


def checkpoint_layout(model: str) -> Layout | None:
    """Names and shapes of the checkpoint the engine was started from; None when it is not a local safetensors folder."""
    files = sorted(Path(model).glob("*.safetensors")) if Path(model).is_dir() else []
    if not files:
        return None
    from safetensors import safe_open

    layout: Layout = {}
    for file in files:
        with safe_open(str(file), framework="pt") as checkpoint:
            for name in checkpoint.keys():  # noqa: SIM118  (not a dictionary)
                layout[name] = tuple(checkpoint.get_slice(name).get_shape())
    return layout


def update_report(worker: Any) -> Mapping[str, Any]:
    """What the engine process asks each vLLM worker after an update (``collective_rpc`` passes the worker)."""
    engine = worker.weight_transfer_engine
    return {"bytes": engine.received_bytes, "damaged": engine.damaged}
