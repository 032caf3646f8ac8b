"""A Hugging Face folder with the weights of a model that is cut over ranks.

Guarantees: each file is put together and written on one rank, another for the next file, so that no rank holds more than one
file of :data:`FILE_BYTES` beside its own shards; names, index and bits are those that transformers reads. What cannot be
written is a RunError that names the file, on the rank that met it.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from megatron_rlplugin.weights.hf_bridge import export_hf
from megatron_rlplugin.weights.tensor_places import model_group, tensor_shapes
from orchestrator.api import RunError

FILE_BYTES = 4 << 30  # of an exported file, but for a tensor that is larger
_BESIDE_WEIGHTS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "added_tokens.json",
)  # fmt: skip


def export_folder(chunks: Sequence[Any], source: str | Path, folder: str | Path) -> None:
    """Write the present weights of these chunks; config and tokenizer are copied from ``source``. Every rank calls it; those
    of one replica write, to a folder that all of them see."""
    path, source = Path(folder), Path(source)
    group = model_group(chunks)
    if 0 not in dist.get_process_group_ranks(group):
        return
    files = _file_names(tensor_shapes(chunks, heads=True), next(chunks[0].parameters()).element_size())
    turns = {file: place % group.size() for place, file in enumerate(dict.fromkeys(files.values()))}
    with _writing(path / "config.json"):
        path.mkdir(parents=True, exist_ok=True)
        for name in _BESIDE_WEIGHTS if dist.get_rank() == 0 else ():
            if (source / name).is_file() and source.resolve() != path.resolve():
                shutil.copyfile(source / name, path / name)
    held: dict[str, Tensor] = {}
    last = ""
    for name, tensor in export_hf(chunks, {name: turns[file] for name, file in files.items()}):
        if last and files[name] != last:
            _write_tensors(path / last, held)
        held[name], last = tensor.cpu(), files[name]
    if held:
        _write_tensors(path / last, held)
    if dist.get_rank() == 0 and len(turns) > 1:
        with _writing(path / "model.safetensors.index.json") as file:
            file.write_text(json.dumps({"metadata": {}, "weight_map": files}, indent=1), encoding="utf-8")


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
        free = shutil.disk_usage(file.parent).free >> 20 if file.parent.is_dir() else 0
        raise RunError(f"{file} cannot be written ({free} MB free there): {error}") from error
