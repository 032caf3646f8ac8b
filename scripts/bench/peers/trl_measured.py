"""Runs what a user of TRL wrote, in TRL's own environment, and prints what happened as JSON lines: each step, each evaluation.

``python -m scripts.bench.peers.trl_measured MODEL OUTPUT --steps N --every N --prompts N --seed N``. None of this is counted as a
user's line: rl-coserve evaluates held-out prompts by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from orchestrator.tasks.frozenlake import FrozenLakeTask
from scripts.bench.peers import trl_frozenlake


class Watch(TrainerCallback):  # type: ignore[misc]
    """Prints each step, and greedy success on held-out maps before, every so many steps, and at the end."""

    def __init__(self, play: Callable[[], float], every: int, steps: int) -> None:
        self._play, self._every, self._steps = play, every, steps
        self.trained = self.tokens = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Before the first step."""
        self._evaluate(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After each optimizer step."""
        step = int(state.global_step)
        _say(kind="step", step=step, t=time.monotonic(), trained=self.trained, tokens=self.tokens)
        self.trained = self.tokens = 0
        if step == self._steps or (self._every and step % self._every == 0):
            self._evaluate(step)

    def _evaluate(self, step: int) -> None:
        start = time.monotonic()
        success = self._play()
        _say(kind="evaluation", step=step, start=start, end=time.monotonic(), success=success)


def _say(**event: Any) -> None:
    print(json.dumps(event), flush=True)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("output")
    for name in ("steps", "every", "prompts", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    heldout = [prompt.payload for prompt in FrozenLakeTask(options.prompts).prompts("heldout", 0)]
    trainer = trl_frozenlake.make_trainer(options.model, options.output, options.steps, options.seed)

    def greedy() -> float:
        trainer.model.eval()
        success: list[float] = asyncio.run(trl_frozenlake.play(trainer.model, heldout, sample=False))["success"]
        trainer.model.train()
        return sum(success) / len(heldout)

    watch, rollout = Watch(greedy, options.every, options.steps), trainer.rollout_func

    def counted(prompts: list[str], of: Any) -> Any:
        found = rollout(prompts, of)
        watch.trained += len(found["completion_ids"])
        watch.tokens += sum(map(sum, found["env_mask"]))
        return found

    trainer.rollout_func = counted
    trainer.add_callback(watch)
    trainer.train()


if __name__ == "__main__":
    main()
