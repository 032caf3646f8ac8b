"""``rl-coserve init``: a commented file to begin with, for one of the three ways in."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from orchestrator.api import ConfigError

WAYS = {  # template, and the name it gets
    "train": ("train.toml", "run.toml"),
    "lend": ("lend.toml", "served.toml"),
    "megatron": ("megatron.txt", "rl_loop.py"),
}


def write_first(way: str, name: str | None) -> Path:
    """The file that was written; ``name``: None for the usual one. Raises ConfigError for one that is there."""
    template, usual = WAYS[way]
    file = Path(name or usual)
    text = resources.files("orchestrator.ops").joinpath("templates", template).read_text(encoding="utf-8")
    try:
        with file.open("x", encoding="utf-8") as new:
            new.write(text)
    except FileExistsError:
        raise ConfigError("FILE", str(file), "is there already; give another name") from None
    except OSError as error:
        raise ConfigError("FILE", str(file), f"cannot be written: {error}") from error
    return file
