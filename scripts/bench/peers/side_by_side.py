"""The same task side by side: time to 0.7 held-out success of TRL's GRPO trainer over ours, on the same cores.

Real: FrozenLake of the demo, one tiny Qwen3 with the same warmed-up weights, 64 trajectories a step in groups of 8, the same
learning rate, loss and number of steps, in turn on the same machine. Ours is ``rl-coserve train`` with vLLM, Megatron-Core and
Ray; TRL's trainer plays in a rollout function with transformers, in an environment of its own that the bench makes with pip. What
users of each write lies beside this file. verl is asked to train the same model, unmodified; where it does not start, its words
are kept.

The time to the target is the number of steps until the first evaluation that reached it, times the mean seconds of a step that
no evaluation interrupts; start-up, which is in ``command_seconds``, is left out. ``--quick`` makes a few steps, with the
environments that are there already: it shows that the measurement works.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from orchestrator.api import RunError
from orchestrator.config import load_config
from orchestrator.events import read_events
from orchestrator.runtime import tiny_model_setup
from orchestrator.runtime.preflight import make_task
from scripts.bench.peers import environments
from scripts.bench.peers.code_lines import OURS, ROOT, TRL, counted
from scripts.bench.probes.training_run import train
from scripts.bench.result import frame, now

NAME = "peers"
TARGET = 0.70  # held-out success
ROUNDS, STEPS, EVERY, PROMPTS = 3, 240, 20, 200
QUICK_STEPS = 4
CONFIG, DEMO = Path("scripts/bench/peers/frozenlake.toml"), Path("examples/frozenlake.toml")
_VERL_SECONDS = 240.0
_LIMIT = 900.0  # seconds of TRL's run
Event = dict[str, Any]


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. Needs the checkout. Raises RunError when a side fails."""
    begun, load = now(), os.getloadavg()[0]
    rounds, steps, every = (1, QUICK_STEPS, 0) if quick else (ROUNDS, STEPS, EVERY)
    pythons = (
        {"trl": environments.prepared("trl"), "verl": None}
        if quick
        else {name: environments.prepare(name) for name in ("trl", "verl")}
    )
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="rl-coserve-peers-") as name:
        folder = Path(name)
        for seed in range(rounds):
            model = warm_start(folder / f"model-{seed}", seed, 5 if quick else load_config(DEMO).warmup.steps)
            for side in ("ours", "trl") if seed % 2 == 0 else ("trl", "ours"):
                if side == "ours":
                    rows.append(_row(side, seed, steps, *_ours(folder, model, seed, steps, every)))
                elif python := pythons["trl"]:
                    rows.append(_row(side, seed, steps, *_trl(python, folder, model, seed, steps, every)))
        verl = _verl(pythons["verl"], folder, model) if pythons["verl"] else {"starts": None, "log": "not asked"}
    found = {name: environments.versions(python) for name, python in pythons.items() if python}
    about = {"started": begun, "nonce": nonce, "verl": verl, "peer_versions": found}
    return result(rows, quick, {**about, "load_average": [round(load, 1), round(os.getloadavg()[0], 1)]})


def warm_start(folder: Path, seed: int, steps: int) -> Path:
    """The demo's tiny model after supervised steps on the demo's demonstrations: where both sides begin."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    config = load_config(DEMO, [f"run.seed={seed}"])
    task, settings = make_task(config), config.warmup
    tiny_model_setup.make(config, folder)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    samples = task.demonstrations(steps * settings.batch_size, seed, settings.skill)  # type: ignore[attr-defined]
    for _ in range(steps):
        rows = [next(samples) for _ in range(settings.batch_size)]
        width = max(len(tokens) for tokens, _ in rows)
        ids = torch.tensor([[*tokens, *[task.pad_id] * (width - len(tokens))] for tokens, _ in rows])
        mask = torch.tensor([[*said, *[0] * (width - len(said))] for _, said in rows], dtype=torch.bool)
        logits = model(input_ids=ids).logits[:, :-1]  # padding is behind what is learned, and no token looks ahead
        loss = torch.nn.functional.cross_entropy(logits[mask[:, 1:]], ids[:, 1:][mask[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    weights = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _ours(folder: Path, model: Path, seed: int, steps: int, every: int) -> tuple[list[Event], float]:
    own = [f'model.path="{model}"', f"run.seed={seed}", f"run.steps={steps}", f"evaluation.every={every}"]
    begun = time.monotonic()
    run_folder = train(CONFIG, folder, f"ours-{seed}", own)
    return of_our_log(read_events(run_folder / "events.jsonl")), time.monotonic() - begun


def of_our_log(events: list[Event]) -> list[Event]:
    """A run's event log in the form that both sides are read in; times are seconds of one clock."""
    stages = [event for event in events if event["kind"] == "stage" and event["stage"] == "evaluate"]
    results = [event for event in events if event["kind"] == "evaluation"]
    found = [
        {
            "kind": "evaluation",
            "step": result["step"],
            "start": stage["start"],
            "end": stage["end"],
            "success": result["success"],
        }
        for stage, result in zip(stages, results, strict=True)
    ]
    found += [
        {"kind": "step", **{key: event[key] for key in ("step", "t", "trained", "tokens")}}
        for event in events
        if event["kind"] == "step"
    ]
    return found


def _trl(python: Path, folder: Path, model: Path, seed: int, steps: int, every: int) -> tuple[list[Event], float]:
    options = {"steps": steps, "every": every, "prompts": PROMPTS, "seed": seed}
    given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    command = [str(python), "-m", "scripts.bench.peers.trl_measured", str(model), str(folder / f"trl-{seed}"), *given]
    begun = time.monotonic()
    # One thread, as our trainer has: beside other work two wait for each other, and a step takes twenty times as long.
    done = _call(command, _LIMIT, {"OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"})
    if done.returncode:
        raise RunError(f"TRL's run ended with exit code {done.returncode}: {done.stderr[-1500:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"kind"')]
    return [json.loads(line) for line in lines], time.monotonic() - begun


def _call(command: list[str], limit: float, more: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A child that imports this checkout, in a session of its own; at its limit it is ended with its children."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **more}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
        start_new_session=True,
    ) as child:
        try:
            said = child.communicate(timeout=limit)
            code = child.returncode
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            said, code = child.communicate(), 124
    return subprocess.CompletedProcess(command, code, *said)


def _verl(python: Path, folder: Path, model: Path) -> dict[str, Any]:
    """verl on one machine without a GPU: whether it starts, its exit code, and the last it said."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = {
        "data_source": "frozenlake",
        "prompt": [{"role": "user", "content": "<lake>"}],
        "reward_model": {"style": "rule", "ground_truth": ""},
    }
    data = folder / "verl.parquet"
    pq.write_table(pa.Table.from_pylist([row] * 64), data)
    given = [
        f"data.train_files={data}",
        f"data.val_files={data}",
        "data.train_batch_size=8",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.n=8",
        "algorithm.adv_estimator=grpo",
        "ray_kwargs.ray_init.num_cpus=32",  # logical: its queue alone reserves more than the two there are
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        "trainer.logger=console",
        "trainer.total_training_steps=2",
        f"hydra.run.dir={folder / 'hydra'}",
    ]
    alone = {
        "RAY_ADDRESS": "local",
        "RAY_TMPDIR": str(folder / "ray"),
        "HYDRA_FULL_ERROR": "1",
    }  # not another's cluster
    done = _call([str(python), "-m", "verl.trainer.main_ppo", *given], _VERL_SECONDS, alone)
    said = re.sub(r"\x1b\[[\d;]*m", "", (done.stdout + "\n" + done.stderr).strip())
    said = re.sub(r"(/[\w.@+-]+){2,}/", ".../", said)
    return {
        "starts": done.returncode == 0,
        "exit_code": done.returncode,
        "limit_seconds": _VERL_SECONDS,
        "command": "python -m verl.trainer.main_ppo trainer.device=cpu trainer.n_gpus_per_node=1 and a tiny model",
        "log": [line for line in said.splitlines() if line.strip(" ^")][-24:],
    }


def _row(side: str, seed: int, steps: int, events: list[Event], seconds: float) -> dict[str, Any]:
    return {"side": side, "seed": seed, "asked": steps, "command_seconds": round(seconds, 1), **figures(events)}


def figures(events: list[Event]) -> dict[str, Any]:
    """Of one side's run. A rate is over the steps between which nothing was evaluated, the first one left out."""
    steps = sorted((event for event in events if event["kind"] == "step"), key=lambda event: int(event["step"]))
    curve = sorted((event for event in events if event["kind"] == "evaluation"), key=lambda event: float(event["end"]))
    between = [
        (after, after["t"] - before["t"])
        for before, after in pairwise(steps)
        if not any(before["t"] < one["end"] and one["start"] < after["t"] for one in curve)
    ]
    spent = sum(seconds for _, seconds in between)
    step_seconds = spent / len(between) if between else 0.0
    reached = next((one for one in curve if one["success"] >= TARGET), None)
    return {
        "steps": len(steps),
        "trained": sum(one["trained"] for one in steps),
        "tokens": sum(one["tokens"] for one in steps),
        "step_seconds": round(step_seconds, 4),
        "trajectories_per_s": round(sum(one["trained"] for one, _ in between) / spent, 2) if spent else None,
        "tokens_per_s": round(sum(one["tokens"] for one, _ in between) / spent, 1) if spent else None,
        "success_start": curve[0]["success"],
        "success_end": curve[-1]["success"],
        "curve": [[one["step"], round(one["end"] - curve[0]["end"], 2), one["success"]] for one in curve],
        "steps_to_target": reached and reached["step"],
        "seconds_to_target": reached and round(reached["step"] * step_seconds, 2),
        "wall_to_target": reached and round(reached["end"] - curve[0]["end"], 2),
    }


def result(rows: list[dict[str, Any]], quick: bool, detail: dict[str, Any]) -> dict[str, Any]:
    """The figure from both sides' runs. Where a side never reached the target there is no ratio: it is null, and said."""
    sides = {side: [row for row in rows if row["side"] == side] for side in ("ours", "trl")}
    medians = {side: _medians(found) for side, found in sides.items() if found}
    trl, ours = (medians.get(side, {}).get("seconds_to_target") for side in ("trl", "ours"))
    value = round(trl / ours, 3) if trl and ours else None
    lines = {"ours": counted(OURS), "trl": counted(TRL)}
    return frame(
        NAME,
        "real",
        value=value,
        unit=f"seconds to a held-out success of {TARGET} with TRL's GRPO trainer over ours (null: not reached by both)",
        reference="TRL's GRPO trainer with a rollout function, transformers on a CPU",
        reference_value=1.0,
        bar="stated",
        holds=None,
        detail={
            "target": TARGET,
            "recipe": {"steps": STEPS, "every": EVERY, "prompts": PROMPTS, "trajectories_per_step": 64},
            "seeds": sorted({row["seed"] for row in rows}),
            "medians": medians,
            "runs": rows,
            "lines": [_said(side, one) for side, one in medians.items()],
            "users_lines": {side: {"files": files, "sum": sum(files.values())} for side, files in lines.items()},
            **({"shrunk": _shrunk(sides["trl"])} if quick else {}),
            **detail,
        },
        quick=quick,
    )


def _medians(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Over the rounds; a target that one of them missed has none."""
    names = (
        "trajectories_per_s",
        "tokens_per_s",
        "step_seconds",
        "success_end",
        "seconds_to_target",
        "command_seconds",
    )
    values = {name: [row[name] for row in rows] for name in names}
    return {name: None if None in found else round(median(found), 4) for name, found in values.items()}


def _shrunk(trl: list[dict[str, Any]]) -> str:
    there = "TRL's environment as it was there" if trl else "no environment of TRL is there: the whole run makes one"
    return f"{QUICK_STEPS} steps, one seed, verl not asked; {there}"


def _said(side: str, one: dict[str, Any]) -> str:
    reached = f"{one['seconds_to_target']} s to {TARGET}" if one["seconds_to_target"] else f"{TARGET} not reached"
    return f"{side}: {one['trajectories_per_s']} trajectories/s, {one['tokens_per_s']} tokens/s, {reached}"
