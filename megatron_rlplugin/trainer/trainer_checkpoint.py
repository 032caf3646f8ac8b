"""The trainer's part of a checkpoint, in Megatron-Core's own form (``torch_dist``): each rank its shards, beside training.

Guarantees: what was saved and loaded continues bit-identically, in the same layout or another (tensor, pipeline, expert and data
parallel sizes, distributed optimizer or not): weights, fp32 masters, Adam's moments, schedule, random generators, the critic,
the reference's weights. Megatron-LM reads it: keys, optimizer and schedule are its own (:mod:`.sharded_state`), ours stand beside
them. Nothing but tensors, containers and the index's own records is unpickled; a checkpoint of another architecture or dtype is
refused with a ConfigError before anything was changed. All ranks must see the same folder. A rank that fails makes the others
fail.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rlplugin.model import read_shape
from megatron_rlplugin.trainer import sharded_state
from megatron_rlplugin.trainer.learner import Learner
from megatron_rlplugin.trainer.replicas import Replicas
from megatron_rlplugin.trainer.sharded_writer import ShardedWriter
from megatron_rlplugin.weights.hf_export import export_folder
from orchestrator.api import ConfigError, RunError

FORMAT = 3
_OURS = "rl_coserve"  # beside Megatron-LM's entries
_INDEX = ".metadata"
_CRITIC, _REFERENCE = "critic.", "reference."  # before the keys of their tensors
_INDEX_RECORDS = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.planner": ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrainerPosition:
    """Where in the run the trainer is: steps done, version of the weights."""

    step: int
    version: int


@dataclass(slots=True)
class TrainerParts:
    """What of a trainer is saved and restored; :func:`load` replaces ``reference``."""

    policy: Learner
    critic: Learner | None
    reference: list[Tensor] | None
    generator: torch.Generator
    replicas: Replicas
    keeps_reference: bool  # a checkpoint without one is refused


def export(learner: Learner, replicas: Replicas, folder: str | Path) -> None:
    """A Hugging Face folder with the present weights; config and tokenizer are copied from the model's folder. Every rank calls
    it."""
    together(replicas, "write the Hugging Face folder", lambda: export_folder(learner.chunks, learner.folder, folder))


def begin_save(parts: TrainerParts, position: TrainerPosition, folder: str | Path, writer: ShardedWriter) -> None:
    """Write into an empty folder (made if needed). When it returns the state is copied; ``writer`` says when it is written."""
    path, replicas, policy = Path(folder), parts.replicas, parts.policy

    def empty() -> None:
        if replicas.rank == 0:
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise ConfigError("checkpoint", str(path), "is not an empty folder")

    together(replicas, "find an empty folder for the checkpoint", empty)
    for learner in _learners(parts):
        sharded_state.prepare_state(learner.optimizer)
    ours = {
        "format": FORMAT,
        **asdict(position),
        "world": replicas.world,
        "dtype": policy.dtype,
        "policy": _progress(policy),
        "critic": parts.critic and _progress(parts.critic),
        "reference": parts.reference is not None,
        "minibatch_rng": parts.generator.get_state(),
    }
    state = {
        "args": sharded_state.megatron_arguments(policy, replicas.world),
        "checkpoint_version": 3.0,
        "iteration": position.step,
        "optimizer": sharded_state.optimizer_common(policy.optimizer),
        "opt_param_scheduler": policy.scheduler.state_dict(),
        "num_floating_point_operations_so_far": 0,
        _OURS: ours,
        **_sharded(parts, replicas.rank, replicas.world),
    }
    writer.begin(path, state, dict(sharded_state.CONTENT), Path(policy.folder) / "config.json")


def load(parts: TrainerParts, folder: str | Path) -> TrainerPosition:
    """Restore what :func:`begin_save` had written, in any layout."""
    from megatron.core import dist_checkpointing

    path, replicas = Path(folder), parts.replicas
    ours: dict[str, Any] = {}
    together(replicas, "read the checkpoint", lambda: ours.update(_checked(parts, path)))
    for learner in _learners(parts):
        learner.reset_optimizer()
        sharded_state.prepare_state(learner.optimizer)
    if not parts.keeps_reference:
        parts.reference = None
    elif parts.reference is None:
        parts.reference = parts.policy.snapshot()
    rank, world = replicas.rank, ours["world"]
    state = _sharded(parts, rank if world == replicas.world else 0, world, ours)
    loaded = _reading(path, lambda: dist_checkpointing.load(state, str(path), validate_access_integrity=False))
    for learner, prefix in zip(_learners(parts), ("", _CRITIC), strict=False):
        for chunk, name in zip(learner.chunks, _names(learner, prefix), strict=True):
            chunk.module.load_state_dict(loaded[name])
        sharded_state.put_back(learner.optimizer)
        progress = ours["critic" if prefix else "policy"]
        sharded_state.set_steps(learner.optimizer, progress["optimizer_steps"])
        # The settings of this run decide (it may be prolonged); the checkpoint says how far the schedule got.
        learner.scheduler.step(progress["schedule_steps"])
    torch.set_rng_state(loaded["torch_rng"])
    parts.generator.set_state(ours["minibatch_rng"])
    return TrainerPosition(ours["step"], ours["version"])


def together(replicas: Replicas, what: str, act: Callable[[], None]) -> None:
    """All ranks do it, or all raise: the error itself where it happened."""
    failure: Exception | None = None
    try:
        act()
    except Exception as error:  # noqa: BLE001  raised again below, once the other ranks know
        failure = error
    fine = replicas.all_true(failure is None)
    if failure is not None:
        raise failure
    replicas.require_everywhere(fine, what)


def _learners(parts: TrainerParts) -> list[Learner]:
    return [parts.policy] if parts.critic is None else [parts.policy, parts.critic]


def _names(learner: Learner, prefix: str) -> list[str]:
    count = len(learner.chunks)
    return [prefix + ("model" if count == 1 else f"model{place}") for place in range(count)]


def _progress(learner: Learner) -> dict[str, Any]:
    return {
        "optimizer_steps": sharded_state.steps_of(learner.optimizer),
        "schedule_steps": int(learner.scheduler.num_steps),
        "master": sharded_state.master_name(learner.optimizer),
    }


def _sharded(parts: TrainerParts, place: int, world: int, ours: dict[str, Any] | None = None) -> dict[str, Any]:
    """All that ranks hold shards of. ``place``: of ``world`` random states, this rank's. ``ours``: of the checkpoint that is
    loaded."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding

    state: dict[str, Any] = {}
    for learner, prefix in zip(_learners(parts), ("", _CRITIC), strict=False):
        model = sharded_state.model_state(learner.chunks)
        master = None if ours is None else ours["critic" if prefix else "policy"]["master"]
        shards = {"optimizer_state": sharded_state.optimizer_shards(learner, model, master)}
        if not prefix and parts.reference is not None:
            shards["reference"] = sharded_state.weight_shards(learner, model, parts.reference, _REFERENCE)
        found = {**model, **shards}
        if prefix:
            add_prefix_for_sharding(found, prefix)
        state |= {prefix + name: value for name, value in found.items()}
    random = torch.get_rng_state() if ours is None else None
    state["torch_rng"] = ShardedObject(f"{_OURS}.torch_rng", random, (world,), (place,))
    return state


def _checked(parts: TrainerParts, path: Path) -> dict[str, Any]:
    """What we wrote beside Megatron-LM's entries, when the checkpoint fits this trainer."""
    shape = read_shape(path)
    for item in fields(shape):
        found, value = getattr(shape, item.name), getattr(parts.policy.shape, item.name)
        if found != value:
            fix = (
                f"checkpoint {path} is from another model: this run's {item.name} is {value!r}; resume with that model"
            )
            raise ConfigError(f"model.{item.name}", found, fix)
    ours = _read_ours(path)
    if ours["dtype"] != parts.policy.dtype:
        fix = f"is the dtype of checkpoint {path}; this run's is {parts.policy.dtype}"
        raise ConfigError("model.dtype", ours["dtype"], fix)
    needed = {"critic": parts.critic is not None, "reference": parts.keeps_reference}
    for name, wanted in needed.items():
        if wanted and not ours[name]:
            raise ConfigError("checkpoint", str(path), f"has no {name}, which the trainer settings of this run need")
    return ours


def _read_ours(path: Path) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    _check_index(path / _INDEX)
    common = _reading(path, lambda: dist_checkpointing.load_common_state_dict(str(path)))
    ours = common.get(_OURS) if isinstance(common, dict) else None
    if not isinstance(ours, dict) or ours.get("format") != FORMAT:
        found = f"format {ours['format']}" if isinstance(ours, dict) and "format" in ours else "another kind"
        raise _foreign(path, f"it is of {found}, this version reads {FORMAT}; another version may have written it")
    return ours


def _reading(path: Path, act: Callable[[], Any]) -> Any:
    """Raises ConfigError for what the libraries raise over files that are missing or damaged."""
    try:
        return act()
    except (RunError, ConfigError):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            raise
        raise _foreign(path, f"{type(error).__name__}: {error!s:.300}") from error


def _foreign(path: Path, why: str) -> ConfigError:
    return ConfigError(
        "checkpoint", str(path), f"is not a checkpoint of this trainer; give a folder that it saved ({why})"
    )


class _IndexReader(pickle.Unpickler):
    """Reads an index, or raises for a pickle that would import anything else."""

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or name in _INDEX_RECORDS.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in it")


def _check_index(file: Path) -> None:
    """The index is a pickle, which Megatron-Core loads as it is: look at it first. Raises ConfigError."""
    try:
        _IndexReader(io.BytesIO(file.read_bytes())).load()
    except (OSError, pickle.UnpicklingError, EOFError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise _foreign(file.parent, f"{file.name}: {error}") from error
