"""One real rank of the trainer, two steps on gloo: the most host memory it took beyond what it began with. Prints JSON.

``python -m scripts.bench.probes.megatron.memory_probe REQUEST SMALL RENDEZVOUS``: a
:class:`~megatron_rlplugin.memory.rank_memory.StepRequest` as JSON; a folder with a small model of the same kind, whose step
loads beforehand what a process loads once; where the ranks meet. Weights are drawn: the pages of a file that is read would count.
"""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_rlplugin.memory.planned_step import longest_micro_batch
from megatron_rlplugin.memory.rank_memory import StepRequest
from megatron_rlplugin.objective.policy_loss import Coefficients, policy_loss
from megatron_rlplugin.trainer.learner import Learner, Rendezvous
from megatron_rlplugin.weights import hf_bridge
from orchestrator.settings.trainer_settings import TrainerSection


def main() -> None:
    """The small model's steps, then the measured ones."""
    request = StepRequest(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    torch.manual_seed(request.rank)
    vars(hf_bridge).update(load_hf=_draw)
    step(replace(request, folder=sys.argv[2], tokens=16), sys.argv[3])
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the high-water mark is what there is now
    began = memory("VmRSS")
    step(request, sys.argv[3])
    print(json.dumps({"rank": request.rank, "bytes": memory("VmHWM") - began, "began": began}))


def step(request: StepRequest, meeting: str) -> None:
    """Two optimizer steps: the second has Adam's moments from its start."""
    from megatron_rlplugin.megatron_options import sort_options

    settings = TrainerSection.from_dict(request.settings)
    ranks = Rendezvous(request.rank, request.world, meeting, 600.0)
    learner = Learner(request.folder, settings, 2, request.dtype, ranks, options=sort_options(settings.megatron))
    coefficients = Coefficients.from_settings(settings)
    batch = longest_micro_batch(request, settings, learner)
    batches = [batch] * learner.layout.pipeline * (2 if learner.layout.virtual else 1)
    for _ in range(2):
        learner.advance_schedule()
        learner.update_weights(
            batches, lambda output, batch: policy_loss(output, batch.tokens, coefficients, group=learner.tensor_group)
        )


def memory(name: str) -> int:
    """Bytes, of this process's status."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise LookupError(name)


def _draw(model: Any, folder: str) -> None:
    with torch.no_grad():
        for chunk in model:
            for parameter in chunk.parameters():
                parameter.normal_(std=0.02)


if __name__ == "__main__":
    main()
