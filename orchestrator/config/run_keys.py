"""Sections of a config: the run, its model, its task, warm-up, evaluation, checkpoints."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from orchestrator.api import TimeoutMeaning
from orchestrator.config.agent_keys import AgentSection
from orchestrator.config.data_keys import DataSection
from orchestrator.settings.section import Conflict, Fraction, Positive, PositiveSeconds, Section
from orchestrator.tasks import registry


class RunSection(Section):
    """What runs, for how long, and where its folder is."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")] = "run"  # folder name prefix under `folder`
    folder: str = "runs"
    seed: Annotated[int, Field(ge=0)] = 0
    mode: Literal["sync", "sync_plus", "one_off", "areal", "async"] = "async"  # docs/modes.md
    steps: Positive = 100
    trainer_start_timeout: PositiveSeconds = 1800.0  # for its ranks, from process start to loaded model
    trainer_timeout: PositiveSeconds = 3600.0  # a trainer that does not answer one call for this long counts as dead
    # This often, without a new training step in between, a trainer that died comes back and a run that lost the relay's master
    # continues by itself from its newest checkpoint; then it ends. 0: it ends at once.
    restarts: Annotated[int, Field(ge=0)] = 2
    sync_seconds: PositiveSeconds = 1.0  # log and journal that a power cut may lose between two checkpoints
    minutes: Annotated[float, Field(gt=0)] | None = None  # stop starting new steps after this many minutes of training
    # Past its half a run ends, and says so, where fewer groups of the last 20 steps had members with different rewards, from
    # which alone it learns; 0: never.
    signal_share: Fraction = 0.0

    def conflicts(self) -> Iterator[Conflict]:
        if self.folder.startswith("~"):
            yield "folder", self.folder, "would be a folder named ~ here: write the whole path"


class ModelSection(Section):
    """Which model: a Hugging Face folder, or (``path`` empty) a tiny Qwen3 that the run creates."""

    path: str = ""
    hidden_size: Positive = 128
    intermediate_size: Positive = 256
    layers: Positive = 2
    heads: Positive = 4
    kv_heads: Positive = 2
    head_dim: Positive = 32
    dtype: Literal["float32", "bfloat16"] = "float32"

    def conflicts(self) -> Iterator[Conflict]:
        if self.heads % self.kv_heads:
            yield "heads", self.heads, f"must be a multiple of kv_heads ({self.kv_heads})"


class MemorySection(Section):
    """A memory as a tool, around any task: see docs/long_episodes.md."""

    turns: Annotated[int, Field(ge=0)] = 0  # turns that an episode has for it beside the task's own; 0: no memory
    longest: Annotated[int, Field(ge=2)] = 64  # tokens of an answer, at most
    notes: Positive = 64  # notes that are kept; then the oldest goes
    # of yours, module:function: token ids of notes -> a vector each; the nearest answer. Empty: those that share most words
    embed: str = ""

    def conflicts(self) -> Iterator[Conflict]:
        if self.embed and not self.turns:
            yield "embed", self.embed, "memory needs turns: set turns, or leave this out"


class ChatSection(Section):
    """A pretrained model's own words, around a task in text: see docs/tasks.md."""

    # a Hugging Face folder with a chat template, often model.path; empty: the task's closed vocabulary
    tokenizer: str = ""
    system: str = ""  # instructions that every episode begins with; empty: the template's own, if any
    response_tokens: Positive | None = None  # tokens of an answer, at most; None: as many as the task has ids for
    examples: Annotated[int, Field(ge=0)] = 0  # episodes of the task's own expert that stand before each prompt
    answer: str = ""  # regular expression (RE2): the task gets only its last match in a turn; empty: the whole turn


class TaskSection(Section):
    """What is trained on: see docs/tasks.md."""

    name: Annotated[str, Field(pattern=r"^(\w+|[\w.]+:\w+)$")] = "frozenlake"  # or module:Class of your own
    heldout_maps: Positive = 300  # distinct held-out prompts (maps, problems) to evaluate on
    dataset: str = ""  # of reasoning_gym
    # of that data set's own, `max_digits = 2` for example; of sums
    dataset_options: dict[str, int | float | bool | str] = {}
    prompt_tokens: Positive | None = None  # of reasoning_gym, at most; None: the task's own
    response_tokens: Positive | None = None  # the same for an answer
    mixture: dict[str, Annotated[float, Field(gt=0)]] = {}  # task -> its share of the prompts (name = "mixture")
    repositories: tuple[str, ...] = ()  # of repository: names, files of your own; empty: all that come with the package
    # what a time limit that ends an episode makes of it; None: what the task says, or failed
    on_timeout: TimeoutMeaning | None = None
    memory: MemorySection = MemorySection()
    chat: ChatSection = ChatSection()
    agent: AgentSection = AgentSection()  # of name = "agent"
    data: DataSection = DataSection()  # of name = "dataset"

    def conflicts(self) -> Iterator[Conflict]:
        known = (*registry.BUILT_IN, *registry.BROUGHT)
        if ":" not in self.name and self.name not in known:
            near = difflib.get_close_matches(self.name, known, n=1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            fix = f"no such task; {meant}there are: {', '.join(known)}; write your own as module:Class"
            yield "name", self.name, fix
            return
        names = sorted(self.mixture) if self.name == "mixture" else [self.name]
        if self.mixture and self.name != "mixture":
            yield "mixture", dict(self.mixture), "only for name = 'mixture'"
        if self.name == "mixture" and len(names) < 2:
            yield "mixture", dict(self.mixture), "name = 'mixture' needs two tasks or more, each with its share"
        for name in self.mixture:
            if name == "mixture" or (":" not in name and name not in registry.BUILT_IN):
                mixed = ", ".join(known for known in registry.BUILT_IN if known != "mixture")
                yield f"mixture.{name}", self.mixture[name], f"must be one of {mixed}; write your own as module:Class"
        if "reasoning_gym" not in names:
            others = [name for name in self._gym if self.name != "sums" or name != "dataset_options"]
            yield from ((name, self._gym[name], "only for name = 'reasoning_gym'") for name in others)
        elif not self.dataset:
            yield "dataset", "", "name = 'reasoning_gym' needs one, chain_sum for example"
        if self.repositories and "repository" not in names:
            yield "repositories", list(self.repositories), "only for name = 'repository'"
        if self.name != "agent" and self.agent != AgentSection():
            yield "agent", self.agent, "only for name = 'agent'"
        if self.name != "dataset" and self.data != DataSection():
            yield "data", self.data, "only for name = 'dataset'"
        if self.name == "dataset" and not self.data.file:
            yield "data.file", "", "name the data set: rows.jsonl, rows.parquet, or hf:FOLDER"
        if self.name == "dataset" and self.memory.turns:
            yield "memory", self.memory, "not for name = 'dataset', which asks once"
        if self.name == "agent" and self.memory.turns:
            yield "memory", self.memory, "not for name = 'agent': the agent keeps its own memory"
        if self.chat.tokenizer and self.name in ("agent", "dataset"):
            own = {"agent": "task.agent.tokenizer", "dataset": "task.data.tokenizer"}[self.name]
            fix = f"for tasks in text, not for name = {self.name!r}; {own} is its own"
            yield "chat.tokenizer", self.chat.tokenizer, fix
        if self.chat.tokenizer and self.memory.turns:
            yield "chat.tokenizer", self.chat.tokenizer, "not together with memory, whose words no tokenizer has"
        if not self.chat.tokenizer and self.chat != ChatSection():
            yield "chat.tokenizer", "", "name the folder of a tokenizer, or leave the rest of chat out"

    @property
    def options(self) -> dict[str, Any]:
        """What the task's class is given beside the number of held-out prompts."""
        if self.name == "mixture":
            own = {"reasoning_gym": self._gym, "repository": {"repositories": self.repositories}}
            return {"shares": self.mixture, **{name: given for name, given in own.items() if any(given.values())}}
        if self.name == "agent":
            return {"settings": self.agent}
        if self.name == "repository":
            return {"repositories": self.repositories}
        if self.name == "dataset":
            return {"settings": self.data}
        return dict(self._gym)

    @property
    def _gym(self) -> dict[str, Any]:
        given = {
            "dataset": self.dataset,
            "dataset_options": self.dataset_options,
            "prompt_tokens": self.prompt_tokens,
            "response_tokens": self.response_tokens,
        }
        return {name: value for name, value in given.items() if value}


class EvaluationSection(Section):
    """Evaluation on held-out prompts: at the start, every ``every`` steps, and at the end. A reward above 0.5 is a success."""

    every: Annotated[int, Field(ge=0)] = 0  # 0: start and end only
    prompts: Positive = 300
    samples: Positive = 1  # episodes of each prompt: success is their mean, and pass@k is said as well
    temperature: Annotated[float, Field(ge=0, le=10)] = 0.0  # 0: greedy
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0

    def conflicts(self) -> Iterator[Conflict]:
        if self.temperature:
            return
        if self.samples > 1:
            yield "samples", self.samples, "with evaluation.temperature = 0 they would be the same: give one above 0"
        if self.top_p < 1:
            yield "top_p", self.top_p, "with evaluation.temperature = 0 nothing is sampled: give one above 0"


class CheckpointSection(Section):
    """Atomic checkpoints, at the start, the end, and when ``every`` or ``minutes`` says so; the last ``keep`` stay."""

    every: Annotated[int, Field(ge=0)] = 10  # training steps; 0: by time only
    minutes: Annotated[float, Field(ge=0)] = 30.0  # minutes since the last one; 0: by steps only
    keep: Positive = 2
    keep_every: Annotated[int, Field(ge=0)] = 0  # one per this many steps is kept for good; 0: none
    # seconds for the step in progress and its checkpoint when the run is asked to end: a minute or two less than Slurm's
    # --signal or Kubernetes' terminationGracePeriodSeconds leave
    grace: PositiveSeconds = 180.0

    def conflicts(self) -> Iterator[Conflict]:
        if not self.every and not self.minutes:
            yield "every", 0, "with checkpoint.minutes = 0 there would be none: give one of the two"


class WarmupSection(Section):
    """Supervised warm-up before RL. None of its data is used in RL. ``steps = 0``: none."""

    steps: Annotated[int, Field(ge=0)] = 0
    batch_size: Positive = 64
    learning_rate: Annotated[float, Field(gt=0, lt=1)] = 1e-3
    skill: Fraction = 0.0  # chance that a demonstrated move is the expert's; 0: uniformly random moves, format only
