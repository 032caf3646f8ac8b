"""The weight backend inside one vLLM worker: prefetch while generating, in-place apply, verification, fallback."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import vllm_rlplugin
from orchestrator.transfer import MemoryRelay, Publisher, RelayEndpoint
from scripts.bench.probes.vllm.recompute_probe import VOCABULARY, publish, write_tiny_qwen3
from tests.support.relay_twin import RelayTwin
from vllm_rlplugin.weights.version_agreement import find_disagreement
from vllm_rlplugin.worker.inprocess_engine import prepare_process

pytestmark = pytest.mark.engine

Answers = list[list[int]]
IN_PLACE = "in place, digest of every live slice compared"
RELOAD = "layerwise reload, tensors verified before loading"


class SlowRelay:
    """Holds readers of the shared in-memory relay back while closed; notes who reads what."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.open.set()
        self.reads: list[tuple[str, str]] = []  # thread, key
        stock = MemoryRelay.get_into

        def get_into(relay: MemoryRelay, key: str, buffer: memoryview) -> int:
            self.reads.append((threading.current_thread().name, key))
            assert self.open.wait(60)
            return stock(relay, key, buffer)

        patch.setattr(MemoryRelay, "get_into", get_into)


class Server:
    """A stock engine of the tiny model in this process, with our backend and nothing else of ours."""

    def __init__(self, folder: Path, relay: RelayEndpoint | None, **options: Any) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self.engine: Any = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(folder),
                skip_tokenizer_init=True,
                generation_config="vllm",
                max_model_len=256,
                max_num_seqs=8,
                block_size=32,
                kv_cache_memory_bytes=16 << 20,
                enforce_eager=True,
                weight_transfer_config={"backend": vllm_rlplugin.BACKEND},
                worker_extension_cls="vllm_rlplugin.extension.WorkerExtension",
                disable_log_stats=True,
                **{"dtype": "float32", **options},
            )
        )
        self.call("rl_ready")
        if relay is not None:
            self.call("init_weight_transfer_engine", init_info={"endpoint": relay.to_dict()})

    def call(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """On the only worker."""
        return self.engine.collective_rpc(method, args=args, kwargs=kwargs)[0]

    def answers(self, each_step: Callable[[int], None] = lambda tokens: None) -> Answers:
        """Greedy continuations of fixed prompts; ``each_step`` gets the number of steps so far."""
        from vllm.inputs import tokens_input
        from vllm.sampling_params import SamplingParams

        draw = random.Random(5)
        sampling = SamplingParams(max_tokens=24, temperature=0.0, detokenize=False)
        for index in range(6):
            prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randint(5, 40))]
            self.engine.add_request(str(index), tokens_input(prompt), sampling)
        found: dict[int, list[int]] = {}
        steps = 0
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                found[int(output.request_id)] = list(output.outputs[0].token_ids)
            steps += 1
            each_step(steps)
        self.engine.reset_prefix_cache()
        return [found[index] for index in range(6)]

    def start(self, version: int) -> None:
        """Up to what touches the model."""
        self.call("start_weight_update")
        self.call("update_weights", update_info={"version": version})

    def update(self, version: int) -> dict[str, Any]:
        self.start(version)
        self.call("finish_weight_update")
        report: dict[str, Any] = self.call("rl_report")
        return report

    def wait(self, version: int) -> dict[str, Any]:
        """Until the fetch has ended."""
        while (state := self.call("rl_prepared", version))["state"] == "fetching":
            time.sleep(0.005)
        found: dict[str, Any] = state
        return found

    def close(self) -> None:
        self.engine.engine_core.shutdown()


class Bench:
    """One engine of random model 1, and a publisher that counts versions up. Model N has the weights of seed N."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.relay = RelayEndpoint(job="in-place", kind="memory", master=f"in-place-{folder}", bucket_bytes=32 << 10)
        self.objects = RelayTwin.shared(self.relay.master)
        self.publisher = Publisher(self.relay)
        self.version = 0
        self.seeds = {seed: write_tiny_qwen3(folder / str(seed), seed) for seed in (1, 2, 3)}
        self.server = Server(folder / "1", self.relay)

    def publish(self, seed: int, **changes: Any) -> int:
        self.version += 1
        publish(self.publisher, self.version, {**self.seeds[seed], **changes})
        return self.version


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    prepare_process(1)
    vllm_rlplugin.activate()
    vllm_rlplugin.register_backend()
    made = Bench(tmp_path_factory.mktemp("bench"))
    yield made
    made.server.close()
    made.publisher.close()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowRelay:
    return SlowRelay(monkeypatch)


def test_tokens_are_generated_between_prepare_and_ready_and_update_fetches_nothing_more(
    bench: Bench, slow: SlowRelay
) -> None:
    server, version = bench.server, bench.publish(1)
    server.update(version)
    before = server.answers()
    version = bench.publish(2)
    slow.open.clear()
    states: list[str] = []

    def each_step(steps: int) -> None:
        if steps == 3:
            server.call("rl_prepare", version)
        if steps >= 3:
            states.append(server.call("rl_prepared", version)["state"])
        if steps == 20:
            slow.open.set()

    assert server.answers(each_step) == before  # with the old weights, whatever is fetched
    assert states[:17] == ["fetching"] * 17
    ready = server.wait(version)
    assert (ready["state"], ready["error"]) == ("ready", "")
    assert server.call("rl_prepared", version + 1)["state"] == "none"
    fetched = len(slow.reads)
    report = server.update(version)
    assert not slow.reads[fetched:]  # that it is still the same attempt, the metadata store says
    assert {thread for thread, _ in slow.reads} == {"rl-coserve-weights"}  # never the thread that runs the model
    assert (report["version"], report["state"], report["error"]) == (version, "intact", "")
    assert report["verified"]["how"] == IN_PLACE
    assert find_disagreement([report]) is None
    assert report["bytes"] == sum(tensor.nbytes for tensor in bench.seeds[2].values())
    assert server.call("rl_prepared", version)["state"] == "none"  # it was handed over
    assert server.answers() != before


def test_a_version_that_was_published_again_is_fetched_again(bench: Bench) -> None:
    server, version = bench.server, bench.publish(2)
    server.call("rl_prepare", version)
    assert server.wait(version)["state"] == "ready"
    bench.publisher.rollback(version)  # the run was resumed: the number now stands for other weights
    publish(bench.publisher, version, bench.seeds[3])
    again = server.update(version)
    third = server.call("compute_weight_checksums")
    assert again["state"] == "intact"
    server.update(bench.publish(2))
    assert server.call("compute_weight_checksums") != third
    server.update(bench.publish(3))
    assert server.call("compute_weight_checksums") == third


def test_a_newer_prepare_replaces_an_older_one(bench: Bench, slow: SlowRelay) -> None:
    server, old = bench.server, bench.publish(2)
    new = bench.publish(3)
    slow.open.clear()
    server.call("rl_prepare", old)
    server.call("rl_prepare", new)
    assert server.call("rl_prepared", old)["state"] == "none"
    assert server.call("rl_prepared", new)["state"] == "fetching"
    slow.open.set()
    assert server.wait(new)["state"] == "ready"
    report = server.update(old)  # and what is asked for goes before what was prepared
    assert (report["version"], report["state"]) == (old, "intact")


def test_a_version_that_fails_to_prepare_or_to_arrive_leaves_the_old_one(bench: Bench) -> None:
    server = bench.server
    server.update(bench.publish(1))
    expected, sums = server.answers(), server.call("compute_weight_checksums")
    known = bench.objects.keys()
    version = bench.publish(2)
    bucket = sorted({*bench.objects.keys()} - {*known})[0]
    intact = bytearray(bench.objects.size(bucket))
    bench.objects.get_into(bucket, memoryview(intact))
    flipped = bytes([*intact[:-1], intact[-1] ^ 1])
    for damage in (flipped, bytes(intact[:-64]), bytes(len(intact))):
        bench.objects.tamper(bucket, damage)
        server.call("rl_prepare", version)
        failed = server.wait(version)
        assert failed["state"] == "failed"
        assert "corrupt weights" in failed["error"]
        with pytest.raises(Exception, match="corrupt weights"):
            server.start(version)
        report = server.call("rl_report")
        assert (report["state"], report["kind"], report["version"]) == ("intact", "retryable", version - 1)
        assert "corrupt weights" in report["error"]
    assert server.answers() == expected
    assert server.call("compute_weight_checksums") == sums
    assert server.call("rl_verify")["mismatches"] == []
    bench.objects.tamper(bucket, bytes(intact))
    assert server.update(version)["state"] == "intact"
    assert server.answers() != expected


def test_what_does_not_fit_is_refused_before_anything_is_fetched(bench: Bench, slow: SlowRelay) -> None:
    server = bench.server
    norm = bench.seeds[2]["model.norm.weight"]
    version = bench.publish(2, **{"model.norm.weight": norm[:32]})
    with pytest.raises(Exception, match=r"other shape: model.norm.weight \(32,\)"):
        server.start(version)
    assert {key.rsplit("/", 1)[1] for _, key in slow.reads} == {"manifest"}
    assert server.call("rl_report")["state"] == "intact"
    server.call("start_weight_update")
    with pytest.raises(Exception, match="without received weights"):
        server.call("finish_weight_update")
    assert server.call("rl_report")["state"] == "intact"


def test_weights_that_change_while_they_are_loaded_are_refused_and_the_next_update_cures(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_rlplugin.weights import live_weights

    server, version = bench.server, bench.publish(2)
    compare = live_weights.MappedWeights.mismatches
    touched = []

    def flip_and_compare(self: Any) -> Any:
        item = self.mapping.slices_of("model.layers.1.mlp.up_proj.weight")[0]
        item.target[3, 5] = -item.target[3, 5]
        touched.append(item)
        return compare(self)

    monkeypatch.setattr(live_weights.MappedWeights, "mismatches", flip_and_compare)
    with pytest.raises(Exception, match=r"up_proj.weight in .*gate_up_proj.weight has digest [0-9a-f]{16}, expected"):
        server.update(version)
    monkeypatch.undo()
    assert touched
    report = server.call("rl_report")
    assert (report["state"], report["damaged"], report["kind"]) == ("unusable", True, "fatal")
    assert "rank 0" in report["error"]
    assert "up_proj" in str(find_disagreement([report]))
    cured = server.update(version)
    assert (cured["state"], cured["damaged"], cured["error"], cured["version"]) == ("intact", False, "", version)
    assert server.call("rl_verify")["mismatches"] == []


def test_a_session_that_nobody_finished_is_dropped_and_the_next_update_loads_its_own(bench: Bench) -> None:
    """vLLM by itself begins no other one until that one is finished, and whoever began it may be dead."""
    server = bench.server
    left, version = bench.publish(3), bench.publish(2)
    server.start(left)
    with pytest.raises(Exception, match="already active"):
        server.call("start_weight_update")
    server.call("rl_drop_session")
    report = server.update(version)
    assert (report["state"], report["version"]) == ("intact", version)
    server.call("rl_drop_session")  # there is none
    assert server.call("rl_verify")["mismatches"] == []


def test_an_error_half_way_makes_the_weights_unusable(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_rlplugin.weights import rank_slices

    server, version = bench.server, bench.publish(3)
    server.start(version)
    engine = server.engine.engine_core.engine_core.model_executor.driver_worker.worker.weight_transfer_engine
    good = engine._staged.pieces[-1]
    engine._staged.pieces[-1] = rank_slices.StagedSlice(good.slice, good.source[:1].expand(7), good.digest)
    with pytest.raises(Exception, match="weight version"):
        server.call("finish_weight_update")
    assert server.call("rl_report")["state"] == "unusable"
    assert server.update(version)["state"] == "intact"


def test_one_flipped_element_of_the_live_model_is_named(bench: Bench) -> None:
    server = bench.server
    server.update(bench.publish(2))
    assert server.call("rl_verify")["mismatches"] == []

    def flip(worker: Any) -> None:
        worker.model_runner.model.model.layers[1].self_attn.qkv_proj.weight.data[80, 1] += 1.0

    server.call(flip)
    found = server.call("rl_verify")
    (mismatch,) = found["mismatches"]
    assert mismatch["tensor"] == "model.layers.1.self_attn.k_proj.weight"  # rows 64..95 of q, k and v in one
    assert mismatch["parameter"] == "model.layers.1.self_attn.qkv_proj.weight"
    assert mismatch["found"] != mismatch["expected"]
    assert found["state"] == "unusable"
    assert server.call("rl_report")["state"] == "unusable"
    assert server.update(bench.publish(2))["state"] == "intact"


def test_updates_do_not_move_the_parameters(bench: Bench) -> None:
    def addresses(worker: Any) -> dict[str, int]:
        return {name: parameter.data_ptr() for name, parameter in worker.model_runner.model.named_parameters()}

    before = bench.server.call(addresses)
    bench.server.update(bench.publish(3))
    assert bench.server.call(addresses) == before  # CUDA graphs hold these addresses


def test_answers_and_digests_are_those_of_a_fresh_engine(bench: Bench) -> None:
    """Last: it starts engines of its own. Also without plain weights, where vLLM's reload does it, a tied head included."""
    server = bench.server
    report = server.update(bench.publish(3))
    answers, sums = server.answers(), server.call("compute_weight_checksums")
    server.close()
    fresh = Server(bench.folder / "3", None)
    assert fresh.answers() == answers
    assert fresh.call("compute_weight_checksums") == sums
    assert fresh.call("rl_verify")["slices"] == report["slices"]
    fresh.close()


def test_a_model_without_a_known_checkpoint_learns_its_mapping_from_the_first_version(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_rlplugin.weights import transfer_engine as weights

    bench.server.close()
    monkeypatch.setattr(weights, "checkpoint_layout", lambda *_: None)
    server = Server(bench.folder / "1", bench.relay)
    for seed in (2, 3):
        version = bench.publish(seed)
        server.call("rl_prepare", version)
        assert server.wait(version)["state"] == "ready"
        report = server.update(version)
        assert (report["version"], report["state"], report["verified"]["how"]) == (version, "intact", IN_PLACE)
        assert find_disagreement([report]) is None
    sums = server.call("compute_weight_checksums")
    bench.version += 1
    others = {name: tensor for name, tensor in bench.seeds[2].items() if name != "model.norm.weight"}
    publish(bench.publisher, bench.version, others)
    with pytest.raises(Exception, match="missing: model"):
        server.start(bench.version)
    server.close()
    fresh = Server(bench.folder / "3", None)
    assert fresh.call("compute_weight_checksums") == sums
    fresh.close()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_without_plain_weights_the_layerwise_reload_does_it_and_says_so(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    import vllm.model_executor.layers.utils as layers

    bench.server.close()
    stock = layers.dispatch_cpu_unquantized_gemm.__wrapped__
    monkeypatch.setattr(layers, "dispatch_cpu_unquantized_gemm", stock)
    write_tiny_qwen3(tmp_path / "old", 1, tied=tied)
    weights = write_tiny_qwen3(tmp_path / "new", 2, tied=tied)
    bench.version += 1
    publish(bench.publisher, bench.version, weights)
    server = Server(tmp_path / "old", bench.relay)
    before = server.answers()
    server.call("rl_prepare", bench.version)
    assert server.wait(bench.version)["state"] == "ready"
    report = server.update(bench.version)
    assert report["verified"]["how"] == RELOAD
    assert "dropped after packing" in report["verified"]["why"] or "Attempted to load" in report["verified"]["why"]
    assert (report["state"], report["version"]) == ("intact", bench.version)
    assert find_disagreement([report]) is None
    after, sums = server.answers(), server.call("compute_weight_checksums")
    assert server.call("rl_verify")["mismatches"] == []

    def flip(worker: Any) -> None:
        worker.model_runner.model.model.norm.weight.data[0] += 1.0

    server.call(flip)
    assert [item["parameter"] for item in server.call("rl_verify")["mismatches"]] == ["model.norm.weight"]
    server.close()
    fresh = Server(tmp_path / "new", None)
    assert after == fresh.answers() != before
    assert sums == fresh.call("compute_weight_checksums")
    fresh.close()
