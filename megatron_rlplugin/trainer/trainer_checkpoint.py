"""The trainer's part of a checkpoint: weights as a Hugging Face folder, the rest as plain tensors and containers.

Guarantees: what was saved and loaded continues bit-identically (weights, fp32 masters, Adam's moments, schedule, random
generators, the critic, the reference's weights); loading unpickles nothing but tensors and containers; a checkpoint of
another architecture, dtype or layout is refused with a ConfigError before anything was changed. Each rank writes one file
of its own and the digests of what it wrote, rank 0 the weights; all ranks must see the same folder. A rank that fails makes the
others fail.
"""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from safetensors import SafetensorError
from torch import Tensor

from megatron_rlplugin.model import read_shape
from megatron_rlplugin.trainer.learner import Learner
from megatron_rlplugin.trainer.replicas import Replicas
from megatron_rlplugin.weights import hf_bridge
from megatron_rlplugin.weights.tensor_places import tensor_shapes
from orchestrator.api import CHECKPOINT_DIGESTS, ConfigError, RunError

FORMAT = 2
FILE_BYTES = 4 << 30  # of an exported file, but for a tensor that is larger
STATE_FILE = "trainer.pt"
_BESIDE_WEIGHTS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_OWN_OPTIONS = ("max_lr", "min_lr", "betas")
_MORE_BESIDE = ("special_tokens_map.json", "vocab.json", "merges.txt", "chat_template.jinja", "added_tokens.json")


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


def state_file(rank: int) -> str:
    """The file of this rank."""
    return STATE_FILE if rank == 0 else f"trainer-{rank:05d}.pt"


def export(learner: Learner, replicas: Replicas, folder: str | Path) -> None:
    """A Hugging Face folder with the present weights; config and tokenizer are copied from the model's folder.

    Every rank calls it, rank 0 writes, in files of :data:`FILE_BYTES`: it holds one of them in host memory at a time."""
    path, writes = Path(folder), replicas.rank == 0
    source = Path(learner.folder)
    names = _file_names(tensor_shapes(learner.chunks), next(learner.parameters()).element_size())
    if writes:
        path.mkdir(parents=True, exist_ok=True)
        with _writing(path / "config.json"):
            for name in (*_BESIDE_WEIGHTS, *_MORE_BESIDE):
                if (source / name).is_file() and source.resolve() != path.resolve():
                    shutil.copyfile(source / name, path / name)
    held: dict[str, Tensor] = {}
    last = ""
    for name, tensor in hf_bridge.export_hf(learner.chunks):
        if writes:
            if last and names[name] != last:
                _write_tensors(path / last, held)
            held[name], last = tensor.cpu(), names[name]
    if writes:
        _write_tensors(path / last, held)
        if len(set(names.values())) > 1:
            with _writing(path / "model.safetensors.index.json") as file:
                file.write_text(json.dumps({"metadata": {}, "weight_map": names}, indent=1), encoding="utf-8")


def _file_names(shapes: Mapping[str, tuple[int, ...]], itemsize: int) -> dict[str, str]:
    """The file of each tensor, in order; transformers' names."""
    places, filled = {}, 0
    number = 1
    for name, shape in shapes.items():
        size = math.prod(shape) * itemsize
        if filled and filled + size > FILE_BYTES:
            number, filled = number + 1, 0
        places[name], filled = number, filled + size
    if number == 1:
        return dict.fromkeys(shapes, "model.safetensors")
    return {name: f"model-{place:05d}-of-{number:05d}.safetensors" for name, place in places.items()}


def _write_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    """All of them, which are forgotten then."""
    from safetensors.torch import save_file

    with _writing(file):
        save_file(tensors, file, metadata={"format": "pt"})
    tensors.clear()


@contextmanager
def _writing(file: Path) -> Iterator[Path]:
    """What a full disk raises in a library's C++ names neither file nor disk. Raises RunError."""
    try:
        yield file
    except (OSError, RuntimeError, SafetensorError) as error:
        free = shutil.disk_usage(file.parent).free >> 20
        raise RunError(f"{file} cannot be written ({free} MB free there): {error}") from error


def save(parts: TrainerParts, position: TrainerPosition, folder: str | Path) -> None:
    """Write into an empty folder (made if needed). When it returns, every rank has written."""
    path, replicas = Path(folder), parts.replicas

    def empty() -> None:
        if replicas.rank == 0:
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise ConfigError("checkpoint", str(path), "is not an empty folder")

    def write() -> None:
        state = {
            "format": FORMAT,
            "position": asdict(position),
            "dtype": parts.policy.dtype,
            "layout": _layout(parts),
            **_state_of(parts.policy),
            "critic": None if parts.critic is None else _critic_state(parts.critic),
            "reference": parts.reference,
            "torch_rng": torch.get_rng_state(),
            "minibatch_rng": parts.generator.get_state(),
        }
        with _writing(path / state_file(replicas.rank)) as file:
            torch.save(state, file)
        _digest(path, replicas.rank)

    _together(replicas, "find an empty folder for the checkpoint", empty)
    _together(replicas, "write its weights", lambda: export(parts.policy, replicas, path))
    _together(replicas, "write its optimizer state", write)


def _digest(path: Path, rank: int) -> None:
    """Of the files that this rank wrote: while its node's page cache has them, and not by one process for all ranks."""
    own = [path / state_file(rank)]
    if rank == 0:  # the Hugging Face folder
        own += [
            file for file in path.iterdir() if file.suffix != ".pt" and not file.match(CHECKPOINT_DIGESTS.format("*"))
        ]
    found = {}
    for file in own:
        with file.open("rb") as stream:
            found[file.name] = [file.stat().st_size, hashlib.file_digest(stream, cast(Any, xxhash.xxh3_64)).hexdigest()]
    (path / CHECKPOINT_DIGESTS.format(f"{rank:05d}")).write_text(json.dumps(found), encoding="ascii")


def load(parts: TrainerParts, folder: str | Path) -> TrainerPosition:
    """Restore what :func:`save` wrote."""
    path = Path(folder)
    state: dict[str, Any] = {}
    _together(parts.replicas, "read the checkpoint", lambda: state.update(_checked(parts, path)))
    hf_bridge.load_hf(parts.policy.chunks, path)
    _restore(parts.policy, state)
    if parts.critic is not None:
        _set_parameters(parts.critic, state["critic"]["weights"])
        _restore(parts.critic, state["critic"])
    parts.reference = state["reference"] and parts.policy.pinned(state["reference"])
    torch.set_rng_state(state["torch_rng"])
    parts.generator.set_state(state["minibatch_rng"])
    return TrainerPosition(**state["position"])


def _checked(parts: TrainerParts, path: Path) -> dict[str, Any]:
    """The state of this rank, when it fits this trainer."""
    shape = read_shape(path)
    for name, value in asdict(parts.policy.shape).items():
        found = getattr(shape, name)
        if found != value:
            fix = f"checkpoint {path} is of another model: this run's {name} is {value!r}; resume with that model"
            raise ConfigError(f"model.{name}", found, fix)
    state = _read_state(path, parts.replicas.rank)
    if state["dtype"] != parts.policy.dtype:
        fix = f"is the dtype of checkpoint {path}; this run's is {parts.policy.dtype}"
        raise ConfigError("model.dtype", state["dtype"], fix)
    if state["layout"] != _layout(parts):
        fix = f"is the layout of checkpoint {path}; this run's is {_layout(parts)}; resume with that layout"
        raise ConfigError("trainer.layout", state["layout"], fix)
    needed = {"critic": parts.critic is not None, "reference": parts.keeps_reference}
    for name, wanted in needed.items():
        if wanted and state[name] is None:
            raise ConfigError("checkpoint", str(path), f"has no {name}, which the trainer settings of this run need")
    return state


def _layout(parts: TrainerParts) -> dict[str, Any]:
    return {**asdict(parts.policy.layout), "world_size": parts.replicas.world}


def _state_of(learner: Learner) -> dict[str, Any]:
    return {"optimizer": optimizer_state(learner.optimizer), "scheduler": learner.scheduler.state_dict()}


def _critic_state(critic: Learner) -> dict[str, Any]:
    return {**_state_of(critic), "weights": critic.snapshot()}


def _restore(learner: Learner, state: dict[str, Any]) -> None:
    """Optimizer and schedule, once the weights are those of the checkpoint."""
    learner.reset_optimizer()
    # The settings of this run decide (it may be prolonged); the checkpoint says how far the schedule got.
    own = [{name: group[name] for name in _OWN_OPTIONS} for group in learner.optimizer.param_groups]
    _load_optimizer(learner.optimizer, state["optimizer"])
    for group, options in zip(learner.optimizer.param_groups, own, strict=True):
        group.update(options)
    learner.scheduler.step(int(state["scheduler"]["num_steps"]))


def optimizer_state(optimizer: Any) -> Any:
    """A copy as plain containers and tensors, of this rank.

    A distributed optimizer's ``state_dict`` leaves out this rank's shard: it is taken from the optimizer inside."""
    if not _is_distributed(optimizer):
        return _plain(optimizer.state_dict())
    inner = [part.optimizer for part in _chain(optimizer)]
    masters = [[value for group in part.param_groups for value in group["params"]] for part in inner]
    return _plain({"inner": [part.state_dict() for part in inner], "masters": masters})


def _load_optimizer(optimizer: Any, state: Any) -> None:
    if not _is_distributed(optimizer):
        optimizer.load_state_dict(state)
        return
    for part, inner, masters in zip(_chain(optimizer), state["inner"], state["masters"], strict=True):
        part.optimizer.load_state_dict(inner)
        own = [value for group in part.optimizer.param_groups for value in group["params"]]
        with torch.no_grad():
            for value, saved in zip(own, masters, strict=True):
                value.copy_(saved)


def _is_distributed(optimizer: Any) -> bool:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    return any(isinstance(part, DistributedOptimizer) for part in _chain(optimizer))


def _chain(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _set_parameters(learner: Learner, weights: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(learner.weights(), weights, strict=True):
            parameter.copy_(value)


def _together(replicas: Replicas, what: str, act: Callable[[], None]) -> None:
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


def _read_state(path: Path, rank: int) -> dict[str, Any]:
    fix = "is no checkpoint of this trainer; give a folder that it saved"
    try:
        state = torch.load(path / state_file(rank), map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ConfigError("checkpoint", str(path), f"{fix} ({error})") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ConfigError("checkpoint", str(path), f"{fix} (format {FORMAT})")
    return state


def _plain(value: Any) -> Any:
    """Copy containers and tensors, so that the file holds nothing that weights_only refuses."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)  # not on the device, which has no room for the state twice
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"the optimizer's state holds a {type(value).__name__}, which a checkpoint cannot")
