"""Weights between a Hugging Face folder and the Megatron model chunks of a layout, both ways, bit for bit.

Guarantees: every Hugging Face tensor is checked by name and shape before anything is written; a missing, extra or
misshapen tensor is a ConfigError that names it, the same on every rank, and leaves the model untouched. Each rank reads
its part of the files and no more. Loading casts to the model's dtype (exact when they agree); exporting casts nothing.
Export gathers one tensor at a time over the ranks that hold one model, on all of them or on one; all of them must call it.

``places`` says which part of which tensor a rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rlplugin.weights.tensor_places import (
    TensorPiece,
    chunks_of,
    model_group,
    multi_token_heads,
    tensor_pieces,
    tensor_shapes,
)
from orchestrator.api import ConfigError
from orchestrator.api.jsontext import parse_object


def load_hf(model: Any, folder: str | Path) -> None:
    """Fill ``model`` (a chunk, or this rank's chunks) from the safetensors of ``folder``.

    Raises ConfigError before any weight was changed.
    """
    path = Path(folder)
    core = chunks_of(model)[0]
    tied, layers, extra = (
        core.share_embeddings_and_output_weights,
        core.config.num_layers,
        getattr(core, "extra_layers", 0),
    )
    heads = multi_token_heads(core.config)
    left_out = range(layers + heads, layers + extra)
    mine = list(tensor_pieces(model, heads=True))
    with _Folder(path) as files:
        copies = _check_copies(files, path, range(layers, layers + heads))
        _check(files, tensor_shapes(model, heads=True), path, tied=tied, left_out=left_out, copies=copies)
        with torch.no_grad():
            for piece in mine:
                piece.write(files.get(piece.name, piece.dim, piece.start, piece.stop))


def export_hf(model: Any, receivers: Mapping[str, int] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every Hugging Face tensor, (name, contiguous tensor on the model's device), in the model's order; with ``receivers``
    those that it sends to this rank of the replica, and the others' go past it.

    Collective over the ranks of one replica: all must call it and take all tensors.
    """
    group = model_group(model)
    held = {(piece.name, piece.start): piece for piece in tensor_pieces(model, heads=True)}
    sources = _sources(list(held.values()), group)
    with torch.no_grad():
        for name, shape in tensor_shapes(model, heads=True).items():
            to = None if receivers is None else receivers[name]
            parts = [_from(held.get((name, source[0])), source, to, model, group) for source in sources[name]]
            if to is not None and to != group.rank():
                continue
            dim = sources[name][0][2]
            full = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
            assert tuple(full.shape) == shape, (name, full.shape, shape)
            yield name, full


Source = tuple[
    int, int, int, tuple[int, ...], torch.dtype
]  # start, rank in the group, dim, shape and dtype of the part


def _sources(mine: list[TensorPiece], group: Any) -> dict[str, list[Source]]:
    """For each tensor, its parts in order and for each the first rank of the group that holds it."""
    told: list[Any] = [None] * group.size()
    own = [(piece.name, piece.start, piece.dim, piece.held, piece.parameter.dtype) for piece in mine]
    dist.all_gather_object(told, own, group=group)
    parts: dict[str, dict[int, Source]] = {}
    for rank, theirs in enumerate(told):
        for name, start, dim, held, dtype in theirs:
            parts.setdefault(name, {}).setdefault(start, (start, rank, dim, held, dtype))
    return {name: [by_start[start] for start in sorted(by_start)] for name, by_start in parts.items()}


def _from(piece: TensorPiece | None, source: Source, to: int | None, model: Any, group: Any) -> Tensor:
    """The part that one rank of the group holds, on every rank of it, or on ``to``; elsewhere nothing that is of use."""
    _, rank, _, shape, dtype = source
    device = next(chunks_of(model)[0].parameters()).device
    if group.rank() == rank:
        assert piece is not None
        part = piece.read()
    elif to in (None, group.rank()):
        part = torch.empty(shape, dtype=dtype, device=device)
    else:
        return torch.empty(0, dtype=dtype, device=device)
    if group.size() == 1 or rank == to:
        return part
    if to is None:
        dist.broadcast(part, dist.get_global_rank(group, rank), group=group)
    elif group.rank() == rank:
        dist.send(part, dist.get_global_rank(group, to), group=group)
    else:
        dist.recv(part, dist.get_global_rank(group, rank), group=group)
    return part


class _Folder:
    """The safetensors files of a model folder, one or many, read tensor by tensor."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: list[Any] = []
        self._where: dict[str, Any] = {}

    def __enter__(self) -> _Folder:
        from safetensors import SafetensorError, safe_open

        for name in self._names():
            try:
                file = safe_open(self._path / name, framework="pt")
                file.__enter__()  # type: ignore[no-untyped-call]
            except (OSError, ValueError, SafetensorError) as error:  # a name that is no text, or holds a zero
                raise ConfigError("model.path", str(self._path), f"{name} cannot be read ({error})") from error
            self._files.append(file)
            self._where.update(dict.fromkeys(file.keys(), file))  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files:
            file.__exit__(None, None, None)

    def _names(self) -> list[str]:
        index = self._path / "model.safetensors.index.json"
        if index.is_file():
            try:
                names = set(parse_object(index.read_bytes())["weight_map"].values())
                if not all(isinstance(name, str) and Path(name).name == name for name in names):
                    raise ValueError("a file that is not in the folder")
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError("model.path", str(self._path), f"{index.name} cannot be read ({error!r})") from error
            return sorted(names)
        if (self._path / "model.safetensors").is_file():
            return ["model.safetensors"]
        raise ConfigError("model.path", str(self._path), "has no model.safetensors; save the model in that format")

    def names(self) -> list[str]:
        return sorted(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._where[name].get_slice(name).get_shape())

    def get(self, name: str, dim: int = -1, start: int = 0, stop: int = 0) -> Tensor:
        """The tensor, or ``start:stop`` of it along ``dim``; only that part is read."""
        file = self._where[name]
        if dim < 0:
            tensor: Tensor = file.get_tensor(name)
            return tensor
        part: Tensor = file.get_slice(name)[(slice(None),) * dim + (slice(start, stop),)]
        return part


def _layer_of(name: str) -> int:
    """The number in ``model.layers.N.``; -1: none."""
    number = name.removeprefix("model.layers.").partition(".")[0]
    return int(number) if name.startswith("model.layers.") and number.isdecimal() else -1


def _check_copies(files: _Folder, path: Path, heads: range) -> set[str]:
    """What heads that predict several tokens have again in the folder of embedding and output layer, which they share. Raises
    ConfigError where it is another one."""
    found = set()
    for layer in heads:
        for own, shared in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
            copy, shared = f"model.layers.{layer}.{own}.weight", f"{shared}.weight"
            if copy in files.names():
                shared = shared if shared in files.names() else "model.embed_tokens.weight"
                if not torch.equal(files.get(copy), files.get(shared)):
                    fix = f"is not {shared}: a head with one of its own is not trained; unset trainer.megatron.mtp_num_layers"
                    raise ConfigError(copy, str(path), fix)
                found.add(copy)
    return found


def _check(
    files: _Folder,
    wanted: dict[str, tuple[int, ...]],
    path: Path,
    *,
    tied: bool,
    left_out: range,
    copies: Set[str] = frozenset(),
) -> None:
    found = [name for name in files.names() if _layer_of(name) not in left_out and name not in copies]
    if tied and "lm_head.weight" in found:  # some folders store the tied tensor twice
        embedding, head = (files.get(name) for name in ("model.embed_tokens.weight", "lm_head.weight"))
        if not torch.equal(embedding, head):
            raise ConfigError("lm_head.weight", str(path), "differs from the embedding that config.json ties it to")
        found.remove("lm_head.weight")
    problems: list[tuple[str, Callable[[str], bool]]] = [
        ("is missing", lambda name: name in wanted and name not in found),
        ("is not a tensor of this model", lambda name: name not in wanted),
    ]
    for fix, wrong in problems:
        bad = [name for name in sorted({*wanted, *found}) if wrong(name)]
        if bad:
            more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
            raise ConfigError(bad[0], str(path), f"{fix}{more}; give a folder whose files and config.json agree")
    for name, shape in wanted.items():
        if files.shape(name) != shape:
            raise ConfigError(name, files.shape(name), f"the model's shape is {shape}; files of {path} do not fit it")
