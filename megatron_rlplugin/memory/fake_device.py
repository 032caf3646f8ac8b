"""What a process without devices answers in place of one, so that the trainer's own step runs on fake tensors.

Guarantees: nothing of what is replaced changes a shape or a byte, but for what is said here. A process that entered
:func:`fake_device` stays changed: it is to be one that ends afterwards.

| on a device                                        | here                                                              |
| -------------------------------------------------- | ----------------------------------------------------------------- |
| collectives and sends                              | torch's fake process group; what is received has its shape only   |
| numbers read back (norms, counts, denominators)    | 1; ranks agree that a step is to be taken                         |
| weights of the model's folder                      | are not read                                                      |
| attention (flash kernels)                          | saves q, k, v, its output and a number a head and token; the      |
|                                                    | backward has an fp32 sum of q's gradient beside its results       |
| norms (one kernel)                                 | save their input and a number a token                             |
| tokens that each expert gets                       | ``imbalance`` times its share, on the rank that is looked at      |
| tokens of the policy that a rank of a context has  | as many as the others                                             |
| grouped products of experts                        | save their input; the backward has the gradients of all weights   |

``as_run``: attention, norms and experts' products are those of the CPU, to compare with a real process of this machine.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_rlplugin import cpu
from megatron_rlplugin.memory.rank_memory import LOGITS
from megatron_rlplugin.memory.storage_ledger import StorageLedger


class FakeDevice(StorageLedger):
    """The ledger, which also answers what only a device could: numbers, and sizes that depend on them."""

    def __init__(self, tag: str, experts_per_token: int, context: int) -> None:
        super().__init__(tag)
        self._experts_per_token, self._context = experts_per_token, context

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name()
        if function.namespace == "c10d":  # some have no form on fake tensors; what they would write is there already
            work = FakeWork().boxed()
            return work if len(function._schema.returns) == 1 else (args[0], work)
        if name == "aten::_local_scalar_dense":
            return True if args[0].dtype is torch.bool else 1.0 if args[0].dtype.is_floating_point else 1
        if name == "aten::masked_select":  # of each token, the experts that it goes to
            return self._note(args[0].new_empty(args[1].shape[-1] * self._experts_per_token))
        if name == "aten::nonzero":  # of the policy's tokens, those of this rank of a context
            return self._note(args[0].new_empty((-(-args[0].shape[0] // self._context), 1), dtype=torch.int64))
        if name == "aten::bincount":
            return self._note(args[0].new_empty((kwargs or {}).get("minlength", args[-1])))
        return super().__torch_dispatch__(function, types, args, kwargs)


@contextlib.contextmanager
def fake_device(
    rank: int, world: int, *, experts_per_token: int = 0, imbalance: float = 1.0, context: int = 1, as_run: bool = False
) -> Iterator[FakeDevice]:
    """This process as ``rank`` of ``world`` ranks, with fake tensors. Gives the ledger of what they would take."""
    from megatron.core.optimizer import clip_grads
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_rlplugin.stream import gradient_stream
    from megatron_rlplugin.stream.rank_agreement import RankAgreement
    from megatron_rlplugin.weights import hf_bridge

    cpu.activate()
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    dist.all_gather_object = _all_gather_object
    torch.nn.Module._apply = _apply
    agreed: dict[str, Any] = {
        "agree_on_step": lambda *args, **kwargs: RankAgreement(1.0, False, None, 0, 0),
        "any_rank": lambda flag: False,
    }
    vars(gradient_stream).update(agreed)
    vars(hf_bridge).update(load_hf=lambda model, folder: None)
    clip_grads.l2_norm_impl = lambda *args: (torch.zeros(1), None)
    _count_logits()
    _replace_dispatch(imbalance)
    if not as_run:
        _replace_kernels()
    with FakeTensorMode(allow_non_fake_inputs=True), FakeDevice("weights", experts_per_token, context) as ledger:
        global _ledger
        _ledger = ledger
        yield ledger


_ledger: FakeDevice | None = None


def _all_gather_object(objects: list[Any], own: Any, group: Any = None) -> None:
    """Every rank says the same."""
    objects[:] = [own] * len(objects)


def _apply(module: Any, fn: Any, recurse: bool = True) -> Any:
    """``torch.nn.Module._apply``, which cannot swap fake parameters."""
    for child in module.children():
        child._apply(fn)
    for key, parameter in list(module._parameters.items()):
        if parameter is not None:
            with torch.no_grad():
                applied = fn(parameter.data)
            if applied is not parameter.data and (applied.dtype, applied.device) != (parameter.dtype, parameter.device):
                fresh = torch.nn.Parameter(applied, parameter.requires_grad)
                fresh.__dict__.update(parameter.__dict__)
                module._parameters[key] = fresh
    for key, buffer in list(module._buffers.items()):
        if buffer is not None:
            module._buffers[key] = fn(buffer)
    return module


def _count_logits() -> None:
    """What the softmax over the vocabulary makes is logits, in both directions."""
    from megatron_rlplugin.objective.vocab_logprobs import _VocabSoftmax

    def tagged(function: Any) -> Any:
        def call(*args: Any) -> Any:
            assert _ledger is not None
            with _ledger.tag(LOGITS):
                return function(*args)

        return staticmethod(call)

    for name in ("forward", "backward"):
        setattr(_VocabSoftmax, name, tagged(getattr(_VocabSoftmax, name)))


# -- experts ---------------------------------------------------------------------------------------------------------


def _replace_dispatch(imbalance: float) -> None:
    import numpy as np
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    def preprocess(self: Any, routing_map: Tensor) -> Any:
        """The counts of Megatron's own, with the stated imbalance: as many tokens leave as are chosen, more arrive here."""
        self.num_out_tokens = sent = routing_map.size(0) * self.config.moe_router_topk
        arriving = math.ceil(sent * imbalance)
        if self.ep_size > 1 or self.tp_size > 1:
            self.input_splits = _shares(sent, self.ep_size)
            self.output_splits = _shares(arriving, self.ep_size)
            self.output_splits_tp = np.asarray([arriving] * self.tp_size)
        else:
            arriving = sent
        sources = self.tp_size * self.ep_size
        per_source = [_shares(part, self.num_local_experts) for part in _shares(arriving * self.tp_size, sources)]
        self.num_global_tokens_per_local_expert = np.asarray(per_source)
        chunks = np.arange(self.num_experts * self.tp_size)
        self.sort_input_by_local_experts = chunks.reshape(-1, self.num_local_experts).T.ravel()
        self.restore_output_by_local_experts = chunks.reshape(self.num_local_experts, -1).T.ravel()
        return self.num_global_tokens_per_local_expert.sum(axis=0)

    MoEAlltoAllTokenDispatcher.preprocess = preprocess


def _shares(total: int, parts: int) -> list[int]:
    return [total // parts + (index < total % parts) for index in range(parts)]


class _GroupedProduct(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, rows: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, *weights)
        return rows.new_empty(rows.shape[0], weights[0].shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors)


# -- kernels ---------------------------------------------------------------------------------------------------------


def _replace_kernels() -> None:
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.moe.experts import SequentialMLP

    from megatron_rlplugin.model_layers import LocalAttention, RMSNorm

    def attention(self: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any) -> Tensor:
        return _FlashAttention.apply(query, key, value)

    def norm(self: Any, rows: Tensor) -> Tensor:
        return _FusedNorm.apply(rows, self.weight)

    def experts(self: Any, hidden: Tensor, tokens_per_expert: Any, probs: Tensor) -> tuple[Tensor, None]:
        """As Megatron's grouped experts compute: all experts of a product at once."""
        first, second = ([getattr(e, n).weight for e in self.local_experts] for n in ("linear_fc1", "linear_fc2"))
        gate, linear = torch.chunk(_GroupedProduct.apply(hidden, *first), 2, dim=-1)
        inner = self.config.activation_func(gate) * linear
        inner = (inner * probs.unsqueeze(-1)).to(inner.dtype)
        return _GroupedProduct.apply(inner, *second), None

    DotProductAttention.forward = LocalAttention.forward = attention  # type: ignore[method-assign]
    RMSNorm.forward = norm  # type: ignore[assignment,method-assign]
    SequentialMLP.forward = experts


class _FlashAttention(torch.autograd.Function):  # type: ignore[misc]
    """q ``[S, B, heads, D]``; gives ``[S, B, heads * D]``."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        length, batch, heads, _ = query.shape
        context = query.new_empty(length, batch, heads * value.shape[-1])
        sums = query.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, context, sums)
        return context

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, sums = ctx.saved_tensors
        kept = torch.empty_like(query, dtype=torch.float32), torch.empty_like(sums)
        gradients = tuple(torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in (query, key, value))
        del kept
        return gradients


class _FusedNorm(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, rows.new_empty(rows.shape[:-1], dtype=torch.float32))
        return torch.empty_like(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        rows, weight, _ = ctx.saved_tensors
        return torch.empty_like(rows), torch.empty_like(weight)
