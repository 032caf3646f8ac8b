"""The form of a shard: one finished trajectory as columns of numbers, in an Arrow file of one row that never changes.

| column | what |
| --- | --- |
| record | the trajectory without its turns, JSON |
| token_ids | int32, turn after turn: a context that begins anew, the observation, the action |
| logprobs | of the policy's tokens alone: float32, or float64 where one of them is no float32, so that none is rounded |
| turns | how many tokens of each kind, weight versions, reward, times, the form of its routed experts |
| experts | of each turn the bytes of its routed experts; a shard without any has no such column |

The loss mask follows from the counts. Guarantees: what :func:`encode` was given is what :meth:`OpenShard.trajectory` gives
back, log-probs to the last bit; opening copies no token, the arrays are views of the buffer.
"""

from __future__ import annotations

import array
import functools
import json
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from orchestrator.api import (
    ContextStart,
    Prompt,
    RoutedExperts,
    RunError,
    SampleFacts,
    Trajectory,
    Turn,
    VersionSpans,
    merge_spans,
)

if TYPE_CHECKING:
    import pyarrow as pa

Numbers = np.ndarray[tuple[int], np.dtype[Any]]

SLICE = 1 << 12  # tokens that are taken at a time, and
_TURN = 100  # of them for a turn by itself
_RECORD = tuple(item.name for item in fields(Trajectory) if item.name != "turns")


@dataclass(frozen=True, slots=True)
class ShardContext:
    """One context of a trajectory: its turns, from the first to the one before ``end_turn``, and what is known of them unread."""

    first_turn: int
    end_turn: int
    versions: VersionSpans
    facts: SampleFacts


@functools.cache
def _turn_type() -> pa.DataType:
    import pyarrow as pa  # here: who has no shards needs none of it

    return pa.struct(
        [
            ("before", pa.int32()),  # tokens of a context that begins anew with this turn
            ("observed", pa.int32()),
            ("acted", pa.int32()),
            ("versions", pa.list_(pa.struct([("version", pa.int64()), ("count", pa.int32())]))),
            ("reward", pa.float64()),
            ("done", pa.bool_()),
            ("generate_seconds", pa.float64()),
            ("environment_seconds", pa.float64()),
            ("reason", pa.string()),  # of a context that begins anew; null: none does
            ("dropped_turns", pa.int32()),
            ("dropped_tokens", pa.int32()),
            ("experts", pa.list_(pa.int32())),  # first, layers, choices, width; null: none are known
        ]
    )


class Column(Sequence[Any]):
    """Numbers as they lie in a shard: a sequence of Python's numbers that equals the tuple of them, and NumPy's array at no
    cost."""

    __slots__ = ("_values",)

    def __init__(self, values: Numbers) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, key: int) -> Any: ...

    @overload
    def __getitem__(self, key: slice) -> tuple[Any, ...]: ...

    def __getitem__(self, key: int | slice) -> Any:
        found = self._values[key]
        return tuple(found.tolist()) if isinstance(key, slice) else found.item()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Column):
            return np.array_equal(self._values, other._values)
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self._values, dtype, copy=copy)


Encoded = tuple["pa.Buffer", tuple[ShardContext, ...]]  # a trajectory's shard, and its contexts


def encode(trajectory: Trajectory) -> Encoded:
    """All of :func:`encode_slices` at once."""
    slices = encode_slices(trajectory)
    while True:
        try:
            next(slices)
        except StopIteration as end:
            encoded: Encoded = end.value
            return encoded


def encode_slices(trajectory: Trajectory) -> Generator[None, None, Encoded]:
    """Encode a trajectory; stops whenever :data:`SLICE` tokens more are done, and, of one that long, between the steps that take
    all of it. Raises RunError where a turn's tokens, log-probs and versions differ in number."""
    import pyarrow as pa

    tokens, said, done, short = array.array("i"), array.array("d"), 0, True
    for turn in trajectory.turns:
        if not len(turn.action_ids) == len(turn.logprobs) == sum(count for _, count in turn.versions):
            raise RunError(f"trajectory {trajectory.id}: a turn's tokens, log-probs and versions differ in number")
        before = () if turn.context is None else turn.context.token_ids
        for part in (before, turn.observation_ids, turn.action_ids):
            tokens += _array(part, "i")
        done += len(before) + len(turn.observation_ids) + len(turn.action_ids) + _TURN
        if done >= SLICE:
            yield
        said += _array(turn.logprobs, "d")
        if done >= SLICE:
            done, short = 0, False
            yield
    token_ids, exact = np.frombuffer(tokens, np.int32), np.frombuffer(said, np.float64)
    with np.errstate(over="ignore"):
        logprobs: Numbers = exact.astype(np.float32)
    if not (np.array_equal(logprobs, exact) or np.array_equal(logprobs, exact, equal_nan=True)):
        logprobs = exact
    if not short:
        yield
    facts = {name: _plain(getattr(trajectory, name)) for name in _RECORD}
    if not trajectory.metrics:  # which earlier versions, that may resume from this, do not know
        del facts["metrics"]
    record = json.dumps(facts)
    columns = {
        "record": pa.array([record], pa.string()),
        "token_ids": _one_list(token_ids),
        "logprobs": _one_list(logprobs),
        "turns": pa.array([[_turn_row(turn) for turn in trajectory.turns]], pa.list_(_turn_type())),
    }
    experts = [turn.experts.data if turn.experts is not None else b"" for turn in trajectory.turns]
    if any(experts):
        columns["experts"] = pa.array([experts], pa.list_(pa.binary()))
    contexts = _contexts(trajectory.turns, token_ids, exact)
    if not short:
        yield
    batch = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    if not short:
        yield
    return sink.getvalue(), contexts


class OpenShard:
    """A shard that can be read; its arrays are views of ``data``. Raises RunError for what is none."""

    def __init__(self, data: pa.Buffer) -> None:
        import pyarrow as pa

        try:
            batch = pa.ipc.open_file(data).get_batch(0)
            self.token_ids: Numbers = batch.column("token_ids").values.to_numpy(zero_copy_only=True)
            self.logprobs: Numbers = batch.column("logprobs").values.to_numpy(zero_copy_only=True)
            self._record = batch.column("record")
            self._turns = batch.column("turns").values
            self._experts = batch.column("experts").values if "experts" in batch.schema.names else None
        except (pa.ArrowException, KeyError, ValueError) as error:
            raise RunError(f"no shard of a trajectory: {error}") from error

    def trajectory(self) -> Trajectory:
        """What was encoded; its tokens and log-probs are :class:`Column`."""
        record = json.loads(self._record[0].as_py())
        record |= {"prompt": Prompt(**record["prompt"]), "errors": tuple(record["errors"])}
        record["metrics"] = tuple((name, value) for name, value in record.get("metrics", ()))
        turns = tuple(replace(turn, experts=self._experts_of(place)) for place, turn in enumerate(self.turns()))
        return Trajectory(turns=turns, **record)

    def turns(self) -> tuple[Turn, ...]:
        """Those of :meth:`trajectory`, without routed experts."""
        return tuple(_turn_of(row, parts) for row, parts in zip(self._turns.to_pylist(), self._parts(), strict=True))

    def attached(self, turns: Sequence[Turn]) -> tuple[Turn, ...]:
        """The turns that were encoded, with the numbers that lie here in place of their own; routed experts lie here only."""
        found, at, said = [], 0, 0
        for turn in turns:
            start, seen, acted = turn.context, len(turn.observation_ids), len(turn.action_ids)
            if start is not None:
                begin, at = at, at + len(start.token_ids)
                start = replace(start, token_ids=self._tokens(begin, at))
            numbers = self._tokens(at, at + seen), self._tokens(at + seen, at + seen + acted)
            logprobs: Any = Column(self.logprobs[said : said + acted])
            times = turn.generate_seconds, turn.environment_seconds
            found.append(Turn(*numbers, logprobs, turn.versions, turn.reward, turn.done, *times, start))
            at, said = at + seen + acted, said + acted
        return tuple(found)

    def _tokens(self, begin: int, end: int) -> Any:
        return Column(self.token_ids[begin:end])

    def context(self, first: int, end: int) -> tuple[Numbers, Numbers, Numbers]:
        """Of these turns: token ids, which of them the policy's are (positions), the log-probs of those."""
        before, acted = self._counts()
        starts = np.cumsum([0, *(before + acted)])
        said = np.cumsum([0, *acted])
        own = [np.arange(starts[turn] + before[turn], starts[turn + 1]) for turn in range(first, end)]
        positions = np.concatenate([np.empty(0, np.int64), *own]) - starts[first]
        return self.token_ids[starts[first] : starts[end]], positions, self.logprobs[said[first] : said[end]]

    def experts(self, first: int, end: int) -> tuple[RoutedExperts, ...]:
        """Those that are known of these turns."""
        return tuple(found for turn in range(first, end) if (found := self._experts_of(turn)) is not None)

    def _experts_of(self, turn: int) -> RoutedExperts | None:
        form = self._turns.field("experts")[turn].as_py() if self._experts is not None else None
        if form is None:
            return None
        assert self._experts is not None
        first, layers, choices, width = form
        return RoutedExperts(first, layers, choices, width, self._experts[turn].as_py())

    def _counts(self) -> tuple[Numbers, Numbers]:
        """Of each turn, the tokens that the policy did not write in it, and those that it did."""
        count = {name: self._turns.field(name).to_numpy().astype(np.int64) for name in ("before", "observed", "acted")}
        return count["before"] + count["observed"], count["acted"]

    def _parts(self) -> Iterator[tuple[Column, Column, Column, Column]]:
        """Of each turn: what stood before it, observation, action, log-probs."""
        at = said = 0
        names = ("before", "observed", "acted")
        for counts in zip(*(self._turns.field(name).to_pylist() for name in names), strict=True):
            cuts = [at, *accumulate(counts, initial=at)][1:]
            spans = [Column(self.token_ids[begin:end]) for begin, end in pairwise(cuts)]
            yield spans[0], spans[1], spans[2], Column(self.logprobs[said : said + counts[2]])
            at, said = cuts[-1], said + counts[2]


def _with_columns(turn: Turn, parts: tuple[Any, Any, Any, Any]) -> Turn:
    before, observed, acted, logprobs = parts
    context = None if turn.context is None else replace(turn.context, token_ids=before)
    return replace(turn, observation_ids=observed, action_ids=acted, logprobs=logprobs, context=context)


def _turn_of(row: dict[str, Any], parts: tuple[Any, Any, Any, Any]) -> Turn:
    context = None
    if row["reason"] is not None:
        context = ContextStart((), row["reason"], row["dropped_turns"], row["dropped_tokens"])
    versions = tuple((span["version"], span["count"]) for span in row["versions"])
    times = row["generate_seconds"], row["environment_seconds"]
    return _with_columns(Turn((), (), (), versions, row["reward"], row["done"], *times, context), parts)


def _turn_row(turn: Turn) -> dict[str, Any]:
    start, chosen = turn.context, turn.experts
    return {
        "before": 0 if start is None else len(start.token_ids),
        "observed": len(turn.observation_ids),
        "acted": len(turn.action_ids),
        "versions": [{"version": version, "count": count} for version, count in turn.versions],
        "reward": turn.reward,
        "done": turn.done,
        "generate_seconds": turn.generate_seconds,
        "environment_seconds": turn.environment_seconds,
        "reason": None if start is None else start.reason,
        "dropped_turns": None if start is None else start.dropped_turns,
        "dropped_tokens": None if start is None else start.dropped_tokens,
        "experts": chosen and (chosen.first, chosen.layers, chosen.choices, chosen.width),
    }


def _contexts(turns: Sequence[Turn], token_ids: Numbers, logprobs: Numbers) -> tuple[ShardContext, ...]:
    starts = [index for index, turn in enumerate(turns) if index == 0 or turn.context is not None]
    found, at, said = [], 0, 0
    for first, end in pairwise([*starts, len(turns)]):
        part = turns[first:end]
        shown = [len(t.observation_ids) + (len(t.context.token_ids) if t.context is not None else 0) for t in part]
        own = [len(turn.action_ids) for turn in part]
        acted = sum(own)
        tokens = token_ids[at : at + sum(shown) + acted]
        facts = SampleFacts(
            tokens=len(tokens),
            generated=acted,
            least=int(tokens.min()) if len(tokens) else 0,
            most=int(tokens.max()) if len(tokens) else 0,
            finite=bool(np.isfinite(logprobs[said : said + acted]).all()),
            prompted=next((seen > 0 for seen, mine in zip(shown, own, strict=True) if seen + mine), False),
        )
        versions = merge_spans(span for turn in part for span in turn.versions)
        found.append(ShardContext(first, end, versions, facts))
        at, said = at + len(tokens), said + acted
    return tuple(found)


def _array(numbers: Sequence[Any], kind: str) -> array.array[Any]:
    """("i": int32, "d": float64); out of a tuple in a third of the time that NumPy takes, which is the loop's."""
    if isinstance(numbers, tuple):
        return array.array(kind, numbers)
    found = array.array(kind)
    found.frombytes(np.ascontiguousarray(numbers, kind).data.cast("B"))
    return found


def _one_list(values: Numbers) -> pa.ListArray:
    import pyarrow as pa

    return pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), pa.array(values))


def _plain(value: Any) -> Any:
    return {item.name: getattr(value, item.name) for item in fields(value)} if isinstance(value, Prompt) else value
