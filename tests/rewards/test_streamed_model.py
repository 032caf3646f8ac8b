"""The judge whose layers are streamed: the same bits as fully resident, in the memory that was planned."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.policies.serving.judge_residency import JudgeMemory, plan_residency, spread_layers
from scripts.bench.papers.rollpacker_requests import pass_seconds
from vllm_rlplugin.judge import streamed_model
from vllm_rlplugin.judge.layer_store import ALIGN, HostLayers, ThreadMover, make_layout
from vllm_rlplugin.judge.streamed_model import JudgeQuestion, StreamedModel, padded_tokens

LAYERS, VOCABULARY = 6, 97
PROMPT = [5, 17, 80, 3, 3, 41, 9]


def qwen(seed: int = 1) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config).float().eval()


@pytest.fixture(scope="module")
def expected() -> tuple[torch.Tensor, torch.Tensor, list[int], list[int]]:
    """Of the stock model, never streamed: logits of one and of a batch, greedy and sampled tokens."""
    model = qwen()
    ids = torch.tensor([PROMPT])
    batch = torch.arange(24).view(3, 8) * 4 % VOCABULARY
    with torch.inference_mode():
        logits = model(input_ids=ids).logits
        batched = model(input_ids=batch).logits
    resident = StreamedModel(model)
    assert resident.residency.resident == LAYERS
    assert torch.equal(resident.forward(ids).logits, logits)
    return logits, batched, resident.generate(PROMPT, 8), resident.generate(PROMPT, 8, temperature=1.0, seed=3)


@pytest.mark.parametrize(
    ("resident", "buffers", "in_file"),
    [(0, 1, False), (0, 2, True), (0, 3, False), (3, 2, False), (5, 2, True), (6, 2, False)],
)
def test_streamed_layers_give_the_same_bits_as_resident_ones(
    expected: Any, resident: int, buffers: int, in_file: bool, tmp_path: Path
) -> None:
    judge = StreamedModel(qwen(), file=tmp_path / "layers" if in_file else None, buffers=buffers)
    judge.arrange(spread_layers(judge.memory, 10, resident, buffers))
    for _ in range(2):
        assert torch.equal(judge.forward(torch.tensor([PROMPT])).logits, expected[0])
    assert torch.equal(judge.forward(torch.arange(24).view(3, 8) * 4 % VOCABULARY).logits, expected[1])
    assert judge.generate(PROMPT, 8) == expected[2]
    assert judge.generate(PROMPT, 8, temperature=1.0, seed=3) == expected[3]
    streamed_layers = LAYERS - resident
    used = min(buffers, streamed_layers)
    assert judge.counts.copies == judge.counts.passes * streamed_layers + used, (
        "each once a pass, and the next ones at hand"
    )
    assert judge.counts.bytes == judge.counts.copies * judge.memory.layer
    judge.close()


def test_no_more_layers_are_on_the_device_than_were_planned(expected: Any) -> None:
    judge = StreamedModel(qwen(), buffers=2)
    seen: list[tuple[int, int]] = []

    def look(*_: Any) -> None:
        pointed = sum(all(p.data.numel() for p in layer.parameters()) for layer in judge._layers)
        seen.append((pointed, len(judge._kept)))

    for layer in judge._layers:
        layer.self_attn.register_forward_pre_hook(look)
    residency = judge.fit(32, judge.memory.fixed + int(32 * judge.memory.token) + 4 * judge.memory.layer)
    assert (residency.resident, residency.buffers, len(residency.streamed)) == (2, 2, 4)
    assert torch.equal(judge.forward(torch.tensor([PROMPT])).logits, expected[0])
    assert len(seen) == LAYERS
    assert max(seen) == (3, 2), "two resident, and the one that computes"
    held = sum(flat.nbytes for flat in judge._kept.values()) + residency.buffers * judge.memory.layer
    assert held + judge.memory.fixed + int(32 * judge.memory.token) == residency.bytes


def test_residency_follows_length_and_memory_between_two_requests(expected: Any) -> None:
    judge = StreamedModel(qwen())
    free = judge.memory.fixed + int(8 * judge.memory.token) + LAYERS * judge.memory.layer
    found = []
    for tokens in (8, 9, 60, 9, 8):
        found.append(judge.fit(tokens, free).resident)
        assert judge.generate(PROMPT, 8) == expected[2]
    assert found == [6, 3, found[2], 3, 6]
    assert found[2] < 3
    before = judge.residency
    with pytest.raises(ValueError, match="bytes more than the"):
        judge.fit(10**6, free)
    assert judge.residency == before
    assert judge.generate(PROMPT, 8) == expected[2], "a length that does not fit changed nothing"


def test_a_pass_that_fails_half_way_does_not_disturb_the_next(expected: Any) -> None:
    judge = StreamedModel(qwen())
    judge.arrange(spread_layers(judge.memory, 10, 1))
    handle = judge._layers[3].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        judge.forward(torch.tensor([PROMPT]))
    handle.remove()
    assert torch.equal(judge.forward(torch.tensor([PROMPT])).logits, expected[0])


class SlowMover(ThreadMover):
    """Copies only while somebody lets it: shows what was asked for ahead of time."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__(count, size)
        self.gate = threading.Event()
        self.asked = 0
        self.waited: list[int] = []

    def fill(self, source: torch.Tensor, buffer: int) -> None:
        self.asked += 1

        def copy() -> None:
            assert self.gate.wait(30)
            self._buffers[buffer].copy_(source)

        self._filling[buffer] = self._thread.submit(copy)

    def wait(self, buffer: int) -> torch.Tensor:
        self.waited.append(self.asked)
        self.gate.set()
        return super().wait(buffer)


def test_the_next_layers_are_on_their_way_while_one_computes(monkeypatch: pytest.MonkeyPatch, expected: Any) -> None:
    made: list[SlowMover] = []

    def mover(count: int, size: int, _: torch.device) -> SlowMover:
        made.append(SlowMover(count, size))
        return made[-1]

    monkeypatch.setattr(streamed_model, "make_mover", mover)
    judge = StreamedModel(qwen(), buffers=2)
    judge.arrange(spread_layers(judge.memory, 10, 0, 2))
    assert torch.equal(judge.forward(torch.tensor([PROMPT])).logits, expected[0])
    assert made[-1].waited == [2, 3, 4, 5, 6, 7], "one ahead of the layer that is waited for, at every layer"


def test_a_layers_tensors_are_laid_out_without_overlap(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(5, dtype=torch.float32),
        "b": torch.ones(3, 7, dtype=torch.bfloat16),
        "c": torch.zeros(1),
    }
    slots, size = make_layout(tensors)
    assert [slot.offset for slot in slots.values()] == [0, ALIGN, 2 * ALIGN]
    assert size == 3 * ALIGN
    for file in (None, tmp_path / "shared"):
        host = HostLayers([tensors, {"a": tensors["a"] + 1}], file)
        assert (len(host), host.layer_bytes) == (2, size)
        assert all(torch.equal(host.slots[0][name].view(host.flat(0)), tensor) for name, tensor in tensors.items())
        assert torch.equal(host.slots[1]["a"].view(host.flat(1)), tensors["a"] + 1)
    assert (tmp_path / "shared").stat().st_mode & 0o077 == 0


# The policy.

SIZES = st.builds(
    JudgeMemory,
    st.integers(1, 80),
    st.integers(0, 10**9),
    st.integers(1, 10**9),
    st.floats(0, 1e6),
    st.integers(0, 10**9),
)


@given(SIZES, st.integers(0, 10**5), st.integers(0, 2 * 10**11), st.integers(1, 4))
def test_what_is_planned_fits_and_is_as_much_as_fits(judge: JudgeMemory, tokens: int, free: int, buffers: int) -> None:
    least = judge.fixed + judge.reserve + int(judge.token * tokens)
    try:
        found = plan_residency(judge, tokens, free, buffers)
    except ValueError:
        assert least + min(buffers, judge.layers) * judge.layer > free
        return
    assert found.bytes <= free
    assert found.bytes == least + (found.resident + found.buffers) * judge.layer
    assert sorted(set(found.streamed)) == list(found.streamed)
    assert all(0 <= index < judge.layers for index in found.streamed)
    if found.streamed:
        assert found.buffers == min(buffers, len(found.streamed))
        assert least + judge.layers * judge.layer > free, "streams only where all would not fit"


@given(SIZES, st.integers(0, 10**5), st.integers(0, 2 * 10**11), st.integers(0, 10**10), st.integers(0, 10**4))
def test_more_memory_or_a_shorter_sequence_never_means_fewer_resident_layers(
    judge: JudgeMemory, tokens: int, free: int, more: int, fewer: int
) -> None:
    try:
        found = plan_residency(judge, tokens, free)
    except ValueError:
        return
    assert plan_residency(judge, tokens, free + more).resident >= found.resident
    assert plan_residency(judge, max(0, tokens - fewer), free).resident >= found.resident


def gaps(streamed_layers: Sequence[int], layers: int) -> list[int]:
    places = [*streamed_layers, streamed_layers[0] + layers]
    return [after - before for before, after in itertools.pairwise(places)]


@given(st.integers(1, 100), st.data())
def test_streamed_layers_are_spread_evenly_round_the_model(layers: int, data: Any) -> None:
    resident = data.draw(st.integers(0, layers - 1))
    found = spread_layers(JudgeMemory(layers, 0, 1, 0.0), 0, resident)
    distances = gaps(found.streamed, layers)
    assert max(distances) - min(distances) <= 1


def test_transfers_hide_behind_computation_as_far_as_they_can() -> None:
    judge = JudgeMemory(28, 0, 1, 0.0)
    assert pass_seconds(spread_layers(judge, 0, 28), 1.0, 5.0) == 28.0
    assert pass_seconds(spread_layers(judge, 0, 0), 1.0, 0.5) == pytest.approx(28.5), (
        "only the first transfer is waited for"
    )
    slow = pass_seconds(spread_layers(judge, 0, 0), 1.0, 4.0, passes=10) / 10
    assert slow == pytest.approx(4.0 * 28, rel=0.01), "the link is the limit"
    assert pass_seconds(spread_layers(judge, 0, 21), 1.0, 4.0, passes=10) / 10 == pytest.approx(28.0, rel=0.02), (
        "a quarter streams free"
    )
    assert pass_seconds(spread_layers(judge, 0, 0, 1), 1.0, 1.0) == pytest.approx(56.0), "one buffer hides nothing"
    with pytest.raises(ValueError, match="28 layers"):
        spread_layers(judge, 0, 29)
    with pytest.raises(ValueError, match="at least one"):
        plan_residency(judge, 0, 0, 0)


QUESTIONS = [
    JudgeQuestion([(7 * at + 3 * number) % VOCABULARY for at in range(3 + number % 5)], 4 + number % 6, seed=number)
    for number in range(40)
]


@pytest.mark.parametrize("resident", [0, 3, LAYERS])
def test_a_batch_says_what_each_question_says_alone_and_brings_each_layer_once_a_pass_for_all(resident: int) -> None:
    judge = StreamedModel(qwen())
    judge.arrange(spread_layers(judge.memory, 10, resident))
    alone = [judge.generate_batch([one], frozenset({3}))[0] for one in QUESTIONS]
    assert len({len(said) for said in alone}) > 3, "they end at different times"
    passes, copies = judge.counts.passes, judge.counts.copies
    assert judge.generate_batch(QUESTIONS, frozenset({3})) == alone
    assert judge.counts.passes - passes == max(map(len, alone))
    assert judge.counts.copies - copies == max(map(len, alone)) * (LAYERS - resident)


def test_sampled_answers_of_a_batch_are_each_of_its_own_seed() -> None:
    judge = StreamedModel(qwen())
    asked = [replace(one, temperature=1.0) for one in QUESTIONS[:8]]
    assert judge.generate_batch(asked) == [judge.generate_batch([one])[0] for one in asked]


def test_a_batch_has_memory_for_all_as_long_as_the_longest() -> None:
    assert padded_tokens([JudgeQuestion([1, 2], 9), JudgeQuestion([1, 2, 3, 4], 5)]) == 2 * (4 + 9)


def test_each_row_of_a_batch_counts_its_positions_from_its_own_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = StreamedModel(qwen())
    seen: list[Any] = []
    plain = judge.forward

    def noted(ids: torch.Tensor, **keywords: Any) -> Any:
        seen.append(keywords["position_ids"].tolist())
        return plain(ids, **keywords)

    monkeypatch.setattr(judge, "forward", noted)
    judge.generate_batch([JudgeQuestion([5, 6], 3), JudgeQuestion([5, 6, 7, 8], 3)])
    assert seen == [[[0, 0, 0, 1], [0, 1, 2, 3]], [[2], [4]], [[3], [5]]]
