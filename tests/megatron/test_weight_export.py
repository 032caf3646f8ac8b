"""Every weight is exported once, by one rank, without gathering; the changes of a step give the new weights bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from megatron_rlplugin.weights.step_changes import StepChanges, WeightEdits  # noqa: E402
from megatron_rlplugin.weights.weight_export import as_bytes, converted_shards, own_parts  # noqa: E402
from orchestrator.api import ConfigError, ShardKey  # noqa: E402
from scripts.bench.probes.megatron import export_probe  # noqa: E402
from tests.support.forked_ranks import first_of_ranks  # noqa: E402

CASES = [case.name for case in export_probe.CASES]


@pytest.fixture(scope="module")
def figures() -> dict[str, dict[str, Any]]:
    """What the ranks found, case by case."""
    found: dict[str, dict[str, Any]] = {}
    for world in (1, 2, 4):
        words = [word for case in export_probe.chosen([], [world]) for word in ("--case", case.name)]
        answers = first_of_ranks(world, ["-m", "scripts.bench.probes.megatron.export_probe"], words)
        found |= {answer["case"]: answer for answer in answers}
    return found


@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_every_element_is_exported_exactly_once_and_is_the_gathered_one(
    figures: dict[str, dict[str, Any]], case: str
) -> None:
    found = figures[case]
    assert found["elements"] > 100_000
    assert found["not_once"] == 0
    assert found["wrong_values"] == 0


@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_the_changes_of_two_steps_make_the_old_weights_the_new_ones(
    figures: dict[str, dict[str, Any]], case: str
) -> None:
    found = figures[case]
    assert found["wrong_before"] > found["elements"] // 2
    assert found["wrong_after"] == 0


@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_beside_the_model_there_is_one_bucket_and_one_piece(figures: dict[str, dict[str, Any]], case: str) -> None:
    found = figures[case]
    assert 0 < found["peak_bytes"] <= found["bound_bytes"]
    if "fp32" in case:  # where every tensor is cast, keeping all of them is what the meter must see
        assert found["peak_bytes_kept"] > found["bound_bytes"]


@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_replicas_divide_the_bytes_evenly(figures: dict[str, dict[str, Any]], case: str) -> None:
    found = figures[case]
    # Tensors are cut at the size of a bucket, so shares differ by less than one for each kind of replication.
    assert max(found["bytes_by_rank"]) - min(found["bytes_by_rank"]) < 3 * 4096


@dataclass
class Held:
    """What ``own_parts`` reads of a piece."""

    name: str
    shape: tuple[int, ...]
    dim: int
    start: int
    stop: int
    replicated: tuple[str, ...]
    holder: tuple[int, int]
    expert: bool = False


@settings(max_examples=200)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=12),
    holders=st.integers(1, 5),
    cut=st.sampled_from([-1, 0, 1]),
    bucket_bytes=st.integers(1, 900),
)
def test_holders_of_the_same_pieces_divide_them_without_gap_or_overlap(
    shapes: list[tuple[int, int]], holders: int, cut: int, bucket_bytes: int
) -> None:
    def held(rank: int) -> list[Any]:
        return [
            Held(f"t{i}", shape, cut, 0, shape[max(cut, 0)], ("dp",), (rank, holders)) for i, shape in enumerate(shapes)
        ]

    rows = [torch.zeros(shape[max(cut, 0)], dtype=torch.int32) for shape in shapes]
    loads = []
    for rank in range(holders):
        parts = own_parts(held(rank), 2, bucket_bytes)
        assert parts == sorted(parts, key=lambda part: (part.piece, part.start))
        loads.append(sum(part.bytes for part in parts))
        for part in parts:
            row = 2 * shapes[part.piece][1 if max(cut, 0) == 0 else 0]
            assert part.bytes <= max(bucket_bytes, row)
            rows[part.piece][slice(None) if part.dim < 0 else slice(part.start, part.stop)] += 1
    assert all(bool((count == 1).all()) for count in rows)
    largest = max(bucket_bytes, *(2 * max(shape) for shape in shapes))
    assert max(loads) - min(loads) <= largest


def test_a_bucket_of_no_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match="bucket_bytes"):
        own_parts([], 2, 0)


@given(
    versions=st.integers(1, 5).flatmap(
        lambda steps: st.lists(st.tuples(*[st.integers(-32768, 32767)] * (steps + 1)), min_size=1, max_size=9)
    )
)
def test_steps_make_the_weights_what_they_are_whatever_the_bits(versions: list[tuple[int, ...]]) -> None:
    """Of two shards; one of the steps is not to be known of."""
    steps = torch.tensor(list(zip(*versions, strict=True)), dtype=torch.int16).view(torch.bfloat16)
    shards = {name: steps[0].clone() for name in ("t", "u")}
    keys = {name: ShardKey(name, -1, 0, 0, (len(versions),), "bfloat16", "raw", 0) for name in shards}
    changes = StepChanges(lambda: ((keys[name], value) for name, value in shards.items()))
    with changes.watch_step():
        shards["u"].zero_()
    assert not changes.known
    changes.restart()
    before = {name: as_bytes(value)[2].copy() for name, value in shards.items()}
    edits = WeightEdits()
    for number in range(1, len(steps)):
        with changes.watch_step():
            shards["t"].copy_(steps[number])
        if number % 2:
            edits.extend(changes.take())
    edits.extend(changes.take())
    assert changes.known
    for name, value in shards.items():
        assert edits.applied((name, 0), before[name]).tobytes() == as_bytes(value)[2].tobytes()
    assert edits.applied(("u", 0), before["u"]) is before["u"]


def test_what_a_step_that_failed_changed_is_not_known() -> None:
    weight = torch.zeros(4)
    changes = StepChanges(lambda: iter([(ShardKey("t", -1, 0, 0, (4,), "float32", "raw", 0), weight)]))
    changes.restart()

    def fail() -> None:
        with changes.watch_step():
            weight.add_(1)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not changes.known


class Converter:
    """A stand-in for Megatron-Bridge's ``AutoBridge``, by its public interface; the real one was never run."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self.tensors, self.given = tensors, 0

    def export_hf_weights(self, model: Any, cpu: bool = False, show_progress: bool = True) -> Any:
        assert isinstance(model, list)
        assert not show_progress
        for item in self.tensors.items():
            self.given += 1
            yield item


@given(
    rows=st.lists(st.integers(1, 40), min_size=1, max_size=9),
    ranks=st.integers(1, 4),
    bucket_bytes=st.integers(1, 400),
)
def test_a_converters_tensors_are_exported_once_whoever_asks(rows: list[int], ranks: int, bucket_bytes: int) -> None:
    tensors = {f"t{i}": torch.arange(3.0 * count).view(count, 3) for i, count in enumerate(rows)} | {
        "s": torch.ones(())
    }
    found = {name: torch.full_like(value, torch.nan) for name, value in tensors.items()}
    for rank in range(ranks):
        converter, filled = Converter(tensors), {}
        for key, value in converted_shards(converter, ["chunk"], rank, ranks, bucket_bytes=bucket_bytes):
            assert key.global_shape == tuple(tensors[key.tensor].shape)
            part = found[key.tensor] if key.dim < 0 else found[key.tensor][key.start : key.stop]
            assert torch.isnan(part).all(), "sent twice"
            part.copy_(value)
            filled[key.bucket] = filled.get(key.bucket, 0) + value.nbytes
        assert converter.given == len(tensors), "every rank takes every tensor: gathering is collective"
        assert max(filled.values(), default=0) <= max(bucket_bytes, 12)
    assert all(torch.equal(found[name], value) for name, value in tensors.items())
