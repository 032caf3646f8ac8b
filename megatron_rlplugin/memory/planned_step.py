"""The trainer's own step on fake tensors: what one rank needs of memory. A program of its own, with JSON in and out.

Guarantees: model, DDP, optimizer, loss, schedule and copies are those of :class:`megatron_rlplugin.trainer.learner.Learner`
with the run's settings; no weights are read, no memory is taken, no other rank is needed. What has no fake form is said in
:mod:`megatron_rlplugin.memory.fake_device`; optimizer variants that need CUDA or Transformer Engine are counted by their bytes
per parameter (:func:`megatron_rlplugin.memory.rank_memory.optimizer_bytes`). The peak is that of any step but the first, which
makes Adam's moments. Asked for what is there between two steps, it runs none and counts the moments: less than any step needs.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from dataclasses import asdict
from typing import Any

import numpy as np

from megatron_rlplugin.memory.fake_device import FakeDevice, fake_device
from megatron_rlplugin.memory.rank_memory import (
    ACTIVATIONS,
    COPIES,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    PUBLISHED,
    WEIGHTS,
    RankMemory,
    StepRequest,
    flat_settings,
    optimizer_bytes,
)
from megatron_rlplugin.memory.storage_ledger import StorageLedger
from orchestrator.settings.trainer_settings import TrainerSection

# Of the optimizer's options, those that a process without CUDA cannot build.
_BY_BYTES = (
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
    "overlap_cpu_optimizer_d2h_h2d",
    "use_torch_optimizer_for_cpu_offload",
    "pin_cpu_grads",
    "pin_cpu_params",
    "use_precision_aware_optimizer",
    "store_param_remainders",
    "main_params_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
)
_LOW = ("fp8", "fp4")  # what options of lower precision begin with: counted as without them, which is more


def measure(request: StepRequest) -> RankMemory:
    """Run it, in this process, which is to end afterwards. Raises ConfigError as the trainer's start would."""
    from megatron_rlplugin.model_families import read_shape

    began = time.perf_counter()
    given = flat_settings(request.settings)
    asked = given.get("megatron", {})
    options = {key: value for key, value in asked.items() if key not in _BY_BYTES and key[:3] not in _LOW}
    settings = TrainerSection.from_dict({**given, "megatron": options})
    chosen = read_shape(request.folder).num_experts_per_tok
    how: dict[str, Any] = {
        "imbalance": request.imbalance,
        "context": settings.context_parallel,
        "as_run": request.as_run,
    }
    with fake_device(request.rank, request.world, experts_per_token=chosen, **how) as ledger:
        found = _run(request, settings, ledger)
    if asked.keys() & set(_BY_BYTES):
        on_device, on_host = optimizer_bytes(asked, found["sharded"], request.dtype)
        found["device"][OPTIMIZER], found["host"][OPTIMIZER] = on_device, on_host
    return RankMemory(rank=request.rank, seconds=time.perf_counter() - began, **found)


def _run(request: StepRequest, settings: TrainerSection, ledger: FakeDevice) -> dict[str, Any]:
    from megatron_rlplugin.megatron_options import sort_options
    from megatron_rlplugin.objective.critic import ValueTokens, install_value_head, value_loss
    from megatron_rlplugin.objective.policy_loss import Coefficients, policy_loss
    from megatron_rlplugin.trainer.learner import Learner, Rendezvous
    from megatron_rlplugin.trainer.memory_residency import TrainerResidency
    from megatron_rlplugin.weights.rank_publisher import PART_BYTES
    from megatron_rlplugin.weights.weight_export import serving_bytes

    def made(**more: Any) -> Any:
        ranks, options = Rendezvous(request.rank, request.world), sort_options(settings.megatron)
        steps = settings.lr_warmup_steps + 2  # a schedule that fits; no rate is ever used
        return Learner(request.folder, settings, steps, request.dtype, ranks, options=options, **more)

    learner = made()
    critic = made(prepare=install_value_head) if settings.needs_critic else None
    coefficients = Coefficients.from_settings(settings)

    def loss(output: Any, batch: Any) -> Any:
        total, said = policy_loss(output, batch.tokens, coefficients, group=learner.tensor_group)
        return (total + learner.heads_loss(output, batch)[0] if output.ahead else total), said

    def value_loss_of(values_T1: Any, batch: Any) -> Any:
        known = ValueTokens(batch.returns_T, batch.values_T, batch.tokens.weights_T, batch.tokens.denominator)
        return value_loss(values_T1, known, settings.value_clip)

    batches = (
        [longest_micro_batch(request, settings, learner)]
        * learner.layout.pipeline
        * (2 if learner.layout.virtual else 1)
    )
    learners = [learner] if critic is None else [learner, critic]
    residencies = [TrainerResidency(one.chunks, one.optimizer, one.stream) for one in learners]
    for residency in residencies:
        ledger.move_to_tag(residency._gradients.tensors, GRADIENTS)
        ledger.move_to_tag(residency._optimizer_tensors(), OPTIMIZER)
    parameters = sum(parameter.numel() for one in learners for parameter in one.parameters())
    if request.resting:
        stepped = [group for one in learners for group in one.optimizer.param_groups]
        sharded = sum(parameter.numel() for group in stepped for parameter in group["params"])
        parts = {tag: ledger.now[tag] for tag in (WEIGHTS, GRADIENTS)} | dict.fromkeys((ACTIVATIONS, LOGITS, COPIES), 0)
        parts[OPTIMIZER], away = optimizer_bytes({}, sharded, request.dtype)
        return {
            "parameters": parameters,
            "device": parts,
            "host": {OPTIMIZER: away},
            "phase": "between steps",
            "sharded": sharded,
        }
    host = {}
    with ledger.tag(StorageLedger.HOST):
        kept = [learner.snapshot() for asked in (settings.keeps_reference, settings.logprob_gap_samples) if asked]
        host["copies"] = sum(_pinned(copy) for copies in kept for copy in copies)
    peaks: dict[str, Counter[str]] = {}

    def keep_peak(phase: str) -> None:
        peaks[phase] = Counter({tag: size for tag, size in ledger.at_peak.items() if tag != StorageLedger.HOST})
        ledger.restart_peak()

    ledger.restart_peak()
    with ledger.tag(COPIES):
        if kept:  # the passes under other weights need less than one with a gradient; the exchange is before and after
            learner._exchange_weights(kept[0])
        keep_peak("exchange of weights")
    with ledger.tag(ACTIVATIONS):
        for one in learners:
            one.begin_step()
            one.feed(batches, loss if one is learner else value_loss_of)
        keep_peak("forward and backward")
        for one, residency in zip(learners, residencies, strict=True):
            one.finish_step()
            ledger.move_to_tag(residency._optimizer_tensors(), OPTIMIZER)
        keep_peak("optimizer step")
    static = {tag: ledger.now[tag] for tag in (WEIGHTS, GRADIENTS, OPTIMIZER)}
    totals = {phase: sum(peak.values()) for phase, peak in peaks.items()}
    for phase in ("exchange of weights", "forward and backward"):  # in the first step Adam's moments come after these
        totals[phase] += static[OPTIMIZER] - peaks[phase][OPTIMIZER]
    # Of what this rank publishes: on its host what was published last, or is being sent (with differences that is the same copy);
    # on the device the one that finds what a step changes.
    published = serving_bytes(learner.chunks, PART_BYTES)
    if request.differences or request.overlap:
        host[PUBLISHED] = published
    watched = published if request.differences else 0
    totals["optimizer step"] += watched
    phase = max(totals, key=totals.__getitem__)
    moving = Counter({tag: size for tag, size in peaks[phase].items() if tag not in static})
    if phase == "optimizer step":
        moving = Counter({ACTIVATIONS: totals[phase] - sum(static.values()) - watched, COPIES: watched})
    else:
        moving[ACTIVATIONS] += sum(peaks[phase][tag] - static[tag] for tag in (WEIGHTS, GRADIENTS))
    return {
        "parameters": parameters,
        "device": {**static, ACTIVATIONS: moving[ACTIVATIONS], LOGITS: moving[LOGITS], COPIES: moving[COPIES]},
        "host": host,
        "phase": phase,
        "phases": totals,
        "sharded": static[OPTIMIZER] // (12 if request.dtype == "bfloat16" else 8),
    }


def _pinned(copy: Any) -> int:
    """Bytes of its pinned memory: torch's allocator rounds each block up to a power of two (``torch.cuda.host_memory_stats``)."""
    return 1 << (int(copy.nbytes) - 1).bit_length()


def longest_micro_batch(request: StepRequest, settings: TrainerSection, learner: Any) -> Any:
    """Rows of the longest kind, all of whose tokens are the policy's."""
    from megatron_rlplugin.trainer.micro_batches import MicroBatchLimits, TrainRow, micro_batch

    length = request.tokens
    values = np.zeros(length - 1, dtype=np.float32)
    flags = np.ones(length - 1, dtype=np.bool_)
    row = TrainRow(
        name="",
        group="",
        token_ids=np.zeros(length, dtype=np.int64),
        positions=np.arange(1, length),
        rollout=values,
        fresh=flags,
        kept=flags,
        advantages=values,
        old=values if settings.minibatches > 1 else None,
        reference=values if settings.needs_reference else None,
        values=values if settings.needs_critic else None,
        returns=values if settings.needs_critic else None,
    )
    multiple = learner.row_multiple
    limits = MicroBatchLimits(settings.micro_batch_size, settings.order, None, multiple, settings.micro_batch_tokens)
    return micro_batch([row] * request.rows, range(request.rows), limits, settings.loss_mean)


def main() -> None:
    """A :class:`StepRequest` as the argument, a :class:`RankMemory` on the last line of standard output; or an error."""
    from orchestrator.api import ConfigError

    try:
        answer = asdict(measure(StepRequest(**json.loads(sys.argv[1]))))
    except ConfigError as error:
        answer = {"error": [error.field, repr(error.value), error.fix]}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
