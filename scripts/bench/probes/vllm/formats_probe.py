"""One weight change in the formats that stock tools bring, and in ours: bytes, and seconds to make and to apply it.

``python -m scripts.bench.probes.vllm.formats_probe FOLDER ROUNDS``: FOLDER has ``layout.json`` ([[tensor, elements],
...]), ``old.npy`` and ``new.npy`` (bf16 as uint16, all tensors one after the other). Prints one JSON object: a row for
each format.

* ``vllm-sparse-nccl``: vLLM's own trainer engine sends its patches, with a recorder where NCCL and the HTTP client would be
  (this machine has no GPU): what it broadcasts is counted, and the update request as JSON. Applied by vLLM's own
  ``load_checkpoint_weight_patches`` (staged densely, with NaN for what did not change) to parameters that are
  loaded by vLLM's ``default_weight_loader``.
* ``safetensors``: the whole model as a file, written, read, copied into place. ``safetensors-coo``: positions and values.
* ``ours``: :mod:`orchestrator.transfer.delta`, in place.

Each is applied to the same old weights and compared bit by bit. One thread. Files go to FOLDER and are not synced.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from orchestrator.transfer.delta import delta_codec as delta

Tensors = dict[str, Tensor]


class _Recorder:
    """Where vLLM's engine has its communicator and its client: keeps what goes over each."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.payload = self.control = self.messages = 0

    def broadcast(self, tensor: Tensor, src: int, stream: object) -> None:
        self.payload += tensor.nbytes
        self.messages += 1

    def start_weight_update(self) -> None:
        self.messages += 1

    def finish_weight_update(self) -> None:
        self.messages += 1

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.control += len(json.dumps(update_info))
        self.messages += 1


class _Model:
    """A parameter for each tensor, loaded as vLLM's models load theirs."""

    def __init__(self, tensors: Tensors) -> None:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        self._load = default_weight_loader
        self.tensors = {name: torch.nn.Parameter(value, requires_grad=False) for name, value in tensors.items()}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        found = set()
        for name, value in weights:
            self._load(self.tensors[name], value)
            found.add(name)
        return found


def _vllm(old: Tensors, new: Tensors, live: Tensors, timed: _Timed) -> dict[str, int]:
    from vllm.distributed.weight_transfer import sparse_nccl_engine as stock
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        CheckpointWeightPatch,
        load_checkpoint_weight_patches,
    )

    def make() -> list[Any]:
        patches = []
        for name, value in new.items():
            where = torch.nonzero(value.view(torch.int16) != old[name].view(torch.int16)).view(-1).to(torch.int32)
            patches.append(stock.SparseWeightPatch(name, where, value[where.long()], tuple(value.shape)))
        return patches

    recorder = _Recorder()
    engine = stock.SparseNCCLTrainerWeightTransferEngine(client=recorder)
    engine.model_update_group = recorder
    patches = timed("encode", make)
    engine.send_weights(patches)
    module = _Model(live)
    received = [CheckpointWeightPatch(p.name, p.full_shape, p.values.dtype, p.values, p.indices) for p in patches]
    timed("apply", lambda: load_checkpoint_weight_patches(module, received))
    return {"bytes": recorder.payload + recorder.control, "control": recorder.control, "messages": recorder.messages}


def _safetensors(new: Tensors, live: Tensors, path: Path, timed: _Timed) -> dict[str, int]:
    timed("encode", lambda: save_file(new, path))

    def read() -> None:
        for name, value in load_file(path).items():
            live[name].copy_(value)

    timed("apply", read)
    return {"bytes": path.stat().st_size}


def _safetensors_coo(old: Tensors, new: Tensors, live: Tensors, path: Path, timed: _Timed) -> dict[str, int]:
    def write() -> None:
        made = {}
        for name, value in new.items():
            where = torch.nonzero(value.view(torch.int16) != old[name].view(torch.int16)).view(-1)
            made[f"{name}.positions"], made[f"{name}.values"] = where.to(torch.int32), value[where]
        save_file(made, path)

    def read() -> None:
        found = load_file(path)
        for name, value in live.items():
            value[found[f"{name}.positions"].long()] = found[f"{name}.values"]

    timed("encode", write)
    timed("apply", read)
    return {"bytes": path.stat().st_size}


def _ours(old: Tensors, new: Tensors, live: Tensors, timed: _Timed) -> dict[str, int]:
    pairs = [(_bytes(old[name]), _bytes(value), _bytes(live[name])) for name, value in new.items()]
    made = timed("encode", lambda: [delta.encode_change(before, after, "bfloat16").data for before, after, _ in pairs])
    timed("apply", lambda: [delta.apply_change(data, base) for data, (_, _, base) in zip(made, pairs, strict=True)])
    return {"bytes": sum(data.nbytes for data in made)}


def _bytes(value: Tensor) -> Any:
    return value.view(torch.uint8).numpy()


class _Timed:
    """The least wall and processor seconds of each stage over the rounds."""

    def __init__(self) -> None:
        self.best: dict[str, float] = {}

    def __call__(self, stage: str, work: Callable[[], Any]) -> Any:
        wall, processor = time.perf_counter(), time.process_time()
        result = work()
        for name, spent in (("wall", time.perf_counter() - wall), ("cpu", time.process_time() - processor)):
            key = f"{stage}_{name}_seconds"
            self.best[key] = min(self.best.get(key, math.inf), spent)
        return result


def run(folder: Path, rounds: int) -> dict[str, Any]:
    """The rows."""
    torch.set_num_threads(1)
    # vLLM's engine asks for a stream to give to NCCL, which the recorder does not need; the CPU build has none.
    torch.cuda.current_stream = lambda *_, **__: None
    layout = json.loads((folder / "layout.json").read_text())
    old, new = (_tensors(folder / name, layout) for name in ("old.npy", "new.npy"))
    changed = sum(int((value.view(torch.int16) != old[name].view(torch.int16)).sum()) for name, value in new.items())
    rows = []
    formats: tuple[tuple[str, Callable[[Tensors, _Timed], dict[str, int]]], ...] = (
        ("ours", lambda live, timed: _ours(old, new, live, timed)),
        ("vllm-sparse-nccl", lambda live, timed: _vllm(old, new, live, timed)),
        ("safetensors", lambda live, timed: _safetensors(new, live, folder / "dense.safetensors", timed)),
        ("safetensors-coo", lambda live, timed: _safetensors_coo(old, new, live, folder / "coo.safetensors", timed)),
    )
    for name, measure in formats:
        timed, found, exact = _Timed(), {}, True
        for _ in range(rounds):
            live = {key: value.clone() for key, value in old.items()}
            found = measure(live, timed)
            exact = exact and all(
                bool((live[k].view(torch.int16) == v.view(torch.int16)).all()) for k, v in new.items()
            )
        row = {"format": name, **found, "bytes_per_change": found["bytes"] / changed, "bit_exact": exact, **timed.best}
        rows.append(row)
    elements = sum(value.numel() for value in new.values())
    return {"rows": rows, "elements": elements, "changed": changed, "tensors": len(new)}


def _tensors(path: Path, layout: list[tuple[str, int]]) -> Tensors:
    words, at, made = torch.from_numpy(np.load(path).view(np.int16)).view(torch.bfloat16), 0, {}
    for name, count in layout:
        made[name] = words[at : at + count].clone()
        at += count
    return made


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("rounds", type=int)
    arguments = parser.parse_args()
    print(json.dumps(run(arguments.folder, arguments.rounds)))


if __name__ == "__main__":
    main()
