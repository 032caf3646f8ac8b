"""What the agent said: the stored trajectories of a run, found by task, step, reward or end, and decoded turn by turn.

Guarantees: a run is only read, while it goes on, too; a list reads no token, whatever the size of the store; one trajectory
reads the files that may hold it. A token of a trajectory is shown once, with the version of the weights that said it. Text is
what the run's tokenizer makes of the ids, control characters included: who shows it escapes it. Without a tokenizer, and with
one that cannot be read, ids are shown, and :attr:`TokenText.missing` says why.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from orchestrator.api import ConfigError
from orchestrator.api.jsontext import parse_object
from orchestrator.observe.turn_lines import parse_turn
from orchestrator.run_folder import TURNS_FILE
from orchestrator.store import NO_VERSION, PartIndex, read_trajectories

ORDERS = ("newest", "best", "worst", "longest")
LINE = (  # columns of a line of a list
    "trajectory_id", "group_id", "task", "step", "outcome", "total_reward", "total_steps", "generated_tokens",
    "total_tokens", "wall_time", "truncated", "version", "finished_at",
)  # fmt: skip
_GROUP = 1024  # members that are shown, of a group
_COMPARED = 20_000  # ids, with one that is not there
_LONGEST = 200_000  # characters of a text that are shown; the store has all
_LOOKED_AT = 512 << 20  # characters of a log that are looked through for one trajectory


@dataclass(frozen=True, slots=True)
class TrajectoryChoice:
    """Which trajectories; what is left empty does not matter. ``step``: counted from 1, as all views do (the store counts from
    0); of one that was not trained, the step that was under way when it ended. ``cause``: how it ended, the beginning of the
    store's words (``failed``, ``failed: env_timeout``, ``evicted``)."""

    task: str = ""
    step: int | None = None
    cause: str = ""
    group: str = ""
    least: float | None = None  # reward
    most: float | None = None

    def words(self) -> list[str]:
        """What it asks for, for people."""
        rewards = (
            "" if self.least is None and self.most is None else f"reward {_bound(self.least)} to {_bound(self.most)}"
        )
        said = [f"task {self.task}" if self.task else "", "" if self.step is None else f"step {self.step}", self.cause]
        return [part for part in (*said, rewards) if part]

    def expression(self) -> pc.Expression | None:
        """For a scan of the store; None: all of it."""
        parts = [pc.field(name) == value for name, value in (("task", self.task), ("group_id", self.group)) if value]
        if self.step is not None:
            parts.append(pc.field("step") == self.step - 1)
        if self.cause:
            parts.append(pc.starts_with(pc.field("outcome"), self.cause))
        if self.least is not None:
            parts.append(pc.field("total_reward") >= self.least)
        if self.most is not None:
            parts.append(pc.field("total_reward") <= self.most)
        return functools.reduce(operator.and_, parts) if parts else None

    def ranges(self) -> list[tuple[str, Any, Any]]:
        """By column, the least and the most (None: any) that a row of it has."""
        found: list[tuple[str, Any, Any]] = [("total_reward", self.least, self.most)]
        found += [] if self.step is None else [("step", self.step - 1, self.step - 1)]
        found += [("group_id", self.group, self.group)] if self.group else []
        found += [("outcome", self.cause, f"{self.cause}\U0010ffff")] if self.cause else []
        return [one for one in found if one[1:] != (None, None)]


@dataclass(frozen=True, slots=True)
class SpokenSpan:
    """Tokens of one version of the weights, one after the other. ``logprob``: their mean, None: nothing was kept."""

    text: str
    version: int
    tokens: int
    logprob: float | None


@dataclass(frozen=True, slots=True)
class ShownTurn:
    """``observation``: what was put before the policy; ``context``: why it was shown a new context, "" where it was not. Seconds:
    ``generated`` from asking to the answer, queues included; ``environment``; ``waited`` for neither, before the one or the
    other. ``waited`` and ``worker`` are None and "" where the run kept no times of its turns."""

    observation: str
    observed_tokens: int
    action: tuple[SpokenSpan, ...]
    reward: float
    generated: float
    environment: float
    waited: float | None
    worker: str
    context: str


@dataclass(frozen=True, slots=True)
class ShownTrajectory:
    """``line``: as in a list. ``group``: the lines of its group, itself among them, best first. ``gap``: the mean distance of
    engine and trainer in log-prob of its step's batch, None where it was not measured."""

    line: Mapping[str, Any]
    prompt: str
    seed: int
    errors: tuple[str, ...]
    turns: tuple[ShownTurn, ...]
    group: tuple[Mapping[str, Any], ...]
    gap: float | None
    metrics: Mapping[str, float]  # of its reward function, beside the reward


class TokenText:
    """Ids to text, by the run's tokenizer. ``missing``: why only ids can be shown, "" where text can."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.missing = ""
        self._decode: Callable[[Sequence[int]], str] = lambda ids: " ".join(map(str, ids))
        file = next((folder / "tokenizer.json" for folder in folders if (folder / "tokenizer.json").is_file()), None)
        if file is None:
            self.missing = "there is no tokenizer.json with the run's model"
            return
        try:
            data = parse_object(file.read_bytes())
            if data["model"]["type"] == "WordLevel":  # of our own tiny models: ids are words
                self._decode = _words(data["model"]["vocab"])
                return
            from tokenizers import Tokenizer

            made = Tokenizer.from_str(json.dumps(data))
            self._decode = lambda ids: str(made.decode(list(ids), skip_special_tokens=False))
        except ImportError:
            self.missing = "the package tokenizers, which vLLM and transformers bring, is not installed here"
        except Exception as error:  # noqa: BLE001  a file of others', read by a library of others'
            self.missing = f"{file} cannot be read: {error!s:.200}"

    def text(self, ids: Sequence[int]) -> str:
        """Of any length; too long a one is cut in its middle, and says so."""
        text = self._decode(ids)
        if len(text) <= _LONGEST:
            return text
        half = _LONGEST // 2
        return f"{text[:half]} [... {len(text) - 2 * half:,} characters left out ...] {text[-half:]}"


def _line(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "step": row["step"] + 1}


def _bound(value: float | None) -> str:
    return "any" if value is None else f"{value:g}"


def _words(ids: Mapping[str, int]) -> Callable[[Sequence[int]], str]:
    words = {token: word for word, token in ids.items()}
    plain = [word for word in ids if not (word.startswith("<") and word.endswith(">") and len(word) > 2)]
    joiner = "" if all(len(word) == 1 for word in plain) else " "
    return lambda sequence: joiner.join(words.get(token, f"[{token}]") for token in sequence)


@dataclass
class TrajectoryReader:
    """One run's trajectories. Raises ConfigError for a run without any."""

    folder: Path
    tokens: TokenText = field(init=False)
    _index: PartIndex = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = TokenText(_tokenizer_folders(self.folder))
        self._index = PartIndex(self._store)

    @property
    def _store(self) -> Path:
        return self.folder / "trajectories"

    def lines(
        self, chosen: TrajectoryChoice, order: str = "newest", first: int = 0, most: int = 20
    ) -> tuple[list[dict[str, Any]], int]:
        """``most`` lines from the ``first`` on, in that order, and how many pass the filter."""
        if order not in ORDERS:
            raise ConfigError("order", order, f"must be one of {', '.join(ORDERS)}")
        column, direction = {
            "newest": ("finished_at", "descending"),
            "best": ("total_reward", "descending"),  # what was never scored is neither best nor worst
            "worst": ("total_reward", "ascending"),
            "longest": ("generated_tokens", "descending"),
        }[order]
        keys = [(column, direction), ("finished_at", "descending")]
        table, total = self._index.read_first(LINE, chosen.expression(), keys, first + most, chosen.ranges())
        return [_line(row) for row in table.slice(first).to_pylist()], total

    def find(self, identity: str) -> dict[str, Any]:
        """The line of a trajectory. Raises ConfigError with the nearest ids where there is none of that name."""
        where = pc.field("trajectory_id") == identity
        parts = self._index.parts_with("trajectory_id", identity)
        lines = read_trajectories(self._store, list(LINE), where, ordered=False, parts=parts).to_pylist()
        if lines:
            return _line(max(lines, key=lambda one: one["finished_at"]))  # a run that lost a step may have it twice
        few = self._index.rows <= _COMPARED
        known = read_trajectories(self._store, ["trajectory_id"])["trajectory_id"].to_pylist() if few else []
        near = difflib.get_close_matches(identity, known, 3)
        fix = f"; did you mean {', '.join(near)}?" if near else "; `rl-coserve show RUN` lists them"
        raise ConfigError("ID", identity, f"is not a stored trajectory of {self.folder.name}{fix}")

    def read(self, line: Mapping[str, Any]) -> ShownTrajectory:
        """The trajectory of a line."""
        where = pc.field("trajectory_id") == line["trajectory_id"]
        for name, value in (("task", line["task"]), ("version", line["version"]), ("step", line["step"] - 1)):
            where = where & (pc.field(name) == value)
        parts = self._index.parts_with("group_id", line["group_id"])
        row = read_trajectories(self._store, filter=where, parts=parts).to_pylist()[-1]
        siblings = TrajectoryChoice(task=line["task"], group=line["group_id"]).expression()
        group = [_line(one) for one in read_trajectories(self._store, list(LINE), siblings, parts=parts).to_pylist()]
        group.sort(key=lambda one: -(one["total_reward"] if one["total_reward"] is not None else -float("inf")))
        return ShownTrajectory(
            line,
            row["prompt_payload"] or "",
            row["prompt_seed"],
            tuple(row["errors"]),
            self._turns(row),
            tuple(group[:_GROUP]),
            self._gap(line["step"]) if line["outcome"] == "trained" else None,
            dict(row["metrics"] or ()),
        )

    def _turns(self, row: Mapping[str, Any]) -> tuple[ShownTurn, ...]:
        times = self._times(row["trajectory_id"])
        contexts = {start["turn"]: start for start in row["contexts"] or ()}
        shown = []
        for index, turn in enumerate(row["turns"]):
            worker, waited = times.get(index, ("", None))
            start = contexts.get(index)
            shown.append(
                ShownTurn(
                    observation=self.tokens.text(turn["observation_ids"]),
                    observed_tokens=len(turn["observation_ids"]),
                    action=tuple(self._spoken(turn)),
                    reward=turn["reward_step"],
                    generated=turn["generate_seconds"],
                    environment=turn["environment_seconds"],
                    waited=waited,
                    worker=worker,
                    context="" if start is None else f"{start['reason']}: {start['dropped_turns']} turns left out",
                )
            )
        return tuple(shown)

    def _spoken(self, turn: Mapping[str, Any]) -> list[SpokenSpan]:
        said, at, before = [], 0, ""
        for span in turn["versions"]:
            end = at + span["count"]
            text = self.tokens.text(turn["action_ids"][:end])
            logprobs = turn["logprobs"][at:end]
            mean = sum(logprobs) / len(logprobs) if logprobs else None
            # what the span adds: the space between two words is in neither
            added = text[len(before) :] if text.startswith(before) else self.tokens.text(turn["action_ids"][at:end])
            said.append(SpokenSpan(added, span["version"], len(logprobs), mean))
            at, before = end, text
        if rest := turn["action_ids"][at:]:
            said.append(SpokenSpan(self.tokens.text(rest), NO_VERSION, len(rest), None))
        return said

    def _times(self, identity: str) -> dict[int, tuple[str, float]]:
        """Of each turn, its worker and the time in which it was at neither engine nor environment, where the run kept that."""
        found: dict[int, tuple[str, float]] = {}
        before = None
        for line in _lines_with(self.folder / TURNS_FILE, json.dumps(identity)):
            try:
                name, turn, worker, asked, answered, begun, ended = parse_turn(line)
            except ValueError:  # the last line, cut by a kill
                continue
            if name == identity:
                found[turn] = (worker, max(0.0, begun - answered + (0.0 if before is None else asked - before)))
                before = ended
        return found

    def _gap(self, step: int) -> float | None:
        """Of the batch of that step, as it was last trained."""
        found = None
        for line in _lines_with(self.folder / "events.jsonl", '"kind":"step"'):
            with contextlib.suppress(ValueError):
                event = parse_object(line)
                metrics = event.get("metrics")
                if event.get("kind") == "step" and event.get("step") == step - 1 and isinstance(metrics, dict):
                    gap = metrics.get("logprob_gap_mean")
                    found = gap if isinstance(gap, float) else None
        return found


def _lines_with(file: Path, part: str) -> Iterator[str]:
    """The lines of a log that hold it, as far as is looked."""
    if not file.is_file():
        return
    left = _LOOKED_AT
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            left -= len(line)
            if left < 0:
                return
            if part in line:
                yield line


def _tokenizer_folders(run: Path) -> list[Path]:
    """Where the tokenizer of a run lies: its task's own, its model's, the tiny model's that it made."""
    try:
        config = parse_object((run / "config.json").read_bytes())
    except (OSError, ValueError):
        config = {}
    named = [
        ("task", "chat", "tokenizer"),
        ("task", "agent", "tokenizer"),
        ("task", "data", "tokenizer"),
        ("model", "path"),
    ]
    found = []
    for keys in named:
        value: Any = config
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, str) and value:
            found.append(Path(value))
    return [*found, run / "model"]
