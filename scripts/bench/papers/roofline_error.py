"""How far the simulator's roofline is off speeds of engines on GPUs that others published: its own error.

No constant was taken from them. Decode throughput of four Qwen3 models in bf16: on H100, one and two GPUs, 8 to 1,000
sequences at a time (ML.ENERGY, vLLM; of each setting the rows of 8, 32, 128, 512 sequences and of the most); with
prompts of known length (silybench, vLLM 0.30, the most users within its SLOs), with the room for KV; and of a single
sequence on H20, prompts of 1 to 129,042 tokens (Qwen's own table, SGLang). A step is that of the mean context, with
the share of prefilling that its sequences need. ML.ENERGY's table does not say how long prompts are: 100 tokens in a
chat and 300 of GPQA are ASSUMED.

The value is the median of the absolute errors; ``groups`` has each setting's median and worst, ``second_gpu`` how far the gain of
a second GPU is off. Nothing runs: it is arithmetic, on any machine. There is no bar: it says how far figures that are played with
the roofline can be believed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from orchestrator.sim.cost_model import RooflineCosts
from orchestrator.sim.hardware import DEVICES, MODELS
from scripts.bench.result import frame, now

NAME = "roofline-error"
_ENERGY = "ML.ENERGY leaderboard, February 2026 (vLLM, bf16)"
_SILY = "silybench-data, September 2026 (vLLM 0.30, bf16)"
_QWEN = "Qwen3's speed benchmark (SGLang 0.4.6, bf16)"
_CHAT, _GPQA = 100, 300  # tokens of a prompt: ASSUMED


@dataclass(frozen=True, slots=True)
class Load:
    """``group``; a model on ``gpus``; tokens of a prompt, and of a response in the mean; ``heard``: what a running sequence has
    said of it in the mean; ``measured``: sequences at a time and tokens per second. ``experts``: whole ones on each GPU."""

    group: str
    model: str
    gpus: int
    prompt: int
    said: int
    heard: float
    measured: tuple[tuple[float, float], ...]
    source: str = _ENERGY
    device: str = "H100"
    experts: bool = False


_DENSE, _EXPERTS, _PROMPTS, _ONE = (
    "dense, H100",
    "mixture of experts, H100",
    "dense, H100, prompts of known length",
    "one sequence, H20",
)
LOADS = (
    Load(_DENSE, "Qwen3-8B", 1, _CHAT, 651, 612, ((8, 962), (31.9, 2928), (127.8, 5930), (474.4, 8535))),
    Load(_DENSE, "Qwen3-8B", 1, _GPQA, 8066, 5111, ((8, 818), (32, 1917), (82, 3117))),
    Load(_DENSE, "Qwen3-14B", 1, _CHAT, 621, 589, ((8, 627), (31.9, 2023), (127.7, 4474), (253.4, 5760))),
    Load(_DENSE, "Qwen3-14B", 1, _GPQA, 6991, 4523, ((8, 553), (32, 1486), (59, 2146))),
    Load(_DENSE, "Qwen3-32B", 1, _CHAT, 634, 558, ((8, 312), (29.3, 961))),
    Load(_DENSE, "Qwen3-32B", 2, _CHAT, 634, 558, ((8, 522), (31.9, 1706), (127.8, 3905), (340.2, 5071))),
    Load(_DENSE, "Qwen3-32B", 2, _GPQA, 7027, 5086, ((8, 475), (32, 1294), (63.8, 2079))),
    Load(_EXPERTS, "Qwen3-30B-A3B", 1, _CHAT, 924, 975, ((8, 611), (31.9, 1394), (88.5, 2659))),
    Load(
        _EXPERTS,
        "Qwen3-30B-A3B",
        2,
        _CHAT,
        924,
        975,
        ((8, 831), (32, 2026), (127.9, 4546), (511.1, 9650), (1018.8, 12640)),
        experts=True,
    ),
    Load(_EXPERTS, "Qwen3-30B-A3B", 1, _GPQA, 8154, 5583, ((8, 648), (16, 955))),
    Load(_EXPERTS, "Qwen3-30B-A3B", 2, _GPQA, 8154, 5583, ((8, 850), (32, 1965), (128, 4664)), experts=True),
    *(
        Load(_PROMPTS, "Qwen3-8B", 1, prompt, said, said / 2, ((users, speed),), _SILY)
        for prompt, said, users, speed in (
            (128, 128, 512, 14540),
            (1024, 128, 80, 3018),
            (128, 1024, 396, 13322),
            (2048, 2048, 40, 2815),
            (8192, 512, 7, 502),
        )
    ),
)
_SAID = 2048  # tokens, in Qwen's table
_ALONE = {  # tokens of the prompt, GPUs, tokens per second with the prompt's
    "Qwen3-8B": ((1, 1, 81.73), (6144, 1, 296.25), (14336, 1, 524.70), (30720, 1, 832.67), (129042, 1, 1173.32)),
    "Qwen3-14B": ((1, 1, 47.10), (6144, 1, 174.85), (14336, 1, 317.56), (30720, 1, 525.80), (129042, 1, 826.15)),
    "Qwen3-32B": ((1, 1, 20.72), (6144, 1, 77.82), (14336, 1, 143.08), (30720, 1, 240.75), (129042, 2, 711.40)),
    "Qwen3-30B-A3B": ((1, 1, 137.18), (6144, 1, 490.10), (14336, 1, 849.62), (30720, 1, 1283.94), (129042, 1, 1385.65)),
}
_KV_TOKENS = 92 * 4096  # silybench: users of 2,048 + 2,048 tokens whose KV fits one H100 beside Qwen3-8B


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure nothing: say how far off it is."""
    begun, table = now(), rows()
    grouped = {
        group: [row["error"] for row in table if row["group"] == group] for group in (_DENSE, _EXPERTS, _PROMPTS, _ONE)
    }
    room = RooflineCosts(DEVICES["H100"], MODELS["Qwen3-8B"]).kv_tokens
    errors = [abs(row["error"]) for row in table]
    return frame(
        NAME,
        "simulated",
        value=round(statistics.median(errors), 4),
        unit="median of |predicted / published - 1| of tokens per second",
        reference="none: how far off a roofline may be depends on what is asked of it",
        reference_value=0.0,
        bar="stated",
        holds=None,
        detail={
            "groups": {group: _about(of) for group, of in grouped.items()},
            "second_gpu": second_gpu(table),
            "kv_tokens": {
                "published": _KV_TOKENS,
                "predicted": room,
                "error": round(room / _KV_TOKENS - 1, 4),
                "source": _SILY,
            },
            "rows": table,
            "samples": len(table),
        },
        quick=quick,
        nonce=nonce,
        begun=begun,
    )


def _about(errors: list[float]) -> dict[str, float]:
    return {
        "rows": len(errors),
        "median": round(statistics.median(map(abs, errors)), 4),
        "least": min(errors),
        "most": max(errors),
    }


def rows() -> list[dict[str, Any]]:
    """Each published speed beside ours."""
    return [*_loaded(), *_alone()]


def _loaded() -> Iterator[dict[str, Any]]:
    for load in LOADS:
        ranks = load.gpus if load.experts else 1
        costs = RooflineCosts(DEVICES[load.device], MODELS[load.model], load.gpus, expert_parallel=ranks)
        for sequences, published in load.measured:
            fixed, growing = costs.decode(round(sequences))
            context = load.prompt + load.heard
            prompts = costs.prefill(load.prompt, load.prompt**2 / 2, round(sequences)) * sequences / load.said
            step = fixed + growing * sequences * context + prompts
            yield _row(load.group, load.model, load.gpus, sequences, context, published, sequences / step, load.source)


def _alone() -> Iterator[dict[str, Any]]:
    for model, table in _ALONE.items():
        for prompt, gpus, published in table:
            costs = RooflineCosts(DEVICES["H20"], MODELS[model], gpus)
            fixed, growing = costs.decode(1)
            context = prompt + _SAID / 2
            seconds = costs.prefill(prompt, prompt**2 / 2, 0) + _SAID * (fixed + growing * context)
            yield _row(_ONE, model, gpus, 1, context, published, (prompt + _SAID) / seconds, _QWEN)


def _row(
    group: str, model: str, gpus: int, sequences: float, context: float, published: float, predicted: float, source: str
) -> dict[str, Any]:
    return {
        "group": group,
        "model": model,
        "gpus": gpus,
        "sequences": sequences,
        "context": round(context),
        "published": published,
        "predicted": round(predicted, 1),
        "error": round(predicted / published - 1.0, 4),
        "source": source,
    }


def second_gpu(table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Speed on two GPUs over that on one, of the same sequences at the same contexts, published and predicted."""
    speeds = {
        (row["model"], row["context"], round(row["sequences"], -1), row["gpus"]): row
        for row in table
        if row["source"] == _ENERGY
    }
    found = []
    for (model, context, sequences, gpus), row in speeds.items():
        other = speeds.get((model, context, sequences, 2))
        if gpus == 1 and other is not None:
            both = {name: round(other[name] / row[name], 3) for name in ("published", "predicted")}
            error = round(both["predicted"] / both["published"] - 1.0, 4)
            found.append({"model": model, "context": context, "sequences": row["sequences"], **both, "error": error})
    return found
