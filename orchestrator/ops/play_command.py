"""``rl-coserve play``: one episode of a config's task with given weights, in the terminal, turn by turn as it happens.

The weights are those of a folder, in this process on its processors, or of a model that somebody serves (any ``/v1/completions``
of vLLM). Guarantees: ids in, ids out, as in a run; nothing is trained, written or started; the reward is that of the function
that a run would ask. A context rule (``[context]``), a memory and tools are a run's and are not played.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from orchestrator.api import ConfigError, Prompt, RetryableError, Task, Trajectory, Turn, parts_of, stop_ids_of, urls
from orchestrator.config import Config
from orchestrator.rewards.function_process import load_function
from orchestrator.rewards.llm_judge import spoken_text
from orchestrator.rewards.reward_client import reward_event, reward_in
from orchestrator.settings.user_functions import named_function
from orchestrator.tasks import registry

_ANSWER_SECONDS = 600.0


class Speaker(Protocol):
    """Says something: the ids behind ``context``, with a stop id where it came to its end in ``most`` tokens."""

    async def say(self, context: Sequence[int], most: int, stops: Sequence[int]) -> tuple[int, ...]: ...


class LocalWeights:
    """A Hugging Face folder, computed here. ``temperature`` 0: greedy. Raises ConfigError."""

    def __init__(self, folder: Path, temperature: float, seed: int) -> None:
        try:
            import torch
            from transformers import AutoModelForCausalLM
            from transformers.utils import logging
        except ImportError as error:
            raise ConfigError(
                "--weights",
                str(folder),
                f"needs torch and transformers here ({error}); or serve the model and give its URL",
            ) from error
        logging.disable_progress_bar()
        try:
            self._model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError("--weights", str(folder), f"cannot be loaded as a model: {error}") from error
        self._temperature = temperature
        torch.manual_seed(seed)
        self._torch = torch

    async def say(self, context: Sequence[int], most: int, stops: Sequence[int]) -> tuple[int, ...]:
        return await asyncio.to_thread(self._say, context, most, stops)

    def _say(self, context: Sequence[int], most: int, stops: Sequence[int]) -> tuple[int, ...]:
        torch, said, past, new = self._torch, list[int](), None, list(context)
        with torch.no_grad():
            while len(said) < most and (not said or said[-1] not in stops):
                out = self._model(torch.tensor([new]), past_key_values=past, use_cache=True)
                past, logits = out.past_key_values, out.logits[0, -1].float()
                if self._temperature:
                    chosen = torch.multinomial(torch.softmax(logits / self._temperature, -1), 1)
                else:
                    chosen = logits.argmax()
                new = [int(chosen)]
                said += new
        return tuple(said)


class ServedWeights:
    """A vLLM server's ``/v1``. ``token``: empty for none. Raises ConfigError, RetryableError when it does not answer."""

    def __init__(self, url: str, token: str, temperature: float, seed: int) -> None:
        if wrong := urls.mistake(url, allow_plain_http=not token):
            raise ConfigError("--weights", url, wrong)
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._sampling = {"temperature": temperature, "seed": seed}
        self._model = ""

    async def say(self, context: Sequence[int], most: int, stops: Sequence[int]) -> tuple[int, ...]:
        if not self._model:
            self._model = await self._served_model()
        body = {"model": self._model, "prompt": list(context), "max_tokens": most, "stop_token_ids": list(stops)}
        answer = await self._asked("POST", "/v1/completions", body | self._sampling | {"return_token_ids": True})
        try:
            ids = tuple(map(int, answer["choices"][0]["token_ids"]))
        except (LookupError, TypeError) as error:
            raise ConfigError(
                "--weights", self._url, "answers without token ids: is it vLLM, of a tested version?"
            ) from error
        return ids

    async def _served_model(self) -> str:
        try:
            return str((await self._asked("GET", "/v1/models", None))["data"][0]["id"])
        except (LookupError, TypeError) as error:
            raise ConfigError("--weights", self._url, "lists no model at /v1/models: is it vLLM?") from error

    async def _asked(self, method: str, path: str, body: Any) -> Any:
        import aiohttp

        limit = aiohttp.ClientTimeout(total=_ANSWER_SECONDS)
        try:
            async with aiohttp.ClientSession(timeout=limit, headers=self._headers) as session:
                asked = session.request(method, f"{self._url}{path}", json=body, allow_redirects=False)
                async with asked as response:
                    if response.status != 200:
                        said = (await response.text())[:300]
                        raise ConfigError("--weights", self._url, f"answers {response.status} to {path}: {said}")
                    return await response.json()
        except ValueError as error:  # not JSON
            raise ConfigError("--weights", self._url, f"does not answer {path} with JSON: is it vLLM?") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RetryableError(f"{self._url} does not answer: {str(error) or type(error).__name__}") from error


async def play_episode(
    config: Config, task: Task, prompt: Prompt, speaker: Speaker, show: Callable[[str, str], None]
) -> float | None:
    """The reward; None: the config's scorer is none that can be asked here. ``show``: (kind, text) as it happens; kinds ``head``,
    ``seen``, ``said``, ``note``. Raises ConfigError, RetryableError, TrajectoryError for what is no reward, and what the task
    raises."""
    if hasattr(task, "gateway"):
        raise ConfigError(
            "task.name", config.task.name, "its trajectories come from an agent program: use `rl-coserve train`"
        )
    limits, environment, turns = parts_of(task).get(prompt.task, task), task.environment(), list[Turn]()
    total, began = 0.0, time.monotonic()
    try:
        observation = (await environment.reset(prompt)).token_ids
        context: tuple[int, ...] = ()
        for number in range(limits.max_turns):
            context += observation
            show("head", f"turn {number + 1}")
            show("seen", spoken_text(task, observation))
            asked = time.monotonic()
            room = min(limits.max_response_tokens, limits.max_context_tokens - len(context))
            if room < 1:
                show("note", "the context is full")
                break
            action = await speaker.say(context, room, stop_ids_of(task))
            said = time.monotonic()
            show("said", spoken_text(task, action))
            result = await environment.step(action)
            if result.invalid_action:
                show("note", "invalid: the task did not understand it, or it did not come to its end")
            total += result.reward
            times = said - asked, time.monotonic() - said
            done = result.done or result.truncated
            versions = ((0, len(action)),)
            turns.append(Turn(observation, action, (0.0,) * len(action), versions, result.reward, done, *times))
            context, observation = context + action, result.observation.token_ids
            if done:
                break
    finally:
        await environment.close()
    seconds = time.monotonic() - began
    trajectory = Trajectory(
        "play", "play", prompt.task, prompt, tuple(turns), None, "", prompt.seed, not turns[-1].done, (), 0.0, seconds
    )
    return await _scored(config, task, trajectory)


async def _scored(config: Config, task: Task, trajectory: Trajectory) -> float | None:
    if config.reward.url or config.reward.judge.any:
        return None
    target = config.reward.function or registry.reward_of(task)
    named_function("reward.function", target)
    event = reward_event(
        trajectory, getattr(task, "played", None), getattr(task, "said", None), getattr(task, "scorers", None)
    )
    return reward_in(await asyncio.to_thread(load_function(target), event))


def token_in(file: str) -> str:
    """Of a server; "" without a file. Raises ConfigError."""
    try:
        return Path(file).read_text(encoding="utf-8").strip() if file else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--token-file", file, f"cannot be read: {error}") from error


def heldout_prompt(task: Task, seed: int, number: int) -> Prompt:
    """The held-out prompt of this number, from 0. Raises ConfigError when there are not so many."""
    if number < 0:
        raise ConfigError("--prompt", number, "must be 0 or more")
    found = next(islice(task.prompts("heldout", seed), number, None), None)
    if found is None:
        raise ConfigError("--prompt", number, "there are not that many held-out prompts (task.heldout_maps)")
    return found


def is_run(folder: Path) -> bool:
    """Whether this is a run's folder; a model's has a config.json too."""
    return (folder / "events.jsonl").is_file()


def speaker_of(weights: str, token: str, temperature: float, seed: int) -> Speaker:
    """Of a run its ``model-final``. Raises ConfigError."""
    if weights.startswith(("http://", "https://")):
        return ServedWeights(weights, token, temperature, seed)
    folder = Path(weights)
    if not (folder / "config.json").is_file():
        raise ConfigError("--weights", weights, "give a run, a Hugging Face folder, or the URL of a server")
    if not is_run(folder):
        return LocalWeights(folder, temperature, seed)
    folder /= "model-final"
    if not folder.is_dir():
        raise ConfigError("--weights", weights, "has no model-final yet: it is written when the run ends")
    return LocalWeights(folder, temperature, seed)
