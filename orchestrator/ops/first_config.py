"""``rl-coserve init``: a commented file to begin with, for one of the three ways in."""

from __future__ import annotations

import shlex
from importlib import resources
from pathlib import Path

from orchestrator.api import ConfigError

WAYS = {  # template, and the name it gets
    "train": ("train.toml", "run.toml"),
    "lend": ("lend.toml", "served.toml"),
    "megatron": ("megatron.txt", "rl_loop.py"),
}
_NEXT = {  # what to do with it; {file}: as a shell takes it
    "train": "next: rl-coserve train {file} --dry-run",
    "lend": "next: start the server as its first lines say, put your model and data in, then\n"
    "      rl-coserve train {file} --dry-run",
    "megatron": "next: copy its two marked lines into your script (docs/recipes/existing.md)",
}


def write_first(way: str, name: str | None) -> tuple[Path, str]:
    """The file that was written, and what to do next. ``name``: None for the usual one; commands in the file's comments have it
    too. Raises ConfigError for one that is there."""
    template, usual = WAYS[way]
    file = Path(name or usual)
    if not str(file).isprintable():
        raise ConfigError("FILE", str(file), "must be printable")
    typed = shlex.quote(f"./{file}" if str(file).startswith("-") else str(file))
    text = resources.files("orchestrator.ops").joinpath("templates", template).read_text(encoding="utf-8")
    try:
        with file.open("x", encoding="utf-8") as new:
            new.write(text.replace(f"rl-coserve train {usual}", f"rl-coserve train {typed}"))
    except FileExistsError:
        raise ConfigError("FILE", str(file), "already exists; give another name") from None
    except OSError as error:
        raise ConfigError("FILE", str(file), f"cannot be written: {error.strerror}") from error
    return file, _NEXT[way].format(file=typed)
