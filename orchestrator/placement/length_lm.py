"""A small language model as the length predictor's encoder (Heddle 4.1: Qwen-0.6B with a regression head).

Guarantees: it stands where the hashed encoder does (:class:`orchestrator.policies.prediction.history_encoder.Encoder`),
in the predictor's process: what it costs delays forecasts, never turns. It reads the ids that the policy reads (the
prompt's end and the context's end), so it must be of the policy's family: ids that it has no embedding for are taken
modulo its vocabulary. What it says is finite and clipped. Restored from its arrays it goes on as it was, on the same machine.

:class:`LanguageModelEncoder` is fine-tuned online: the hidden state of the last token and the numbers of a turn boundary
go into a linear head; the head, the last norm and the last ``tuned`` layers are trained by AdamW on mini-batches of the
last ``kept`` rows. :class:`FrozenModelEncoder` leaves the model as it is: a ridge regression reads the mean of its hidden
states over the tokens, which is computed once for what was asked before; that is what a CPU has time for.

Both take a GPU where there is one, and were tested on CPUs only: with a model of some ten thousand parameters, and with one of
Qwen3-0.6B's sizes and made-up weights. How good they are at 0.6B was not measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.api import ConfigError
from orchestrator.policies.prediction.history_encoder import CLIP, OUTPUTS, Array, Scaling, check_arrays
from orchestrator.policies.prediction.length_features import DENSE, PROMPT_TOKENS, TAIL_TOKENS, TrajectoryProgress
from orchestrator.policies.prediction.online_estimators import RidgeRegression

FIELD = "rollout.prediction.encoder"
_WIDTH = PROMPT_TOKENS + TAIL_TOKENS
_RATE, _HEAD_RATE = 3e-5, 1e-3
_TURNS = 3  # turns 0, 1, later: each with weights of its own where those are better
_MOST = 20.0  # logarithms
_RIDGE = ("products", "targets", "weights", "errors", "counts")  # what is kept of it


def _opened(path: str, dtype: str) -> tuple[Any, str, Any]:
    """torch, the device, and the model of a Hugging Face folder on it, without dropout: the same question has one answer.
    ``dtype``: of its weights, "auto": as they are saved. Raises ConfigError."""
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(FIELD, path, 'is not a Hugging Face folder: give one, or "hashed"')
    try:
        import torch
        from transformers import AutoModel
    except ImportError as error:
        fix = f'needs torch and transformers ({error}): install them, or write "hashed"'
        raise ConfigError(FIELD, path, fix) from error
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model: Any = AutoModel.from_pretrained(path, dtype=dtype, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(FIELD, path, f"cannot be loaded: {error}") from error
    return torch, device, model.to(device).eval()


def _hidden(torch: Any, model: Any, device: str, ids: NDArray[np.int64]) -> tuple[Any, Any]:
    """Hidden states of rows of ids that -1 fills up, shape [rows, tokens, width], and which of them are tokens."""
    known = ids >= 0
    longest = max(1, int(known.sum(1).max()))
    ids, known = ids[:, :longest], known[:, :longest]
    tokens = torch.from_numpy(np.where(known, ids % int(model.config.vocab_size), 0)).to(device)
    mask = torch.from_numpy(known.astype(np.int64))
    mask[:, 0] = 1  # of a row without tokens
    mask = mask.to(device)
    return model(input_ids=tokens, attention_mask=mask, use_cache=False).last_hidden_state, mask


class LanguageModelEncoder:
    """``path``: a Hugging Face folder. ``steps`` mini-batches of ``batch`` rows a trajectory. Raises ConfigError."""

    def __init__(
        self, path: str, *, seed: int, tuned: int = 2, kept: int = 1024, batch: int = 8, steps: int = 1
    ) -> None:
        self._seed, self._batch, self._steps = seed, batch, steps
        self._torch, self._device, self._model = _opened(path, "float32")
        torch, model = self._torch, self._model
        width = int(model.config.hidden_size)
        self.kind = f"language model {model.config.model_type} {width}x{model.config.num_hidden_layers} {tuned} 1"
        self._head: Any = torch.nn.Linear(width + DENSE, OUTPUTS).to(self._device)
        torch.nn.init.zeros_(self._head.weight)
        torch.nn.init.zeros_(self._head.bias)
        first = int(model.config.num_hidden_layers) - tuned
        self._trained: dict[str, Any] = {}
        for name, parameter in model.named_parameters():
            parts = name.split(".")
            layer = int(parts[parts.index("layers") + 1]) if "layers" in parts else -1
            parameter.requires_grad = layer >= max(0, first) or parts[0] == "norm"
            if parameter.requires_grad:
                self._trained[name] = parameter
        tuning = [*self._trained.values()]
        self._trained |= {f"head.{name}": parameter for name, parameter in self._head.named_parameters()}
        groups = [{"params": tuning, "lr": _RATE}, {"params": [*self._head.parameters()], "lr": _HEAD_RATE}]
        self._optimizer: Any = torch.optim.AdamW(groups, weight_decay=0.01)
        self._numbers, self._targets = Scaling(DENSE), Scaling(OUTPUTS)
        self._ids: NDArray[np.int64] = np.full((kept, _WIDTH), -1, np.int64)
        self._rows: Array = np.zeros((kept, DENSE + OUTPUTS + 1))  # numbers, targets, weight
        self.steps = 0  # that were made

    def predict(self, rows: Sequence[TrajectoryProgress], numbers: Array) -> Array:
        ids = np.stack([_ids(row) for row in rows])
        with self._torch.no_grad():
            made = self._forward(ids, self._numbers.normal(numbers)).cpu().numpy().astype(np.float64)
        made = np.clip(np.nan_to_num(made), -CLIP, CLIP)
        return np.asarray(made * self._targets.spread + self._targets.mean)

    def learn(self, rows: Sequence[TrajectoryProgress], numbers: Array, targets: Array, weight: float) -> None:
        for row, shown, wanted in zip(rows, numbers, targets, strict=True):
            place = self._numbers.rows % len(self._rows)
            self._ids[place] = _ids(row)
            self._rows[place] = np.concatenate([shown, wanted, [weight]])
            self._numbers.add(shown[None, :])
            self._targets.add(wanted[None, :])
        held = min(self._numbers.rows, len(self._rows))
        if held >= self._batch:
            for _ in range(self._steps):
                self._step(np.random.default_rng([self._seed, 9, self.steps]).integers(0, held, self._batch))

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        held = min(self._numbers.rows, len(self._rows))
        found: dict[str, NDArray[np.generic]] = {"ids": self._ids[:held], "rows": self._rows[:held]}
        found["numbers"], found["targets"] = self._numbers.sums, self._targets.sums
        found["counts"] = np.array([self.steps, self._numbers.rows], dtype=np.int64)
        for name, parameter in self._trained.items():
            state = self._optimizer.state.get(parameter, {})
            found[f"weights {name}"] = parameter.detach().cpu().numpy()
            for moment in ("exp_avg", "exp_avg_sq"):
                value = state[moment].cpu().numpy() if state else np.zeros(tuple(parameter.shape), np.float32)
                found[f"{moment} {name}"] = value
        return found

    def restore(self, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        check_arrays(self.arrays(), arrays, growing=("ids", "rows"))
        steps, rows = (int(value) for value in arrays["counts"].tolist())
        held = min(rows, len(self._rows))
        if len(arrays["ids"]) != held or len(arrays["rows"]) != held or steps < 0:
            raise ValueError("of another kind: rows of the encoder")
        torch = self._torch
        for name, parameter in self._trained.items():
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(np.array(arrays[f"weights {name}"], dtype=np.float32)))
            if steps:
                self._optimizer.state[parameter] = {
                    "step": torch.tensor(float(steps)),
                    **{
                        moment: torch.from_numpy(np.array(arrays[f"{moment} {name}"], dtype=np.float32)).to(
                            self._device
                        )
                        for moment in ("exp_avg", "exp_avg_sq")
                    },
                }
        self._ids[:held], self._rows[:held] = arrays["ids"], arrays["rows"]
        self._numbers.sums = np.array(arrays["numbers"], dtype=np.float64)
        self._targets.sums = np.array(arrays["targets"], dtype=np.float64)
        self.steps, self._numbers.rows, self._targets.rows = steps, rows, rows

    def _forward(self, ids: NDArray[np.int64], numbers: Array) -> Any:
        torch = self._torch
        hidden, mask = _hidden(torch, self._model, self._device, ids)
        last = hidden[torch.arange(len(ids), device=self._device), mask.sum(1) - 1]
        shown = torch.from_numpy(numbers.astype(np.float32)).to(self._device)
        return self._head(torch.cat([last, shown], dim=1))

    def _step(self, chosen: NDArray[np.int64]) -> None:
        numbers, targets, counts = np.split(self._rows[chosen], np.cumsum([DENSE, OUTPUTS]), axis=1)
        torch = self._torch
        wanted = torch.from_numpy(self._targets.normal(targets).astype(np.float32)).to(self._device)
        share = torch.from_numpy((counts / counts.sum()).astype(np.float32)).to(self._device)
        made = self._forward(self._ids[chosen], self._numbers.normal(numbers))
        loss = (share * torch.nn.functional.smooth_l1_loss(made, wanted, reduction="none")).sum()
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*self._trained.values()], 1.0)
        self._optimizer.step()
        self.steps += 1


class TokenStates:
    """What the model of ``path``, as it is, makes of a boundary's tokens: the mean of its hidden states over them. The last
    ``remembered`` are not computed again. Raises ConfigError."""

    def __init__(self, path: str, *, remembered: int = 4096) -> None:
        self._torch, self._device, self._model = _opened(path, "auto")
        config = self._model.config
        self.width = int(config.hidden_size)
        self.kind = f"{config.model_type} {self.width}x{config.num_hidden_layers}"
        self._remembered = remembered
        self._states: dict[bytes, NDArray[np.float32]] = {}

    def of(self, rows: Sequence[TrajectoryProgress]) -> NDArray[np.float32]:
        """Shape [rows, width]."""
        ids = {one.tobytes(): one for one in map(_ids, rows)}
        missing = [key for key in ids if key not in self._states]
        found = {key: self._states[key] for key in ids if key in self._states}
        if missing:
            found |= zip(missing, self._mean(np.stack([ids[key] for key in missing])), strict=True)
        self._states |= found
        while len(self._states) > self._remembered:
            del self._states[next(iter(self._states))]
        return np.stack([found[_ids(row).tobytes()] for row in rows])

    def _mean(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        with self._torch.no_grad():
            hidden, mask = _hidden(self._torch, self._model, self._device, ids)
            share = (mask / mask.sum(1, keepdim=True)).unsqueeze(2)
            return np.asarray((hidden.float() * share).sum(1).cpu().numpy())


class FrozenModelEncoder:
    """A ridge regression on the numbers of a boundary and on ``states``. Solved anew after ``every`` rows, sooner while there are
    few; ``memory`` in rows."""

    def __init__(self, states: TokenStates, *, memory: float = 50_000.0, every: int = 256) -> None:
        self._states, self._every, self._new = states, every, 0
        self.kind = f"frozen language model {states.kind} 1"
        penalties = np.concatenate([np.full(DENSE, 1.0), np.full(states.width, 10.0)])
        self._ridge = RidgeRegression(penalties, OUTPUTS, _TURNS, memory)

    def predict(self, rows: Sequence[TrajectoryProgress], numbers: Array) -> Array:
        made = self._ridge.predict(np.concatenate([numbers, self._states.of(rows)], axis=1), _classes(rows))
        return np.clip(np.nan_to_num(made), -_MOST, _MOST)

    def learn(self, rows: Sequence[TrajectoryProgress], numbers: Array, targets: Array, weight: float) -> None:
        vectors, classes = np.concatenate([numbers, self._states.of(rows)], axis=1), _classes(rows)
        self._ridge.judge(vectors, targets, classes, weight)
        self._ridge.add(vectors, targets, classes, weight)
        self._new += len(rows)
        if self._new >= min(self._every, max(32.0, self._ridge.counts[0] / 4.0)):
            self._ridge.solve()
            self._new = 0

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        found: dict[str, NDArray[np.generic]] = {name: getattr(self._ridge, name) for name in _RIDGE}
        return found | {"new": np.array([self._new], dtype=np.int64)}

    def restore(self, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        check_arrays(self.arrays(), arrays, growing=())
        for name in _RIDGE:
            setattr(self._ridge, name, np.array(arrays[name], dtype=np.float64))
        self._new = int(arrays["new"][0])


def _classes(rows: Sequence[TrajectoryProgress]) -> list[int]:
    return [min(row.turns, _TURNS - 1) for row in rows]


def _ids(row: TrajectoryProgress) -> NDArray[np.int64]:
    """The prompt's end, then the context's (before the first turn they are one), padded with -1."""
    tokens = (*row.prompt_ids, *(row.tail_ids if row.said else ()))[:_WIDTH]
    found = np.full(_WIDTH, -1, np.int64)
    found[: len(tokens)] = np.abs(np.array(tokens, dtype=np.int64))
    return found
