"""The tiny model of a config: what a run makes when ``model.path`` is empty, and what ``rl-coserve model`` writes.

Random weights, the task's own vocabulary, the sizes of ``[model]``: for servers and recipes to be tried without a model.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from orchestrator.api import ConfigError, Task
from orchestrator.config import Config
from orchestrator.runtime.preflight import make_task

TINY_MODEL = "megatron_rlplugin.tiny_model:create_qwen3"


def arguments(config: Config, task: Task, folder: Path) -> dict[str, Any]:
    """Of the function that :data:`TINY_MODEL` names, for the model that a run of this config would make in ``folder``."""
    shape = config.model.model_dump(exclude={"path"})
    sizes = {"vocabulary": list(task.vocabulary), "max_positions": config.rollout.widest_context}
    return {"folder": str(folder), **shape, **sizes, "seed": config.run.seed}


def make(config: Config, folder: Path, *, weights: bool = True) -> Path:
    """Write the model into a new or empty folder, in this process; the same config gives the same bytes. Without ``weights``
    what a plan reads of it, which takes no torch.

    Raises ConfigError: the folder holds something, the config names a model of its own, or torch is not installed here.
    """
    if config.model.path:
        raise ConfigError(
            "model.path", config.model.path, "this config names a model; leave it empty to make a tiny one"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError("FOLDER", str(folder), "already exists; name one that is new or empty")
    task = make_task(config)
    module, _, name = TINY_MODEL.partition(":")
    try:
        from safetensors import SafetensorError

        create = getattr(importlib.import_module(module), name)
        if weights:
            importlib.import_module("torch")
    except ModuleNotFoundError as error:
        fix = "is needed to write weights: use the environment that has vLLM or Megatron-Core"
        raise ConfigError(str(error.name), "not installed", fix) from error
    try:
        create(**arguments(config, task, folder), weights=weights)
    except (OSError, SafetensorError) as error:
        raise ConfigError("FOLDER", str(folder), f"cannot be written: {error}") from error
    return folder.resolve()
