"""``rl-coserve train CONFIG --replay RUN``: stock Megatron-Core in Ray actors, trained on what a run recorded.

Started and closed as in :mod:`orchestrator.runtime.real_run`, without engines, relay and rewards. The model is the config's, or
else the one that the recorded run started from; a warm-up in the config is done again. What is trained is in the new run
folder's ``model-final``; there are no checkpoints: the same replay gives the same weights.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from orchestrator.api import ConfigError, RetryableError, RunError, Task
from orchestrator.build import make_filters
from orchestrator.config import Config
from orchestrator.events import EventLog
from orchestrator.ledger import Ledger
from orchestrator.observe import run_view
from orchestrator.run_folder import RunFolder
from orchestrator.runtime.engine_actors import RayTrainer
from orchestrator.runtime.pool_requests import trainer_ranks
from orchestrator.runtime.real_run import TRAINER_CLASS, trainer_environment, warm_up
from orchestrator.runtime.recorded_batches import FIELD, Recording, replay

_START_LIMIT = 300.0  # seconds for Megatron-Core to come up on a slow machine


def recorded_model(config: Config, source: Path) -> str:
    """The folder of the model to begin with. Raises ConfigError when neither the config nor the run has one."""
    path = config.model.path or str(source / "model")
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(FIELD, str(source), "has no model/ to begin with; name a Hugging Face folder in model.path")
    return path


async def replay_run(config: Config, folder: RunFolder, source: Path, task: Task, started: str) -> str:
    """One replay; ``started`` is a date. Returns "completed"."""
    loop = asyncio.get_running_loop()
    model, recording = recorded_model(config, source), Recording(source)
    steps = min(config.run.steps, len(recording))
    async with AsyncExitStack() as stack:
        events = EventLog(stack.enter_context(folder.append(folder.events_file)), loop.time)
        ledger = Ledger(stack.enter_context(folder.append(folder.ledger_file)), events.time)
        facts = {"mode": config.run.mode, "alpha": config.rollout.alpha, "name": folder.path.name, "simulated": False}
        await run_view.show_run(config, folder, events, print, stack)
        events.emit("run_start", **facts, steps=steps, started=started, resumed_from=None, replay=str(source))
        status, reason = "failed", ""
        try:
            trainer = RayTrainer(TRAINER_CLASS, trainer_environment(config), trainer_ranks(config))
            await trainer.start()
            stack.push_async_callback(trainer.close)
            with events.stage("startup", 0):
                async with asyncio.timeout(_START_LIMIT):
                    await trainer.create(
                        {
                            "model": model,
                            "settings": config.trainer.model_dump(),
                            "total_steps": steps,
                            "seed": config.run.seed,
                            "dtype": config.model.dtype,
                            "temperature": config.rollout.temperature,
                        }
                    )
            await warm_up(config, task, trainer, events)
            overlong = config.reward.overlong.rule
            done = await replay(recording, trainer, events, ledger, make_filters(config.filters), steps, overlong)
            await trainer.call("export", str(folder.path / "model-final"))
            print(f"trained {done} of {len(recording)} recorded steps")
            status = reason = "completed"
        except TimeoutError as error:
            reason = f"Megatron-Core did not come up within {_START_LIMIT:.0f} s"
            raise RunError(reason) from error
        except (RunError, RetryableError) as error:
            reason = str(error)
            raise
        finally:
            events.emit("run_end", status=status, reason=reason, ledger=ledger.counts.as_dict())
    return reason
