"""Peers side by side: both are asked for the same, and rates, times and lines are counted by the stated rules."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import load_config
from scripts.bench.peers import environments
from scripts.bench.peers.code_lines import OURS, TRL, code_lines, counted, toml_lines
from scripts.bench.peers.side_by_side import CONFIG, EVERY, PROMPTS, STEPS, figures, of_our_log, result

ROOT = Path(__file__).parents[2]


def asked_of_trl() -> dict[str, Any]:
    tree = ast.parse((ROOT / next(iter(TRL))).read_text(encoding="utf-8"))
    call = next(
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "GRPOConfig"
    )
    return {one.arg: ast.unparse(one.value) for one in call.keywords if one.arg}


def test_both_sides_are_asked_for_the_same() -> None:
    ours, trl = load_config(ROOT / CONFIG), asked_of_trl()
    batch = int(trl["per_device_train_batch_size"]) * int(trl["gradient_accumulation_steps"])
    assert batch == ours.rollout.group_size * ours.rollout.groups_per_step
    assert int(trl["num_generations"]) == ours.rollout.group_size
    assert float(trl["learning_rate"]) == ours.trainer.learning_rate
    assert ast.literal_eval(trl["lr_scheduler_kwargs"])["lr_end"] == ours.trainer.final_learning_rate
    assert float(trl["adam_beta2"]) == ours.trainer.adam_beta2
    assert float(trl["max_grad_norm"]) == ours.trainer.clip_grad
    assert (float(trl["beta"]), ours.trainer.kl_coefficient) == (0, 0)
    assert (ours.trainer.loss, trl["loss_type"]) == (
        "token-mean",
        "'dapo'",
    )  # TRL's name for the mean over a batch's tokens
    assert (ours.run.steps, ours.evaluation.every, ours.evaluation.prompts) == (STEPS, EVERY, PROMPTS)
    assert ours.warmup.steps == 0


def steps(seconds: float, count: int, evaluations: dict[int, tuple[float, float]]) -> list[dict[str, Any]]:
    """A run of equal steps; evaluations by step: how long they take, and the success."""
    now, found = 10.0, []
    for step in range(count + 1):
        if step:
            now += seconds
            found.append({"kind": "step", "step": step, "t": now, "trained": 64, "tokens": 640})
        if step in evaluations:
            took, success = evaluations[step]
            found.append({"kind": "evaluation", "step": step, "start": now, "end": now + took, "success": success})
            now += took
    return found


def test_rates_leave_evaluations_and_the_first_step_out_and_the_target_counts_steps() -> None:
    found = figures(steps(0.5, 6, {0: (3.0, 0.4), 2: (5.0, 0.6), 4: (5.0, 0.71), 6: (5.0, 0.69)}))
    assert (found["steps"], found["trained"], found["step_seconds"]) == (6, 384, 0.5)
    assert (found["trajectories_per_s"], found["tokens_per_s"]) == (128.0, 1280.0)
    assert (found["success_start"], found["success_end"]) == (0.4, 0.69)
    assert (found["steps_to_target"], found["seconds_to_target"], found["wall_to_target"]) == (4, 2.0, 12.0)
    assert figures(steps(0.5, 3, {0: (1.0, 0.4), 3: (1.0, 0.5)}))["seconds_to_target"] is None


def test_our_log_is_read_as_the_other_side_is() -> None:
    log = [
        {"kind": "stage", "stage": "evaluate", "start": 1.0, "end": 2.0},
        {"kind": "evaluation", "step": 0, "success": 0.4},
        {"kind": "step", "step": 1, "t": 3.0, "trained": 64, "tokens": 640, "metrics": {}},
        {"kind": "stage", "stage": "update", "start": 3.0, "end": 3.1},
        {"kind": "stage", "stage": "evaluate", "start": 4.0, "end": 5.0},
        {"kind": "evaluation", "step": 1, "success": 0.5},
    ]
    assert sorted(of_our_log(log), key=str) == sorted(
        [
            {"kind": "evaluation", "step": 0, "start": 1.0, "end": 2.0, "success": 0.4},
            {"kind": "evaluation", "step": 1, "start": 4.0, "end": 5.0, "success": 0.5},
            {"kind": "step", "step": 1, "t": 3.0, "trained": 64, "tokens": 640},
        ],
        key=str,
    )


def row(side: str, seed: int, seconds: float | None) -> dict[str, Any]:
    evaluations = {0: (1.0, 0.4), 2: (1.0, 0.8 if seconds else 0.5)}
    return {"side": side, "seed": seed, "command_seconds": 9.0, **figures(steps((seconds or 1.0) / 2, 2, evaluations))}


def test_the_figure_is_the_ratio_of_medians_and_null_where_a_side_never_got_there() -> None:
    both = [row("ours", 0, 4.0), row("trl", 0, 2.0), row("ours", 1, 8.0), row("trl", 1, 4.0)]
    found = result(both, False, {})
    assert (found["value"], found["holds"], found["detail"]["seeds"]) == (0.5, None, [0, 1])
    assert found["detail"]["medians"]["ours"]["seconds_to_target"] == 6.0
    missed = result([*both[:3], row("trl", 1, None)], False, {})
    assert (missed["value"], missed["detail"]["medians"]["trl"]["seconds_to_target"]) == (None, None)
    assert "0.7 not reached" in missed["detail"]["lines"][1]
    alone = result(both[:1], True, {})
    assert (alone["value"], alone["detail"]["medians"].keys()) == (None, {"ours"})
    assert "no environment of TRL is there" in alone["detail"]["shrunk"]


def test_lines_are_those_with_code() -> None:
    text = '"""Doc.\n\nMore."""\n\n# a comment\nx = [\n    1,\n]\n\n\ndef f():\n    """Doc."""\n    return x  # why\n'
    text += "\n\nclass A:\n    y = 1\n\n    def demonstrations(self):\n        return 3\n"
    assert (code_lines(text), code_lines(text, ["f"]), code_lines(text, ["A"])) == (7, 2, 2)
    assert toml_lines("# c\n\n[run]\nsteps = 1 # c\n") == 2
    assert all(lines > 5 for lines in (counted(OURS) | counted(TRL)).values())


def test_an_environment_of_other_requirements_is_not_one_that_is_there(tmp_path: Path) -> None:
    assert environments.prepared("trl", tmp_path) is None
    python = tmp_path / "trl" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    stamp = tmp_path / "trl" / "requirements.json"
    stamp.write_text(json.dumps([*environments.requirements("trl"), "more"]))
    assert environments.prepared("trl", tmp_path) is None
    stamp.write_text(json.dumps(environments.requirements("trl")))
    assert environments.prepared("trl", tmp_path) == python


@pytest.mark.parametrize("name", sorted(environments.REQUIREMENTS))
def test_a_peer_is_installed_within_a_range(name: str) -> None:
    assert all(">=" in one and "<" in one for one in environments.REQUIREMENTS[name])
