"""Records trajectories of a pretrained chat model on multi-turn tasks, with a real engine and no trainer.

    python scripts/bench/data/record_chat.py MODEL_FOLDER RUN_FOLDER problems,chores,puzzles --seconds 280

The way is a run's own: ``EnvManager``, ``LLMProxy``, our vLLM worker, ``TrajectoryStore``; groups of ``--members`` start one
after the other, of the tasks in turn, ``--at-once`` trajectories play at a time. In the last ``--drain`` of the seconds nothing
begins, and what is under way ends: else the long ones would be missing. A second call goes on with the prompts behind those of
the first. ``scripts/bench/data/pack_lengths.py`` makes one small file of a folder.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time
from pathlib import Path
from typing import Any

from orchestrator.api import Prompt, RunError, Sampling, TrajectoryError
from orchestrator.envs import EnvManager, Episode
from orchestrator.events import EventLog, MemorySink
from orchestrator.proxy.gateway import LLMProxy
from orchestrator.proxy.worker_state import WorkerLimits
from orchestrator.store import TrajectoryStore
from scripts.bench.data.chat_tasks import TASKS, HuggingFaceChat
from vllm_rlplugin.worker.inprocess_worker import EngineWorker


class Restless(EngineWorker):
    """An engine in this process cannot be started a second time."""

    async def restart(self) -> None:
        raise RunError("the engine failed")


def _tasks(text: str) -> list[str]:
    names = text.split(",")
    if wrong := [name for name in names if name not in TASKS]:
        raise argparse.ArgumentTypeError(f"no task {wrong[0]!r}; there are: {', '.join(sorted(TASKS))}")
    return names


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("tasks", type=_tasks, help=f"of {', '.join(sorted(TASKS))}; several with commas between")
    parser.add_argument("--seconds", type=float, default=220.0)
    parser.add_argument("--drain", type=float, default=0.3, help="share of the seconds")
    parser.add_argument("--prompts", type=int, default=400, help="of this call")
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--at-once", type=int, default=24)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--dtype", default="float32", help="bfloat16 where the processor computes in it")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


async def record(options: argparse.Namespace) -> None:
    chat = HuggingFaceChat(options.model)
    tasks = [TASKS[name](chat, chat.size) for name in options.tasks]
    options.folder.mkdir(parents=True, exist_ok=True)
    progress = options.folder / "recorded.json"
    before: dict[str, Any] = json.loads(progress.read_text()) if progress.exists() else {"prompts": 0, "seconds": 0.0}
    worker = Restless(
        model=options.model,
        dtype=options.dtype,
        max_num_seqs=options.at_once,
        max_model_len=max(task.max_context_tokens for task in tasks),
        kv_cache_mb=1024,
        threads=options.threads,
        seed=options.seed + before["prompts"],
    )
    begun = time.monotonic()
    loop = asyncio.get_running_loop()
    failed: list[RunError] = []
    proxy = LLMProxy(
        [worker], EventLog(MemorySink(), loop.time), limits=WorkerLimits(120.0), restarts=0, on_fatal=failed.append
    )
    proxy.start()
    proxy.version = 0
    managers = [
        EnvManager(task, proxy, step_timeout=60.0, trajectory_timeout=600.0, is_stale=lambda _: False) for task in tasks
    ]
    samplings = [
        Sampling(task.max_response_tokens, options.temperature, stop_token_ids=(task.end_id,)) for task in tasks
    ]
    streams = [task.prompts("train", options.seed) for task in tasks]
    drawn = (next(streams[number % len(tasks)]) for number in itertools.count())
    store = TrajectoryStore(options.folder / "trajectories")
    places, ended, zero = asyncio.Semaphore(options.at_once), 0, before["seconds"] - loop.time()

    async def one(number: int, member: int, prompt: Prompt) -> None:
        nonlocal ended
        try:
            episode = Episode(f"g{number}-{member}", f"g{number}", prompt, loop.time() + zero)
            await managers[number % len(tasks)].play(episode, samplings[number % len(tasks)])
            reward = float(episode.turns[-1].reward)
            now = loop.time() + zero
            store.append(episode.trajectory(now, reward=reward, scored_at=now), 0, "scored")
            ended += 1
            if ended % 4 == 0:
                store.flush()  # a call that is killed has these
        except TrajectoryError as error:
            print(f"lost {number}-{member}: {error}", flush=True)
        finally:
            places.release()

    running: set[asyncio.Task[None]] = set()
    first, number = before["prompts"], before["prompts"]
    last_start = loop.time() + options.seconds * (1.0 - options.drain)
    try:
        async with asyncio.timeout(options.seconds):
            for number, prompt in enumerate(itertools.islice(drawn, first, first + options.prompts), start=first):
                for member in range(options.members):
                    await places.acquire()
                    started = asyncio.create_task(one(number, member, prompt))
                    running.add(started)
                    started.add_done_callback(running.discard)
                if failed:
                    raise failed[0]
                if loop.time() > last_start:
                    break
            await asyncio.gather(*running)
    except TimeoutError:
        print(f"the seconds are over; {len(running)} are not kept", flush=True)
    for started in list(running):
        started.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    store.flush()
    seconds = time.monotonic() - begun
    progress.write_text(json.dumps({"prompts": number + 1, "seconds": before["seconds"] + seconds}))
    print(json.dumps({"ended": ended, "tokens": proxy.tokens, "seconds": round(seconds, 1), "prompts": number + 1}))
    await proxy.close()
    await worker.close()


if __name__ == "__main__":
    asyncio.run(record(parsed()))
