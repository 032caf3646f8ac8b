"""Weights to the workers by vLLM's own engines of its backend ``nccl``: one trainer rank's side.

``rollout.weights = "nccl"``, for a comparison with :mod:`megatron_rlplugin.weights.collective_sender` on GPUs. vLLM's
``send_weights`` gathers nothing that Megatron has cut, so one rank sends, which holds every tensor whole. It sends no digests,
and its receivers (:mod:`vllm_rlplugin.weights.stock_receiver`) write what comes into the live weights.

Guarantees: as there, of one background thread and its time limit. A meeting says what vLLM's own endpoints would be told:
``nccl_unique_id_b64`` and ``update_info``. The group is formed by that id, not by vLLM's store, which unpickles.

Not run by the tests of this project on a GPU: these have a stand-in for NCCL (``tests/support/stock_nccl.py``).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rlplugin.weights.collective_sender import WeightSender
from megatron_rlplugin.weights.tensor_places import TensorPiece, tensor_pieces
from orchestrator.api import ConfigError, Meeting, RetryableError
from orchestrator.transfer.announcement import STOCK_BACKEND

_KEY = "rollout.weights", "nccl"
_TOO_OLD = (
    "needs vLLM 0.33 (before, packs that were received might be written over while they are read): take 'collective'"
)


class StockGroup:
    """Rank 0 of the group that vLLM's engines form."""

    def __init__(self, pieces: Sequence[TensorPiece], receivers: int, host: str, number: int) -> None:
        try:
            from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
            from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine
        except ImportError as error:
            fix = f"it is vLLM's, which is not installed where the trainer runs ({error}); install it, or take 'relay'"
            raise ConfigError(*_KEY, fix) from error
        if not hasattr(WeightSource, "iter_full"):
            raise ConfigError(*_KEY, _TOO_OLD)
        self._unique_id = bytes(NCCLLibrary().ncclGetUniqueId().internal)
        self._device = pieces[0].parameter.device
        specs = [ParamMeta(piece.name, piece.parameter.dtype, piece.shape) for piece in pieces]
        self._source = WholeTensors(pieces, specs)
        self._engine = NCCLTrainerWeightTransferEngine(client=_OrchestratorCommands(), source=self._source)
        update_info = {
            "names": [spec.name for spec in specs],
            "dtype_names": [str(spec.dtype).removeprefix("torch.") for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
        }
        where = base64.b64encode(self._unique_id).decode()
        told = json.dumps({"nccl_unique_id_b64": where, "update_info": update_info})
        self.meeting = Meeting(f"{host}/{where[:32]}/{number}", STOCK_BACKEND, told, receivers)

    def join(self, deadline: float) -> None:
        """See :class:`~megatron_rlplugin.weights.collective_sender.SendGroup`."""
        del deadline  # NCCL has none: :meth:`WeightSender.finish_send` aborts it
        if self._engine.model_update_group is None:
            from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

            size = self.meeting.receivers + 1
            with torch.cuda.device(self._device):
                self._engine.model_update_group = uid_init_process_group(self._unique_id, 0, size, self._device)

    def send(self) -> None:
        """All tensors, once. Raises anything."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()  # vLLM packs on streams of its own, which wait for no optimizer step
            self._engine.send_weights()
        self._source.check_wanted()  # a group that was aborted takes everything, and sends nothing

    def close(self) -> None:
        """See the protocol. vLLM's own way aborts what is pending."""
        self._source.given_up = True
        self._engine.shutdown()


class StockSender(WeightSender[StockGroup]):
    """``chunks``: this rank's model chunks, which are all of the model; ``device``: where they are."""

    def __init__(self, chunks: Sequence[Any], device: torch.device) -> None:
        super().__init__()
        self._chunks = chunks
        self._device = device

    def _open_group(self, receivers: int, host: str, number: int, limit: float) -> StockGroup:
        if self._device.type != "cuda":
            fix = f"NCCL connects GPUs, and the trainer computes on {self._device.type}: take 'collective' or 'relay'"
            raise ConfigError(*_KEY, fix)
        return StockGroup(list(tensor_pieces(self._chunks)), receivers, host, number)

    def _transmit(self, group: StockGroup, version: int, deadline: float) -> None:
        group.send()


class WholeTensors:
    """vLLM's ``WeightSource`` (of 0.33) of the Hugging Face tensors, each in the dtype that the model has it in. ``metadata``: of
    each. Raises ConfigError for one that is no parameter of its own, as that of a layer's experts together."""

    def __init__(self, pieces: Sequence[TensorPiece], metadata: Sequence[Any]) -> None:
        if cut := [piece.name for piece in pieces if piece.held != piece.shape]:
            raise ConfigError(
                *_KEY, f"the trainer has {cut[0]} in parts, which vLLM's engine cannot send: take 'collective'"
            )
        self._pieces = pieces
        self.metadata = metadata
        self.given_up = False

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        """As ``metadata`` says."""
        for piece in self._pieces:
            self.check_wanted()
            yield piece.name, piece.read()

    def check_wanted(self) -> None:
        """Raises RetryableError when it is not wanted any more."""
        if self.given_up:
            raise RetryableError("it was given up")


class _OrchestratorCommands:
    """vLLM's ``VLLMWeightSyncClient``: here the orchestrator commands the workers, by the meeting."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...
