"""A trainer's state told in coordinates that no layout has a part in, to compare checkpoints over layouts.

One rank of it: ``SCENARIOS.json RANK WORLD_SIZE INIT_METHOD`` plays each scenario (load, train, save) and writes ``RANK.json``
beside the file. Tests and other Megatron-Core versions (by PYTHONPATH) use the same program.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rlplugin import parallel_layout
from megatron_rlplugin.trainer import sharded_state
from megatron_rlplugin.trainer.learner import Learner
from megatron_rlplugin.trainer.megatron_trainer import MegatronTrainer
from megatron_rlplugin.weights.tensor_places import tensor_pieces
from orchestrator.api import CoserveError
from scripts.bench.probes.megatron.trainer_probe import comparable, make_batch, state_digest, weights_digest


def whole_state(learner: Learner) -> dict[str, str]:
    """Digest of every master and moment of the whole model, by Hugging Face name. Every rank calls it."""
    pieces: dict[int, list[Any]] = {}
    for piece in tensor_pieces(learner.chunks):
        pieces.setdefault(id(piece.parameter), []).append(piece)
    flat: dict[tuple[int, str], tuple[Tensor, list[tuple[int, int, Tensor]]]] = {}
    for kept in sharded_state.kept_state(learner.optimizer):
        for name, tensor in kept.tensors.items():
            said = "master" if name in ("param", "fp32_param") else name
            own = flat.setdefault((id(kept.parameter), said), (kept.parameter, []))
            own[1].append((kept.start, kept.stop, tensor.detach().reshape(-1)))
    told: list[Any] = []
    for (key, said), (parameter, parts) in flat.items():
        # A distributed optimizer has parts of a parameter: ``mask`` says which.
        full, mask = torch.zeros(parameter.numel()), torch.zeros(parameter.numel())
        for start, stop, values in parts:
            full[start:stop], mask[start:stop] = values, 1
        for piece in pieces[key]:
            held, known = (piece.cut_from(value.view(parameter.shape)) for value in (full, mask))
            told.append((piece.name, said, piece.dim, piece.start, held, known))
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, told)
    whole: dict[tuple[str, str], dict[int, Tensor]] = {}
    seen: dict[tuple[str, str, int], Tensor] = {}
    dims: dict[str, int] = {}
    for name, said, dim, start, held, mask in (item for items in everywhere for item in items):
        parts_of = whole.setdefault((name, said), {})
        dims[name] = max(dim, dims.get(name, -1))
        if start not in parts_of:
            parts_of[start], seen[name, said, start] = held.clone(), mask.clone()
        else:  # what two ranks hold is the same
            known = seen[name, said, start]
            assert torch.equal(parts_of[start] * known * mask, held * known * mask), (name, said)
            parts_of[start] += held * (1 - known)
            seen[name, said, start] = torch.maximum(known, mask)
    assert all(bool(mask.all()) for mask in seen.values())
    answer = {}
    for (name, said), parts_of in sorted(whole.items()):
        values = [parts_of[start] for start in sorted(parts_of)]
        tensor = torch.cat(values, dims[name]) if len(values) > 1 else values[0]
        answer[f"{name} {said}"] = hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
    return answer


def play(scenario: dict[str, Any], rank: int, world: int, init_method: str) -> dict[str, Any]:
    """Load ``load``, train ``steps``, save to ``save``, train one more beside it; what the state was before and after."""
    answer: dict[str, Any] = {}
    try:
        trainer = MegatronTrainer(
            model=scenario["model"],
            settings=scenario["settings"],
            dtype=scenario.get("dtype", "float32"),
            total_steps=10,
            seed=3,
            rank=rank,
            world_size=world,
            init_method=init_method,
        )
        if "load" in scenario:
            answer["version"] = _run(trainer.load(scenario["load"]))
        for step in range(trainer._version, trainer._version + scenario.get("steps", 0)):
            _run(trainer.train_step(make_batch(step)))
        answer |= _told(trainer)
        if "save" in scenario:
            _run(trainer.save(scenario["save"]))
        answer["next"] = comparable(_run(trainer.train_step(make_batch(trainer._version, seed=2))))
        answer["state after"] = state_digest(trainer._learner)
        _run(trainer.saved())
        _run(trainer.close())
    except CoserveError as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    parallel_layout.leave_parallel()
    return answer


def _told(trainer: MegatronTrainer) -> dict[str, Any]:
    found: dict[str, Any] = {"weights": weights_digest(trainer._learner), "state": state_digest(trainer._learner)}
    found["whole"] = whole_state(trainer._learner)
    if trainer._critic is not None:
        found["critic"] = state_digest(trainer._critic)
    reference = trainer._experience.reference
    if reference is not None:
        with trainer._learner.swapped_weights(reference):
            found["reference"] = weights_digest(trainer._learner)
    return found


def _run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


def main(arguments: Sequence[str]) -> None:
    """See the module."""
    file, rank, world, init_method = Path(arguments[0]), int(arguments[1]), int(arguments[2]), arguments[3]
    torch.set_num_threads(1)
    scenarios = json.loads(file.read_text(encoding="utf-8"))
    answers = {name: play(scenario, rank, world, init_method) for name, scenario in scenarios.items()}
    parallel_layout.shutdown_parallel()
    (file.parent / f"{rank}.json").write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
