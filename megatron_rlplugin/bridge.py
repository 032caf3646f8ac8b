"""Weights between a Hugging Face Qwen3 folder and a Megatron ``GPTModel``, both ways, bit for bit.

Guarantees: every Hugging Face tensor has exactly one place in the model and is checked by name and shape before anything
is written; a missing, extra or misshapen tensor is a ConfigError that names it, and leaves the model untouched. Loading
casts to the model's dtype (exact when they agree); exporting casts nothing. With tensor parallelism each rank loads its
shard, and export gathers over the tensor-parallel group (every rank must call it).

Megatron keeps q, k and v of one query group side by side, ``[group][q.. k v][head_dim]``, and gate above up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rlplugin.model import unwrap
from orchestrator.api import ConfigError

WHOLE, QKV, GATE_UP = "whole", "qkv", "gate_up"


@dataclass(frozen=True, slots=True)
class Place:
    """One Megatron parameter: the Hugging Face tensors that it is made of, and how."""

    kind: str
    sources: tuple[str, ...]  # templates; {i} is the layer
    dim: int | None  # that tensor parallelism splits; None: replicated


_LAYER = "model.layers.{i}."
_ATTENTION = _LAYER + "self_attn."
PLACES = {
    "embedding.word_embeddings.weight": Place(WHOLE, ("model.embed_tokens.weight",), 0),
    "decoder.final_layernorm.weight": Place(WHOLE, ("model.norm.weight",), None),
    "output_layer.weight": Place(WHOLE, ("lm_head.weight",), 0),
}
LAYER_PLACES = {
    "input_layernorm.weight": Place(WHOLE, (_LAYER + "input_layernorm.weight",), None),
    "self_attention.linear_qkv.weight": Place(QKV, tuple(f"{_ATTENTION}{c}_proj.weight" for c in "qkv"), 0),
    "self_attention.q_layernorm.weight": Place(WHOLE, (_ATTENTION + "q_norm.weight",), None),
    "self_attention.k_layernorm.weight": Place(WHOLE, (_ATTENTION + "k_norm.weight",), None),
    "self_attention.linear_proj.weight": Place(WHOLE, (_ATTENTION + "o_proj.weight",), 1),
    "pre_mlp_layernorm.weight": Place(WHOLE, (_LAYER + "post_attention_layernorm.weight",), None),
    "mlp.linear_fc1.weight": Place(GATE_UP, tuple(f"{_LAYER}mlp.{c}_proj.weight" for c in ("gate", "up")), 0),
    "mlp.linear_fc2.weight": Place(WHOLE, (_LAYER + "mlp.down_proj.weight",), 1),
}


@dataclass(frozen=True, slots=True)
class _Parts:
    """One parameter with its Hugging Face names and full shapes."""

    kind: str
    parameter: Tensor
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dim: int | None


def load_hf(model: Any, folder: str | Path) -> None:
    """Fill ``model`` from the safetensors of ``folder``. Raises ConfigError before any weight was changed."""
    path = Path(folder)
    core = unwrap(model)
    parts = list(_parameters(core))
    wanted = {name: shape for part in parts for name, shape in zip(part.names, part.shapes, strict=True)}
    with _Folder(path) as files:
        _check(files, wanted, path, tied=core.share_embeddings_and_output_weights)
        rank, size = _tensor_parallel(core)
        with torch.no_grad():
            for part in parts:
                shards = [
                    value if part.dim is None else value.chunk(size, part.dim)[rank]
                    for value in (files.get(name) for name in part.names)
                ]
                part.parameter.copy_(_join(part.kind, shards, core.config))


def export_hf(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Every Hugging Face tensor, (name, contiguous tensor on the model's device), in the model's order."""
    core = unwrap(model)
    group = core.pg_collection.tp
    with torch.no_grad():
        for part in _parameters(core):
            shards = _split(part.kind, part.parameter.detach(), core.config)
            for name, shape, shard in zip(part.names, part.shapes, shards, strict=True):
                full = _gather(shard, part.dim, group)
                assert tuple(full.shape) == shape, (name, full.shape, shape)
                yield name, full


def expected_tensors(model: Any) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> full shape, of all tensors that the model is made of."""
    parts = _parameters(unwrap(model))
    return {name: shape for part in parts for name, shape in zip(part.names, part.shapes, strict=True)}


def _parameters(core: Any) -> Iterator[_Parts]:
    _, size = _tensor_parallel(core)
    for name, parameter in core.named_parameters():
        place = PLACES.get(name)
        names: tuple[str, ...]
        if place is None and name.startswith("decoder.layers."):
            layer, _, rest = name.removeprefix("decoder.layers.").partition(".")
            place = LAYER_PLACES.get(rest)
            names = tuple(source.format(i=layer) for source in place.sources) if place else ()
        else:
            names = place.sources if place else ()
        if place is None:
            raise ConfigError("model", name, "the bridge knows no Hugging Face place for this Megatron parameter")
        shapes = [list(part.shape) for part in _split(place.kind, parameter.detach(), core.config)]
        for shape in shapes:
            if place.dim is not None:
                shape[place.dim] *= size
        yield _Parts(place.kind, parameter, names, tuple(tuple(shape) for shape in shapes), place.dim)


def _tensor_parallel(core: Any) -> tuple[int, int]:
    group = core.pg_collection.tp
    return dist.get_rank(group), dist.get_world_size(group)


def _split(kind: str, value: Tensor, config: Any) -> tuple[Tensor, ...]:
    """One rank's parameter -> its shard of each Hugging Face tensor."""
    if kind == QKV:
        per_group = config.num_attention_heads // config.num_query_groups
        grouped = value.view(-1, per_group + 2, config.kv_channels, value.shape[-1])
        parts = grouped[:, :per_group], grouped[:, per_group : per_group + 1], grouped[:, per_group + 1 :]
        return tuple(part.reshape(-1, value.shape[-1]) for part in parts)
    if kind == GATE_UP:
        return tuple(part.contiguous() for part in value.chunk(2))
    return (value.contiguous(),)


def _join(kind: str, parts: list[Tensor], config: Any) -> Tensor:
    """The inverse of :func:`_split`."""
    if kind == QKV:
        width = parts[0].shape[-1]
        per_group = config.num_attention_heads // config.num_query_groups
        heads = (per_group, 1, 1)
        views = [part.reshape(-1, count, config.kv_channels, width) for part, count in zip(parts, heads, strict=True)]
        return torch.cat(views, dim=1).reshape(-1, width)
    return torch.cat(parts) if kind == GATE_UP else parts[0]


def _gather(shard: Tensor, dim: int | None, group: Any) -> Tensor:
    size = dist.get_world_size(group)
    if size == 1 or dim is None:
        return shard
    pieces = [torch.empty_like(shard) for _ in range(size)]
    dist.all_gather(pieces, shard, group=group)
    return torch.cat(pieces, dim)


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
            except (OSError, SafetensorError) as error:
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
            return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if (self._path / "model.safetensors").is_file():
            return ["model.safetensors"]
        raise ConfigError("model.path", str(self._path), "has no model.safetensors; save the model in that format")

    def names(self) -> list[str]:
        return sorted(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._where[name].get_slice(name).get_shape())

    def get(self, name: str) -> Tensor:
        tensor: Tensor = self._where[name].get_tensor(name)
        return tensor


def _check(files: _Folder, wanted: dict[str, tuple[int, ...]], path: Path, *, tied: bool) -> None:
    found = files.names()
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
