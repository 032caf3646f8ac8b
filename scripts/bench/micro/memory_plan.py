"""What fits: the plans of published models on devices of 80 GB, and how far the plan is from what real ranks take.

The plan is ``rl-coserve plan``'s: the trainer's own step on fake tensors (`megatron_rlplugin/memory/`), for the first and the
last pipeline rank: shapes and bytes, no numbers, no device. Models in bf16 with fp32 gradients and Adam, rows of 8,192 tokens,
one to a micro-batch, vocabularies of 152 thousand. The bars, set before the figures were known: Qwen2.5-7B at TP2 DP4 with 10 GB
free; Qwen3-32B on 8 devices at TP8 with the optimizer offloaded, on 16 without; Qwen3-30B-A3B on 8 at EP8; Qwen3-235B-A22B on
128; our own copies 0 bytes of the device. Calibration (real): the plan with attention as it runs on a CPU, over VmHWM above its
start, of every rank of ten layouts on gloo, each at least 2 GB: within 5 %.

``python -m scripts.bench.micro.memory_plan --table`` prints the table of docs/megatron.md from docs/results/memory-plan.json;
``--part N FOLDER`` measures one of its parts, ``--result FOLDER`` puts them together.
``--quick`` plans a small model and calibrates one layout with a fifth of the memory: it shows that the measurement works.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_rlplugin.memory.rank_memory import StepRequest
from megatron_rlplugin.memory.trainer_plan import FRAGMENTATION, GB, RESERVE, plan_trainer, run_request
from orchestrator.api import ConfigError, RunError
from orchestrator.settings.trainer_settings import TrainerSection
from scripts.bench.cells import Cells
from scripts.bench.probes.probe_run import CHECKOUT
from scripts.bench.result import frame, now

NAME = "memory-plan"
DEVICE, TOKENS, WITHIN, LEAST = 80 * GB, 8192, 0.05, 2 * GB
_ROPE = {"max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False}
_FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}


def _dense(
    architecture: str, vocabulary: int, hidden: int, inner: int, layers: int, heads: int, kv: int
) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": 128,
        **_ROPE,
    }


def _experts(inner: int, hidden: int, dense: int, layers: int, heads: int) -> dict[str, Any]:
    shape = _dense("Qwen3MoeForCausalLM", 151936, hidden, dense, layers, heads, 4)
    return {
        **shape,
        "moe_intermediate_size": inner,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    }


# As their config.json says.
MODELS: Mapping[str, dict[str, Any]] = {
    "Qwen2.5-7B": _dense("Qwen2ForCausalLM", 152064, 3584, 18944, 28, 28, 4),
    "Qwen3-32B": _dense("Qwen3ForCausalLM", 151936, 5120, 25600, 64, 64, 8),
    "Qwen3-30B-A3B": _experts(768, 2048, 6144, 48, 32),
    "Qwen3-235B-A22B": _experts(1536, 4096, 12288, 94, 64),
    "tiny": _dense("Qwen3ForCausalLM", 1024, 256, 512, 2, 2, 2),
}


@dataclass(frozen=True, slots=True)
class PlannedLayout:
    """One row of the table. ``free``: GB that the bar asks for."""

    model: str
    trainer: dict[str, Any]
    free: float = 0.0

    @property
    def section(self) -> TrainerSection:
        return TrainerSection.from_dict({"micro_batch_tokens": TOKENS, "distributed_optimizer": True, **self.trainer})

    @property
    def name(self) -> str:
        """As people write it: TP2 DP4."""
        section = self.section
        sizes = {
            "TP": section.tensor_parallel,
            "PP": section.pipeline_parallel,
            "EP": section.expert_parallel,
            "DP": section.data_parallel,
        }
        return " ".join(f"{key}{size}" for key, size in sizes.items() if size > 1)

    @property
    def options(self) -> str:
        """What beside the layout is set."""
        megatron = self.section.megatron
        words = {
            "recompute": megatron.get("recompute_granularity"),
            "optimizer": "offloaded"
            if megatron.get("optimizer_cpu_offload")
            else "precision-aware"
            if megatron.get("use_precision_aware_optimizer")
            else None,
        }
        said = [f"{key} {value}" for key, value in words.items() if value]
        return ", ".join([*said, *(["sequence parallel"] if megatron.get("sequence_parallel") else [])])


_OFFLOAD = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
_PRECISE = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}
_SP = {"sequence_parallel": True}
PLANS = (
    PlannedLayout(
        "Qwen2.5-7B", {"tensor_parallel": 2, "data_parallel": 4, "megatron": {**_SP, **_SELECTIVE}}, free=10.0
    ),
    PlannedLayout("Qwen3-32B", {"tensor_parallel": 8, "megatron": {**_SP, **_FULL, **_OFFLOAD}}),
    PlannedLayout("Qwen3-32B", {"tensor_parallel": 8, "data_parallel": 2, "megatron": {**_SP, **_FULL}}),
    PlannedLayout("Qwen3-30B-A3B", {"expert_parallel": 8, "data_parallel": 8, "megatron": {**_FULL, **_PRECISE}}),
    PlannedLayout(
        "Qwen3-235B-A22B",
        {
            "tensor_parallel": 4,
            "pipeline_parallel": 2,
            "expert_parallel": 16,
            "data_parallel": 16,
            "megatron": {**_SP, **_FULL},
        },
    ),
)
QUICK = (PlannedLayout("tiny", {"tensor_parallel": 2, "megatron": _SP}),)


@dataclass(frozen=True, slots=True)
class RealLayout:
    """A layout that real ranks take. ``layers`` so that each has at least 2 GB."""

    name: str
    trainer: dict[str, Any]
    layers: int
    experts: int = 0
    dtype: str = "float32"
    tokens: int = 384
    rows: int = 1


REAL = (
    RealLayout("DP1", {}, 8),
    RealLayout("DP1 recompute full", {"megatron": _FULL}, 8),
    RealLayout("DP1 bf16", {"distributed_optimizer": True}, 8, dtype="bfloat16"),
    RealLayout("TP2", {"tensor_parallel": 2}, 14),
    RealLayout("TP2 sequence parallel", {"tensor_parallel": 2, "megatron": _SP}, 14),
    RealLayout("PP2", {"pipeline_parallel": 2}, 14),
    RealLayout(
        "PP2 interleaved", {"pipeline_parallel": 2, "megatron": {"virtual_pipeline_model_parallel_size": 2}}, 16
    ),
    RealLayout("DP2 distributed optimizer", {"data_parallel": 2, "distributed_optimizer": True}, 10),
    RealLayout("CP2", {"context_parallel": 2}, 8, tokens=768),
    RealLayout("EP2 DP2", {"expert_parallel": 2, "data_parallel": 2}, 5, experts=8),
)


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Plan and measure. Raises RunError when a rank fails."""
    begun = now()
    with tempfile.TemporaryDirectory(prefix="rl-coserve-memory-") as folder:
        plans = [planned(layout, Path(folder)) for layout in (QUICK if quick else PLANS)]
        measured = [row for layout in (REAL[:1] if quick else REAL) for row in real(layout, Path(folder), quick)]
    return result(plans, measured, quick, nonce, begun)


def result(
    plans: list[dict[str, Any]], measured: list[dict[str, Any]], quick: bool, nonce: str = "", begun: str = ""
) -> dict[str, Any]:
    """The figure, from its rows."""
    furthest = max(measured, key=lambda row: abs(row["ratio"] - 1.0))
    misses = [f"{row['model']} {row['layout']}: {row['free_gb']:.1f} GB free" for row in plans if not row["holds"]]
    misses += [f"{row['layout']} rank {row['rank']}: {row['ratio']:.3f}" for row in measured if not row["holds"]]
    return frame(
        NAME,
        "real",
        value=furthest["ratio"],
        unit="planned over real peak bytes, of the rank furthest from 1",
        reference="the real peak",
        reference_value=1.0,
        bar="all plans fit with our own copies at 0 bytes; planned over real within 5 % on every rank",
        holds=None if quick else not misses,
        detail={
            "plans": plans,
            "calibration": measured,
            "misses": misses,
            "device_gb": DEVICE / GB,
            "reserve_gb": {name: size / GB for name, size in RESERVE.items()},
            "fragmentation": FRAGMENTATION,
            **(
                {"shrunk": "a tiny model is planned, one layout calibrated with a fifth of the memory"} if quick else {}
            ),
        },
        quick=quick,
        nonce=nonce,
        begun=begun,
    )


def planned(layout: PlannedLayout, folder: Path) -> dict[str, Any]:
    """The row of its fullest rank."""
    plan = plan_trainer(_folder(folder, MODELS[layout.model]), _said(layout.section), "bfloat16", TOKENS, DEVICE)
    rank = plan.fullest
    parts = {name: size / GB for name, size in rank.memory.device.items()}
    free = (DEVICE - rank.total) / GB
    return {
        "model": layout.model,
        "devices": layout.section.ranks,
        "layout": layout.name,
        "options": layout.options,
        "stage": rank.stage,
        "imbalance": rank.imbalance,
        "gb": {**parts, "reserve": rank.reserve / GB},
        "total_gb": rank.total / GB,
        "free_gb": free,
        "free_bar_gb": layout.free,
        "host_gb": {name: size / GB for name, size in rank.memory.host.items()},
        "by_rank": [
            {"stage": each.stage, "imbalance": each.imbalance, "total_gb": each.total / GB} for each in plan.ranks
        ],
        "cure": plan.cure,
        "holds": free >= layout.free and not parts["copies"],
        "seconds": sum(each.memory.seconds for each in plan.ranks),
    }


def real(layout: RealLayout, folder: Path, quick: bool) -> list[dict[str, Any]]:
    """A row a rank: planned and real."""
    section = TrainerSection.from_dict({**layout.trainer, "logprob_gap_samples": 0})
    world = section.ranks
    large, small = (_folder(folder, _model(layout, size)) for size in ((0.2 if quick else 1.0), 0.0))
    requests = [
        StepRequest(large, _said(section), layout.dtype, rank, world, layout.tokens, layout.rows, as_run=True)
        for rank in range(world)
    ]
    taken = _ranks(requests, small)
    rows = []
    for request, found in zip(requests, taken, strict=True):
        plan = run_request(request)
        ratio = plan.total / found["bytes"]
        rows.append(
            {
                "layout": layout.name,
                "rank": request.rank,
                "planned_gb": plan.total / GB,
                "real_gb": found["bytes"] / GB,
                "ratio": ratio,
                "parts_gb": {name: size / GB for name, size in plan.device.items()},
                "holds": abs(ratio - 1.0) <= WITHIN and found["bytes"] >= LEAST,
            }
        )
    return rows


def _ranks(requests: list[StepRequest], small: str) -> list[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # What is freed goes back at once: the C library would keep up to 32 MB blocks for later.
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "0",
    }
    program = [sys.executable, "-W", "ignore", "-m", "scripts.bench.probes.megatron.memory_probe"]
    started = [
        subprocess.Popen(
            [*program, json.dumps(asdict(request)), small, meeting],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=CHECKOUT,
            env=environment,
        )
        for request in requests
    ]
    try:
        ended = [process.communicate(timeout=900) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, error) in zip(started, ended, strict=True):
        if process.returncode:
            raise RunError(f"a rank of {requests[0].settings} failed: {error[-800:]}")
    return [json.loads(out.splitlines()[-1]) for out, _ in ended]


def _model(layout: RealLayout, size: float) -> dict[str, Any]:
    """With ``size`` 1 some 17 million parameters a layer; with 0 a tiny one of the same kind."""
    width = 1024 if size == 1.0 else 512 if size else 64
    layers = layout.layers if size else 4
    shape = _dense("Qwen3ForCausalLM", 8192 if size else 256, width, 4 * width, layers, max(width // 64, 2), 2)
    shape["head_dim"] = 64
    if layout.experts:
        shape |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "moe_intermediate_size": width * 2,
            "num_experts": layout.experts,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        }
    return shape


def _folder(under: Path, shape: Mapping[str, Any]) -> str:
    folder = Path(tempfile.mkdtemp(dir=under))
    (folder / "config.json").write_text(json.dumps(shape), encoding="ascii")
    return str(folder)


def _said(section: TrainerSection) -> dict[str, Any]:
    """What differs from the defaults."""
    return section.model_dump(exclude_defaults=True)


def table(found: Mapping[str, Any]) -> str:
    """The plans as a table of a page."""
    columns = "weights | gradients | optimizer | activations | logits | our copies | reserve"
    lines = [f"| model | devices | layout | with | {columns} | free of 80 |", "|" + " --- |" * 12]
    for row in found["detail"]["plans"]:
        sizes = [f"{row['gb'][name]:.1f}" for name in ("weights", "gradients", "optimizer", "activations", "logits")]
        sizes += [f"{row['gb']['copies']:.0f}", f"{row['gb']['reserve']:.1f}", f"{row['free_gb']:.1f}"]
        words = [row["model"], str(row["devices"]), row["layout"], row["options"], *sizes]
        lines.append(f"| {' | '.join(words)} |")
    return "\n".join(lines)


def part(number: int, folder: Path) -> None:
    """Adds plan ``number``, or the rows of a calibration (numbers go on), to ``folder``: the whole takes long in one go."""
    cells = Cells(folder, NAME)
    with tempfile.TemporaryDirectory(prefix="rl-coserve-memory-") as made:
        if number < len(PLANS):
            rows = [planned(PLANS[number], Path(made))]
        else:
            rows = real(REAL[number - len(PLANS)], Path(made), False)
    cells.keep(f"{number:02d}", rows)


def put_together(folder: Path) -> dict[str, Any]:
    """The figure, from all its parts, and that it is. Raises ConfigError where one is missing, or they are not of one source."""
    cells = Cells(folder, NAME)
    missing = [number for number in range(len(PLANS) + len(REAL)) if not cells.has(f"{number:02d}")]
    if missing:
        raise ConfigError("cells", NAME, f"parts {missing} are missing: measure them first")
    rows = [row for rows in cells.found() for row in rows]
    found = result(rows[: len(PLANS)], rows[len(PLANS) :], False)
    return {**found, "source": cells.measured_on(), "detail": {**found["detail"], "in_parts": True}}


if __name__ == "__main__":
    if sys.argv[1] == "--table":
        print(table(json.loads((CHECKOUT / "docs/results/memory-plan.json").read_text(encoding="utf-8"))))
    elif sys.argv[1] == "--part":
        part(int(sys.argv[2]), Path(sys.argv[3]))
    elif sys.argv[1] == "--result":
        print(json.dumps(put_together(Path(sys.argv[2])), indent=1, sort_keys=True))
