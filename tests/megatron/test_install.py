"""The two lines: model and optimizer stay what they are, the weights get onto the relay, wrong combinations are refused."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron_rlplugin import (  # noqa: E402
    cpu,
    hookpoints,
    model,
    parallel_layout,
    tiny_model,
)
from megatron_rlplugin.flags import add_rl_args  # noqa: E402
from megatron_rlplugin.install import RLTraining, install, wrap  # noqa: E402
from megatron_rlplugin.patches import REGISTER  # noqa: E402
from megatron_rlplugin.stream import stock_schedule  # noqa: E402
from megatron_rlplugin.trainer import learner  # noqa: E402
from megatron_rlplugin.weights import hf_bridge  # noqa: E402
from orchestrator.api import ConfigError  # noqa: E402
from orchestrator.settings.trainer_settings import TrainerSettings  # noqa: E402
from orchestrator.transfer import RelayEndpoint, Subscriber  # noqa: E402
from scripts.bench.probes.megatron.trainer_probe import tiny_folder, tiny_mixture  # noqa: E402
from tests.support.forked_ranks import ForkedRank, wait_for_all  # noqa: E402
from tests.support.page_blocks import page_block  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")]
RELAY = {"job": "install", "kind": "memory", "master": "test_megatron_install"}
STREAM = "--rl-stream-training"


def parse(*words: str, **more: Any) -> argparse.Namespace:
    args = add_rl_args(argparse.ArgumentParser()).parse_args(words)
    vars(args).update(more)
    return args


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[learner.Learner]:
    """A model and its optimizer as a training script has them."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8}
    folder = tiny_model.create_qwen3(
        str(tmp_path_factory.mktemp("model") / "m"),
        **sizes,
        vocabulary=[f"w{index}" for index in range(40)],
        max_positions=32,
        dtype="float32",
        seed=3,
    )
    # Nothing prepared: a training script's model gives logits.
    yield learner.Learner(folder, TrainerSettings(), 1, "float32", prepare=lambda chunks: None)
    parallel_layout.shutdown_parallel()


def forward_step(data: Iterator[int], chunk: Any) -> tuple[Any, Any]:
    tokens = (torch.arange(8)[None] * next(data)) % 40
    logits = chunk(tokens, torch.arange(8)[None], model.causal_mask(8))

    def loss(output: Any) -> tuple[Any, Any, float]:
        total = torch.nn.functional.cross_entropy(output[0, :-1].float(), tokens[0, 1:], reduction="sum")
        return total, torch.tensor(7, dtype=torch.int), float(total.detach())

    return logits, loss


def restore(built: learner.Learner, weights: list[Any]) -> None:
    with torch.no_grad():
        for parameter, value in zip(built.parameters(), weights, strict=True):
            parameter.copy_(value)


def step(rl: RLTraining, micro_batches: Any) -> Any:
    return rl.step(forward_step, micro_batches, seq_length=8, micro_batch_size=1)


def test_streamed_or_not_a_step_reports_and_changes_the_same(built: learner.Learner) -> None:
    start = built.snapshot()
    found = []
    for words in ((), (STREAM,), (STREAM, "--rl-grad-offload")):
        restore(built, start)
        built.reset_optimizer()
        built.advance_schedule()
        rl = wrap(built.chunks, built.optimizer, parse(*words))
        assert rl.model == built.chunks
        assert rl.optimizer is built.optimizer
        result, reports = step(rl, iter([1, 2, 3]))
        assert result.taken
        found.append((result, reports, [value.tolist() for value in built.snapshot()]))
    assert found[0] == found[1] == found[2]
    assert found[0][0].denominator == 21
    assert found[0][2] != [value.tolist() for value in start]
    restore(built, start)


def test_weights_are_published_bit_for_bit(built: learner.Learner, tmp_path: Path) -> None:
    (tmp_path / "relay.json").write_text(json.dumps(RELAY))
    rl = wrap(built.chunks, built.optimizer, parse("--rl-weight-relay", str(tmp_path / "relay.json")))
    for version in (4, 5):
        result = rl.publish(version)
        assert result is not None
        assert result.version == version
    subscriber = Subscriber(RelayEndpoint.from_dict(RELAY))
    assert subscriber.latest_version() == 5
    fetched = {key.tensor: bytes(data) for key, data in subscriber.fetch(subscriber.manifest(5))}
    assert fetched == {name: value.numpy().tobytes() for name, value in hf_bridge.export_hf(built.chunks)}
    assert all(len(data) > 0 for data in fetched.values())
    subscriber.close()
    rl.close()
    rl.close()


class Converter:
    """A stand-in for Megatron-Bridge's ``AutoBridge``, by its public interface."""

    def export_hf_weights(self, model: list[Any], cpu: bool = False, show_progress: bool = True) -> Any:
        yield "language_model.scale", torch.full((3, 2), 2.5)
        yield from hf_bridge.export_hf(model)


def test_weights_are_published_as_a_converter_names_them(built: learner.Learner, tmp_path: Path) -> None:
    relay = RELAY | {"job": "converted"}
    (tmp_path / "relay.json").write_text(json.dumps(relay))
    args = parse("--rl-weight-relay", str(tmp_path / "relay.json"))
    rl = wrap(built.chunks, built.optimizer, args, converter=Converter())
    rl.publish(1)
    subscriber = Subscriber(RelayEndpoint.from_dict(relay))
    fetched = {key.tensor: bytes(data) for key, data in subscriber.fetch(subscriber.manifest(1))}
    subscriber.close()
    rl.close()
    assert fetched.pop("language_model.scale") == np.full(6, 2.5, dtype=np.float32).tobytes()
    assert fetched == {name: value.numpy().tobytes() for name, value in hf_bridge.export_hf(built.chunks)}
    with pytest.raises(ConfigError, match=r"^converter = 'object': must have export_hf_weights"):
        wrap(built.chunks, built.optimizer, args, converter=object())


# -- the blocks of the pages, as they stand ------------------------------------------------------------------------------


def typed(block: str, **names: Any) -> dict[str, Any]:
    """What a block makes of these names. An import that it has in a comment is done first."""
    for module in re.findall(r"# from (megatron_rlplugin[\w.]+)", block):
        names |= {name: value for name, value in vars(importlib.import_module(module)).items() if f"{name}(" in block}
    exec(compile(block, "a page", "exec"), names)
    return names


@pytest.mark.parametrize("page", ["README.md", "docs/megatron.md"])
def test_the_two_lines_of_the_page_wrap_a_model(page: str, built: learner.Learner) -> None:
    start = built.snapshot()
    parser, args = argparse.ArgumentParser(), parse(STREAM)
    names = typed(
        page_block(page, "wrap(model, optimizer, args)"),
        parser=parser,
        args=args,
        model=built.chunks,
        optimizer=built.optimizer,
    )
    assert names["parser"].parse_args([STREAM]).rl_stream_training is True
    built.advance_schedule()
    assert step(names["rl"], iter([1, 2]))[0].taken
    assert [value.tolist() for value in built.snapshot()] != [value.tolist() for value in start]
    restore(built, start)


def test_the_line_for_a_machine_without_cuda_changes_nothing_twice() -> None:
    typed(page_block("docs/megatron.md", "cpu.activate()"))
    live = list(cpu._undo)
    typed(page_block("docs/megatron.md", "cpu.activate()"))
    assert cpu._undo == live
    assert bool(live) == (not torch.cuda.is_available())


@pytest.mark.parametrize("offloads", [1, 0], ids=["offloaded between feeds", "not offloaded"])
def test_the_stream_of_the_page_takes_the_step_that_rl_step_takes(offloads: int, built: learner.Learner) -> None:
    block, start, found = page_block("docs/megatron.md", "stream.begin_step()"), built.snapshot(), []
    assert block.count("    stream.offload()") == 1
    for by_hand in (True, False):
        restore(built, start)
        built.reset_optimizer()
        built.advance_schedule()
        rl = wrap(built.chunks, built.optimizer, parse(STREAM))
        if by_hand:
            text = block if offloads else block.replace("    stream.offload()", "    pass")
            result = typed(text, rl=rl, arriving=[1, 2, 3], forward_step=forward_step, S=8, B=1)["result"]
        else:
            result, _ = step(rl, iter([1, 2, 3]))
        found.append((result.taken, result.denominator, [value.tolist() for value in built.snapshot()]))
    assert found[0] == found[1]
    assert found[0][2] != [value.tolist() for value in start]
    restore(built, start)


def test_the_converter_of_the_page_names_what_is_published(built: learner.Learner, tmp_path: Path) -> None:
    relay = RELAY | {"job": "page"}
    asked: list[str] = []
    stand_in = type("AutoBridge", (), {"from_hf_pretrained": lambda folder: asked.append(folder) or Converter()})
    names = typed(
        page_block("docs/recipes/other_model.md", "converter=bridge"),
        AutoBridge=stand_in,
        folder="mine",
        wrap=wrap,
        version=3,
        model=built.chunks,
        optimizer=built.optimizer,
        args=parse("--rl-weight-relay", json.dumps(relay)),
    )
    subscriber = Subscriber(RelayEndpoint.from_dict(relay))
    published = {key.tensor for key, _ in subscriber.fetch(subscriber.manifest(3))}
    subscriber.close()
    names["rl"].close()
    assert asked == ["mine"]
    assert "language_model.scale" in published


def test_interleaved_stages_get_an_iterator_each_and_whole_rounds(
    built: learner.Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    rl = wrap(built.chunks, built.optimizer, parse())
    monkeypatch.setattr(rl, "model", [built.model, built.model])
    monkeypatch.setattr(built.config, "pipeline_model_parallel_size", 2)
    first, second = rl._data([1, 2])
    assert (list(first), list(second)) == ([1, 2], [1, 2])
    with pytest.raises(ConfigError, match="multiple of the 2 pipeline stages"):
        rl._data([1, 2, 3])


def test_padding_of_the_vocabulary_is_not_published(built: learner.Learner, tmp_path: Path) -> None:
    """Megatron pads a vocabulary to a multiple of TP; engines have as many rows as config.json says."""
    relay = {**RELAY, "job": "padded", "master": "test_padded_vocabulary"}
    words = ("--rl-weight-relay", json.dumps(relay))
    rl = wrap(built.chunks, built.optimizer, parse(*words, "--rl-vocab-size", "37"))
    try:
        rl.publish(1)
        whole = dict(hf_bridge.export_hf(built.chunks))
        subscriber = Subscriber(RelayEndpoint.from_dict(relay))
        fetched = {
            key.tensor: (key.global_shape, bytes(data)) for key, data in subscriber.fetch(subscriber.manifest(1))
        }
        subscriber.close()
    finally:
        rl.close()
        wrap(built.chunks, built.optimizer, parse())  # no padding again
    embedding = model.unwrap(built.model).embedding.word_embeddings.weight.detach()
    assert embedding.shape[0] == 40
    shape, data = fetched["model.embed_tokens.weight"]
    assert shape[0] == 37
    assert data == embedding[:37].numpy().tobytes()
    assert whole["model.embed_tokens.weight"].shape[0] == 37
    for wrong in ("0", "41"):
        with pytest.raises(ConfigError, match="--rl-vocab-size"):
            wrap(built.chunks, built.optimizer, parse("--rl-vocab-size", wrong))


def test_a_parameter_that_publish_would_not_know_is_told_when_the_model_is_wrapped(built: learner.Learner) -> None:
    layer = model.unwrap(built.chunks[0]).decoder.layers[0]
    layer.adapter = torch.nn.Linear(2, 2, bias=False)
    try:
        with pytest.raises(ConfigError, match=r"adapter\.weight.*the bridge knows no Hugging Face place"):
            wrap(built.chunks, built.optimizer, parse("--rl-weight-relay", json.dumps(RELAY)))
        wrap(built.chunks, built.optimizer, parse())  # nothing is published
    finally:
        del layer.adapter


def test_heads_that_publish_could_not_cut_are_told_when_the_model_is_wrapped(
    built: learner.Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(built.config, "num_query_groups", 1)  # as where tensor-parallel ranks share a head
    with pytest.raises(
        ConfigError, match=r"^model = '.*layers\.0\.self_attn\.q_proj\.weight': .*multiple of tensor parallelism"
    ):
        wrap(built.chunks, built.optimizer, parse("--rl-weight-relay", json.dumps(RELAY)))
    wrap(built.chunks, built.optimizer, parse())  # nothing is published


def test_publishing_without_a_relay_is_refused(built: learner.Learner) -> None:
    with pytest.raises(ConfigError, match="--rl-weight-relay"):
        wrap(built.chunks, built.optimizer, parse()).publish(1)


def test_a_model_as_megatron_sets_it_up_is_synchronised_all_the_same(built: learner.Learner) -> None:
    """Megatron-LM's ``setup_model_and_optimizer`` leaves this unset; its own ``train()`` sets it."""
    finalize = built.config.finalize_model_grads_func
    built.config.finalize_model_grads_func = None
    try:
        rl = wrap(built.chunks, built.optimizer, parse())
        assert step(rl, iter([1]))[0].taken
        assert built.config.finalize_model_grads_func is finalize
    finally:
        built.config.finalize_model_grads_func = finalize


def test_a_source_that_fails_leaves_the_next_step_whole(built: learner.Learner) -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise OSError("the queue is gone")

    rl = wrap(built.chunks, built.optimizer, parse(STREAM))
    with pytest.raises(OSError, match="the queue is gone"):
        step(rl, broken())
    result, _ = step(rl, iter([1, 2]))
    assert result.taken
    assert result.denominator == 14  # of the two alone


def test_a_gradient_that_is_not_finite_is_not_taken(built: learner.Learner) -> None:
    def broken(data: Iterator[int], chunk: Any) -> tuple[Any, Any]:
        output, loss = forward_step(data, chunk)
        return output, lambda value: (loss(value)[0] * np.inf, *loss(value)[1:])

    checks = [chunk.ddp_config for chunk in built.chunks]
    for words in ((), (STREAM,)):
        for ddp_config in checks:
            ddp_config.check_for_nan_in_grad = True  # Megatron-LM's default, which raises on one rank alone
        rl = wrap(built.chunks, built.optimizer, parse(*words))
        before = [value.tolist() for value in built.snapshot()]
        result, _ = rl.step(broken, iter([1]), seq_length=8, micro_batch_size=1)
        assert not result.taken
        assert "finite" in result.reason
        assert [value.tolist() for value in built.snapshot()] == before


def test_without_streaming_a_replica_needs_a_micro_batch(built: learner.Learner) -> None:
    with pytest.raises(ConfigError, match="micro_batches"):
        step(wrap(built.chunks, built.optimizer, parse()), [])


# Two replicas that share experts; rank 1 has a micro-batch less, then as many.
IN_STEP = """
import json, sys, torch
from megatron_rlplugin import hookpoints
from megatron_rlplugin.install import wrap
from megatron_rlplugin.trainer.learner import Learner, Rendezvous
from orchestrator.api import ConfigError
from orchestrator.settings.trainer_settings import TrainerSettings
from tests.megatron.test_install import STREAM, parse, step
rank, folder, meet = int(sys.argv[1]), sys.argv[2], sys.argv[3]
settings = TrainerSettings(data_parallel=2, expert_parallel=2)
built = Learner(folder, settings, 4, "float32", Rendezvous(rank, 2, meet), prepare=lambda chunks: None)
said = []
for words in ((), (STREAM,)):
    built.advance_schedule()
    rl = wrap(built.chunks, built.optimizer, parse(*words))
    try:
        step(rl, [1, 2, 3][: 3 - rank])
    except ConfigError as error:
        said.append(str(error))
    result, _ = step(rl, [1, 2])
    said.append([result.taken, result.denominator])
print(json.dumps(said))
"""


def test_replicas_that_share_experts_and_have_different_counts_are_told_and_do_not_hang(tmp_path: Path) -> None:
    words = (tiny_mixture(tmp_path / "m"), f"file://{tmp_path / 'meet'}")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ended = wait_for_all([ForkedRank("-c", IN_STEP, str(rank), *words, env=environment) for rank in range(2)], 120)
    for rank, one in enumerate(ended):
        assert one.code == 0, one.err
        stock, taken, streamed, again = json.loads(one.out.splitlines()[-1])
        assert stock.startswith(
            f"micro_batches = {3 - rank}: must be equal on all replicas that share experts, but 2 to 3 were given"
        )
        assert streamed.startswith(
            f"micro_batches = {1 - rank}: must be equal on all replicas that share experts, but 0 to 1 were given"
        )
        assert taken == again == [True, 28.0]


# Two replicas, of which Megatron overlaps something with the passes, or nothing; steps with different numbers of micro-batches.
OVERLAPPED = """
import hashlib, json, sys
from megatron_rlplugin import hookpoints
from megatron_rlplugin.install import wrap
from megatron_rlplugin.megatron_options import sort_options
from megatron_rlplugin.trainer.learner import Learner, Rendezvous
from orchestrator.settings.trainer_settings import TrainerSettings
from orchestrator.transfer import RelayEndpoint, Subscriber
from tests.megatron.test_install import parse, step
rank, (folder, meet, place, option) = int(sys.argv[1]), sys.argv[2:]
settings = TrainerSettings(data_parallel=2, distributed_optimizer=True)
said = []
for on in (False, True):
    relay = {"job": str(on), "kind": "fsspec", "master": f"file://{place}", "metadata": f"{place}.sqlite"}
    where = Rendezvous(rank, 2, meet)
    built = Learner(
        folder, settings, 4, "float32", where, options=sort_options({option: on}), prepare=lambda chunks: None
    )
    for chunk in built.chunks:
        if chunk.use_forward_hook:
            chunk.enable_forward_pre_hook()  # as Megatron leaves it: a learner streams, and has taken the hooks out
    rl = wrap(built.chunks, built.optimizer, parse("--rl-weight-relay", json.dumps(relay)))
    for version, count in enumerate((1, 3, 2)):
        built.advance_schedule()
        result, _ = step(rl, [1 + rank + number for number in range(count)])
        rl.publish(version)
        subscriber = Subscriber(RelayEndpoint.from_dict(relay))
        found = sorted((key.tensor, key.start, bytes(data)) for key, data in subscriber.fetch(subscriber.manifest(version)))
        subscriber.close()
        said.append([result.taken, result.denominator, hashlib.sha256(repr(found).encode()).hexdigest()])
    rl.close()
print(json.dumps(said))
"""


@pytest.mark.parametrize("option", ["overlap_grad_reduce", "overlap_param_gather"])
def test_what_megatron_overlaps_changes_neither_the_steps_nor_what_is_published(option: str, tmp_path: Path) -> None:
    words = (str(tmp_path / "m"), f"file://{tmp_path / 'meet'}", str(tmp_path / "relay"), option)
    tiny_folder(words[0], vocabulary=[f"w{index}" for index in range(40)])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ended = wait_for_all([ForkedRank("-c", OVERLAPPED, str(rank), *words, env=environment) for rank in range(2)], 120)
    for one in ended:
        assert one.code == 0, one.err
        said = json.loads(one.out.splitlines()[-1])
        assert [taken for taken, *_ in said] == [True] * 6
        assert said[:3] == said[3:]


def test_a_stock_step_of_a_model_whose_loss_is_a_mean_of_micro_batches_is_refused(
    built: learner.Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(built.config, "calculate_per_token_loss", False)  # Megatron's default
    with pytest.raises(ConfigError, match=r"^model\.calculate_per_token_loss = False: .*mean is of micro-batches"):
        step(wrap(built.chunks, built.optimizer, parse()), iter([1, 2]))
    assert step(wrap(built.chunks, built.optimizer, parse(STREAM)), iter([1, 2]))[0].denominator == 14


# -- stock pretrain() ------------------------------------------------------------------------------------------------

NEEDED = {"calculate_per_token_loss": True, "accumulate_allreduce_grads_in_fp32": True}


def test_not_asked_for_nothing_is_patched() -> None:
    assert install(parse()) is False
    assert not any(REGISTER.status().values())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"calculate_per_token_loss": False}, "--calculate-per-token-loss = False"),
        ({"accumulate_allreduce_grads_in_fp32": False}, "--accumulate-allreduce-grads-in-fp32 = False"),
        ({"overlap_param_gather": True}, "--overlap-param-gather = True"),
        ({"use_torch_fsdp2": True}, "--use-torch-fsdp2 = True"),
        ({"cuda_graph_impl": "full_iteration"}, "--cuda-graph-impl = 'full_iteration'"),
        ({"rl_grad_offload": True}, "--rl-grad-offload = True"),
    ],
)
def test_what_would_be_wrong_or_ignored_is_refused_before_anything_is_patched(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        install(parse(STREAM, **(NEEDED | changes)))
    assert not any(REGISTER.status().values())


def test_a_megatron_without_pretrain_or_untested_is_refused() -> None:
    """The 0.16.1 wheel has no megatron.training, and the patch was not run on it."""
    with pytest.raises(ConfigError, match=r"megatron\.training = 'not installed'"):
        install(parse(STREAM, **NEEDED))
    with pytest.raises(ConfigError, match=r"patch stream_training = 'Megatron-Core 0\.16"):
        REGISTER.apply("stream_training")
    assert not any(REGISTER.status().values())


@pytest.mark.parametrize(
    ("name", "value"), [("moe_z_loss_coeff", 1e-3), ("moe_aux_loss_coeff", [0.0, 0.01]), ("mtp_num_layers", 1)]
)
def test_losses_by_tokens_are_refused_where_the_mean_is_by_trajectories(
    built: learner.Learner, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    monkeypatch.setattr(built.config, name, value, raising=False)
    for words in ((), ("--rl-objective", "rloo"), ("--rl-loss", "sequence-sum")):
        with pytest.raises(ConfigError, match=rf"^model.{name} = .*averages over trajectories"):
            wrap(built.chunks, built.optimizer, parse(*words))
    wrap(built.chunks, built.optimizer, parse("--rl-loss", "token-mean"))


def test_gradients_that_a_recorded_graph_writes_are_not_moved(
    built: learner.Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(built.config, "cuda_graph_impl", "local")
    wrap(built.chunks, built.optimizer, parse(STREAM))
    with pytest.raises(ConfigError, match=r"^model.cuda_graph_impl = 'local': must be none if gradients are offloaded"):
        wrap(built.chunks, built.optimizer, parse(STREAM, "--rl-grad-offload"))


def test_gradients_leave_the_device_only_for_pauses_longer_than_the_move(
    built: learner.Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, moves = [0.0], []
    monkeypatch.setattr("megatron_rlplugin.install.time", type("Clock", (), {"perf_counter": lambda: clock[0]}))
    rl = wrap(built.chunks, built.optimizer, parse(STREAM, "--rl-grad-offload"))
    assert rl.stream is not None
    original = rl.stream.offload

    def offload() -> None:
        moves.append(clock[0])
        clock[0] += 5.0
        original()

    def waiting() -> Iterator[int]:
        for number, pause in enumerate((0.0, 1.0, 20.0, 4.0, 6.0), 1):
            clock[0] += pause
            yield number

    monkeypatch.setattr(rl.stream, "offload", offload)
    assert step(rl, waiting())[0].taken
    assert moves == [0.0, 26.0, 41.0]  # unknown at first; then after a pause of 20 s and one of 6, not of 1 or 4


def test_a_pipeline_is_filled_several_times_a_feed(built: learner.Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stock_schedule.feed_size(built.chunks) == 1
    monkeypatch.setattr(built.config, "pipeline_model_parallel_size", 4)
    size = stock_schedule.feed_size(built.chunks)
    assert size % 4 == 0  # whole rounds of an interleaved schedule
    assert 3 / (size + 3) < 0.16  # the part of a feed in which a stage idles; 0.43 with four


@pytest.mark.parametrize(("total", "fed"), [(3, [3]), (8, [8]), (40, [16, 24])])
def test_a_stock_training_step_fills_a_pipeline_several_times_a_feed(
    built: learner.Learner, monkeypatch: pytest.MonkeyPatch, total: int, fed: list[int]
) -> None:
    parts: list[int] = []

    class Stream:
        def __init__(self, *built: object) -> None: ...

        def begin_step(self) -> None: ...

        def merge_gradients(self) -> None: ...

        def feed(self, *, num_microbatches: int) -> list[int]:
            parts.append(num_microbatches)
            return [num_microbatches]

    monkeypatch.setattr(stock_schedule, "GradientStream", Stream)
    monkeypatch.setattr(built.config, "pipeline_model_parallel_size", 4)
    schedule = stock_schedule.streamed_schedule(lambda **_: pytest.fail("the stock function has this step"))
    assert schedule(model=built.chunks, num_microbatches=total) == fed
    assert parts == fed


def test_a_megatron_whose_interfaces_moved_is_refused_before_anything_of_it_is_touched(
    built: learner.Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(hookpoints.HOOK_POINTS, "megatron.core.optimizer:get_megatron_optimizer", ("config", "gone"))
    with pytest.raises(ConfigError, match="get_megatron_optimizer"):
        wrap(built.chunks, built.optimizer, parse())
