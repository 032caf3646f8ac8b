"""A judge whose layers come from host memory while it computes (RollPacker 4.3): a transformers model in less memory.

Guarantees: what it computes is bit for bit what the same model computes fully resident, whichever layers are streamed; at most
``buffers`` layers beside the resident ones are on the device at a time; the number of resident layers changes between two
forward passes only, by :meth:`StreamedModel.arrange`, or by :meth:`StreamedModel.fit` from sequence length and memory left.

Several questions are computed as one batch, padded on the left: a layer is brought once for all. The arithmetic of a batch is not
that of one row to the last bit, so that answers are those of one at a time but where two words are as likely to seven digits.

The model is stock: each decoder layer's parameters point into a buffer from just before its forward to just after, by hooks.
The next streamed layers are being copied meanwhile, those of the next pass too (decode steps follow one another).
One forward pass at a time; inference only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from orchestrator.api import ConfigError
from orchestrator.policies.serving.judge_residency import (
    BUFFERS,
    JudgeMemory,
    JudgeResidency,
    plan_residency,
    spread_layers,
)
from vllm_rlplugin.judge.layer_store import HostLayers, LayerMover, make_mover


@dataclass(slots=True)
class StreamCounts:
    """Since the start."""

    passes: int = 0
    copies: int = 0  # layers that were brought
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class JudgeQuestion:
    """``prompt``: ids; at most ``max_tokens`` of answer; ``temperature`` 0: the most likely ones, ``seed``: of the others."""

    prompt: Sequence[int]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0


def padded_tokens(questions: Sequence[JudgeQuestion]) -> int:
    """That a batch has memory for: all are as long as the longest."""
    return len(questions) * (max(len(one.prompt) for one in questions) + max(one.max_tokens for one in questions))


class StreamedModel:
    """Takes over the decoder layers of a loaded causal ``model`` (its weights on the host) and runs on ``device``.

    ``file``: where the layers are kept instead of in memory (CPU). ``activation_bytes``: of one token at the peak, beyond KV;
    None: what a layer's own sizes suggest. ``resident`` layers (None: all) are kept until :meth:`fit` or :meth:`arrange`
    says otherwise.
    """

    def __init__(
        self,
        model: Any,
        device: torch.device | str = "cpu",
        *,
        file: Path | None = None,
        buffers: int = BUFFERS,
        activation_bytes: float | None = None,
        reserve: int = 0,
        resident: int | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.model = model.eval().requires_grad_(False)
        self._layers = list(model.model.layers)
        parameters = [dict(layer.named_parameters()) for layer in self._layers]
        self._parameters = parameters
        self.host = HostLayers(parameters, file, pin=self.device.type == "cuda")
        for named in parameters:
            for parameter in named.values():
                parameter.data = torch.empty(0, dtype=parameter.dtype)
        self.model.to(self.device)  # what is left: embedding, norms, head, rotary tables
        config, count = model.config, len(self._layers)
        fixed = sum(item.nbytes for item in [*model.parameters(), *model.buffers()])
        size = next(iter(model.parameters())).dtype.itemsize
        kv = 2 * count * config.num_key_value_heads * config.head_dim * size
        wide = config.vocab_size + 4 * config.intermediate_size + 8 * config.hidden_size
        token = kv + (wide * size if activation_bytes is None else activation_bytes)
        self.memory = JudgeMemory(count, fixed, self.host.layer_bytes, token, reserve)
        self.counts = StreamCounts()
        self._buffers = buffers
        self._mover: LayerMover | None = None
        self._kept: dict[int, torch.Tensor] = {}  # resident layers' bytes on the device
        self._queue: list[int] = []  # streamed layers, in the order of a pass
        self._filled: dict[int, int] = {}  # streamed layer -> buffer that it is in, or on its way to
        self._next = 0  # place in the queue of what is brought next
        self.residency = JudgeResidency(count, (), 0, 0)
        self.arrange(spread_layers(self.memory, 0, count if resident is None else resident, buffers))
        for index, layer in enumerate(self._layers):
            layer.register_forward_pre_hook(self._before(index))
            layer.register_forward_hook(self._after(index))

    def fit(self, tokens: int, free: int) -> JudgeResidency:
        """Arrange for sequences of ``tokens`` in ``free`` bytes of the device, what the model has now included. ValueError:
        it cannot run, and nothing changed."""
        self.arrange(plan_residency(self.memory, tokens, free, self._buffers))
        return self.residency

    def arrange(self, residency: JudgeResidency) -> None:
        """Between two passes: bring what is to be resident, drop what is not, buffers first where memory gets less."""
        if self._mover is not None:
            self._mover.close()
            self._mover = None
        self._filled.clear()
        streamed = frozenset(residency.streamed)
        for index in streamed & self._kept.keys():
            del self._kept[index]
            self._point_weights(index, None)
        self.residency = residency
        for index in range(residency.layers):
            if index not in streamed and index not in self._kept:
                self._kept[index] = self.host.flat(index).to(self.device, copy=True)
                self._point_weights(index, self._kept[index])
        self._queue, self._next = list(residency.streamed), 0
        if self._queue:
            self._mover = make_mover(residency.buffers, self.host.layer_bytes, self.device)
            for buffer in range(residency.buffers):
                self._fetch_layer(buffer)

    def forward(self, token_ids: torch.Tensor, **keywords: Any) -> Any:
        """The model's own, of ids ``[batch, tokens]``."""
        self.counts.passes += 1
        try:
            with torch.no_grad():
                return self.model(input_ids=token_ids.to(self.device), **keywords)
        except BaseException:
            self.arrange(self.residency)  # the next pass begins with the first layer again
            raise

    def generate(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        stop: frozenset[int] = frozenset(),
        temperature: float = 0.0,
        seed: int = 0,
    ) -> list[int]:
        """The ids that follow a prompt, the stop id included. ``temperature`` 0: the most likely ones."""
        return self.generate_batch([JudgeQuestion(prompt, max_tokens, temperature, seed)], stop)[0]

    def generate_batch(self, questions: Sequence[JudgeQuestion], stop: frozenset[int] = frozenset()) -> list[list[int]]:
        """The same of several, in order: each layer is brought once a pass for all of them. Who has ended leaves the batch."""
        longest = max(len(one.prompt) for one in questions)
        pads = [longest - len(one.prompt) for one in questions]
        ids = torch.tensor([[0] * pad + list(one.prompt) for pad, one in zip(pads, questions, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads], device=self.device)
        chances = [torch.Generator().manual_seed(one.seed) for one in questions]
        found: list[list[int]] = [[] for _ in questions]
        under_way, cache = list(range(len(questions))), None
        while True:
            places: dict[str, Any] = {}
            if any(pads):  # else as stock computes without a mask
                positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
                places = {"attention_mask": mask, "position_ids": positions}
            answer = self.forward(ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **places)
            cache, logits = answer.past_key_values, answer.logits[:, -1].float().cpu()
            rows = []
            for row, index in enumerate(under_way):
                token = _choose_token(logits[row], questions[index].temperature, chances[index])
                found[index].append(token)
                if token not in stop and len(found[index]) < questions[index].max_tokens:
                    rows.append(row)
            if not rows:
                return found
            if len(rows) < len(under_way):
                under_way = [under_way[row] for row in rows]
                kept = torch.tensor(rows, device=self.device)
                cache.batch_select_indices(kept)
                mask = mask[kept]
            ids = torch.tensor([found[index][-1:] for index in under_way])
            mask = torch.cat([mask, mask.new_ones(len(under_way), 1)], -1)

    def close(self) -> None:
        """Free the buffers. The model cannot run any more."""
        if self._mover is not None:
            self._mover.close()
            self._mover = None
        self._kept.clear()

    def _fetch_layer(self, buffer: int) -> None:
        """Begin to copy the next streamed layer."""
        assert self._mover is not None
        index = self._queue[self._next]
        self._next = (self._next + 1) % len(self._queue)
        self._mover.fill(self.host.flat(index), buffer)
        self._filled[index] = buffer
        self.counts.copies += 1
        self.counts.bytes += self.host.layer_bytes

    def _before(self, index: int) -> Any:
        def point(_: Any, __: Any) -> None:
            if self._mover is not None and index in self._filled:
                self._point_weights(index, self._mover.wait(self._filled[index]))

        return point

    def _after(self, index: int) -> Any:
        def leave(_: Any, __: Any, ___: Any) -> None:
            if self._mover is not None and index in self._filled:
                self._point_weights(index, None)
                buffer = self._filled.pop(index)
                self._mover.release(buffer)
                self._fetch_layer(buffer)

        return leave

    def _point_weights(self, index: int, flat: torch.Tensor | None) -> None:
        slots: Mapping[str, Any] = self.host.slots[index]
        for name, parameter in self._parameters[index].items():
            parameter.data = (
                torch.empty(0, dtype=parameter.dtype, device=self.device) if flat is None else slots[name].view(flat)
            )


def _choose_token(logits: torch.Tensor, temperature: float, chance: torch.Generator) -> int:
    if temperature > 0:
        return int(torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=chance))
    return int(logits.argmax())


def load_model(
    folder: str, device: str = "auto", dtype: str = "bfloat16", memory: int = 0, file: Path | None = None
) -> StreamedModel:
    """That of a Hugging Face folder. ``memory``: bytes that it may have, 0: any. Raises ConfigError, OSError and ValueError."""
    from transformers import AutoModelForCausalLM

    place = device_of(device)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
    return StreamedModel(model, place, file=file, resident=0 if memory else None)


def memory_left(model: StreamedModel, given: int) -> Callable[[], int]:
    """``given`` bytes; 0: what is free on the device, with what the judge holds of it."""

    def read() -> int:
        if given or model.device.type != "cuda":
            return given or sys.maxsize
        free, _ = torch.cuda.mem_get_info(model.device)
        residency = model.residency
        return int(free) + model.memory.fixed + (residency.resident + residency.buffers) * model.memory.layer

    return read


def device_of(wanted: str) -> str:
    """``auto`` is the GPU where there is one. Raises ConfigError for a GPU that is not there."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("--device", wanted, "there is no GPU here: cpu, or auto")
    return wanted
