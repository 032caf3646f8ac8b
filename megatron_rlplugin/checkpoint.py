"""The trainer's part of a checkpoint: weights as a Hugging Face folder, the rest as plain tensors and containers.

Guarantees: what was saved and loaded continues bit-identically (weights, fp32 masters, Adam's moments, schedule, random
generators); loading unpickles nothing but tensors and containers; a checkpoint of another architecture or dtype is
refused with a ConfigError before anything was changed.
"""

from __future__ import annotations

import pickle
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_rlplugin import bridge
from megatron_rlplugin.learner import Learner
from megatron_rlplugin.model import read_shape
from orchestrator.api import ConfigError

FORMAT = 1
STATE_FILE = "trainer.pt"
_BESIDE_WEIGHTS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_OWN_OPTIONS = ("max_lr", "min_lr", "betas")
_MORE_BESIDE = ("special_tokens_map.json", "vocab.json", "merges.txt", "chat_template.jinja", "added_tokens.json")


@dataclass(frozen=True, slots=True)
class Position:
    """Where in the run the trainer is: steps done, version of the weights."""

    step: int
    version: int


def export(learner: Learner, folder: str | Path) -> None:
    """A Hugging Face folder with the present weights; config and tokenizer are copied from the model's folder."""
    from safetensors.torch import save_file

    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    source = Path(learner.folder)
    for name in (*_BESIDE_WEIGHTS, *_MORE_BESIDE):
        if (source / name).is_file() and source.resolve() != path.resolve():
            shutil.copyfile(source / name, path / name)
    tensors = {name: tensor.cpu() for name, tensor in bridge.export_hf(learner.model)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def save(learner: Learner, position: Position, generator: torch.Generator, folder: str | Path) -> None:
    """Write into an empty folder (made if needed)."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise ConfigError("checkpoint", str(path), "is not an empty folder")
    export(learner, path)
    state = {
        "format": FORMAT,
        "position": asdict(position),
        "dtype": learner.dtype,
        "optimizer": _plain(learner.optimizer.state_dict()),
        "scheduler": learner.scheduler.state_dict(),
        "torch_rng": torch.get_rng_state(),
        "minibatch_rng": generator.get_state(),
    }
    torch.save(state, path / STATE_FILE)


def load(learner: Learner, generator: torch.Generator, folder: str | Path) -> Position:
    """Restore what :func:`save` wrote."""
    path = Path(folder)
    shape = read_shape(path)
    for name, value in asdict(learner.shape).items():
        found = getattr(shape, name)
        if found != value:
            fix = f"checkpoint {path} is of another model: this run's {name} is {value!r}; resume with that model"
            raise ConfigError(f"model.{name}", found, fix)
    state = _read_state(path)
    if state["dtype"] != learner.dtype:
        fix = f"is the dtype of checkpoint {path}; this run's is {learner.dtype}"
        raise ConfigError("model.dtype", state["dtype"], fix)
    bridge.load_hf(learner.model, path)
    learner.reset_optimizer()
    # The settings of this run decide (it may be prolonged); the checkpoint says how far the schedule got.
    own = [{name: group[name] for name in _OWN_OPTIONS} for group in learner.optimizer.param_groups]
    learner.optimizer.load_state_dict(state["optimizer"])
    for group, options in zip(learner.optimizer.param_groups, own, strict=True):
        group.update(options)
    learner.scheduler.step(int(state["scheduler"]["num_steps"]))
    torch.set_rng_state(state["torch_rng"])
    generator.set_state(state["minibatch_rng"])
    return Position(**state["position"])


def _read_state(path: Path) -> dict[str, Any]:
    fix = "is no checkpoint of this trainer; give a folder that it saved"
    try:
        state = torch.load(path / STATE_FILE, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ConfigError("checkpoint", str(path), f"{fix} ({error})") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ConfigError("checkpoint", str(path), f"{fix} (format {FORMAT})")
    return state


def _plain(value: Any) -> Any:
    """Copy containers and tensors, so that the file holds nothing that weights_only refuses."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"the optimizer's state holds a {type(value).__name__}, which a checkpoint cannot")
