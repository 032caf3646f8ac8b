"""The example script: two lines in a training script, a run's Parquet trajectories in, the same weights with streaming."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forked_ranks import Ended, ForkedRank, wait_for_all
from tests.support.megatron_training import NEWEST, run_script
from tests.support.waiting import free_port

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
pytest.importorskip("pyarrow")

from safetensors.torch import load_file  # noqa: E402

from megatron_rlplugin import tiny_model  # noqa: E402
from megatron_rlplugin.trainer.recorded_rows import read_batches  # noqa: E402
from orchestrator.api import ConfigError, Prompt, Trajectory, Turn  # noqa: E402
from orchestrator.store import TrajectoryStore  # noqa: E402
from orchestrator.transfer import RelayEndpoint, Subscriber  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
SCRIPT = Path(__file__).parents[2] / "examples/megatron/train_rl.py"
STEPS, GROUPS, MEMBERS = 3, 3, 4
WORDS = [f"w{index}" for index in range(40)]


def trajectory(step: int, number: int) -> Trajectory:
    """One of step ``step``; lengths, rewards and versions differ."""
    turns = 1 + number % 3
    made = tuple(
        Turn(
            observation_ids=tuple((step + number + turn + place) % 40 for place in range(3 + number % 2)),
            action_ids=tuple((7 * number + turn + place) % 40 for place in range(2 + turn)),
            logprobs=tuple(-3.0 - 0.1 * place for place in range(2 + turn)),
            versions=((max(step - turns + turn, 0), 2 + turn),),
            done=turn == turns - 1,
        )
        for turn in range(turns)
    )
    return Trajectory(
        id=f"t{step}-{number:02d}",
        group_id=f"g{step}-{number // MEMBERS}",
        task="words",
        prompt=Prompt(key="k", task="words", seed=0, payload=""),
        turns=made,
        reward=float(number * 7 % 5),
        env_version="1",
        env_seed=0,
        truncated=False,
        scored_at=float(100 * step + number),
    )


def write_run(folder: Path) -> None:
    """A run folder as the orchestrator writes it; files hold the trajectories in another order than the batches."""
    store = TrajectoryStore(folder / "trajectories")
    for step in range(STEPS):
        for number in reversed(range(GROUPS * MEMBERS)):
            place = (number * 5) % (GROUPS * MEMBERS)
            store.append(trajectory(step, number), step, "trained", position=place)
        store.append(trajectory(step + 10, 1), step, "evicted_stale")
        store.flush()
    store.close()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("example")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8}
    model = tiny_model.create_qwen3(
        str(root / "model"), **sizes, vocabulary=WORDS, max_positions=64, dtype="float32", seed=3
    )
    write_run(root / "run")
    return Path(model), root / "run"


def start(inputs: tuple[Path, Path], out: Path, *flags: str, ranks: int = 1, fresh: bool = False) -> Ended:
    """The script on so many ranks, started as torchrun does; what rank 0 says. ``fresh``: one rank, in a new interpreter."""
    model, run = inputs
    command = [str(SCRIPT), "--model", str(model), "--rl-trajectories", str(run)]
    command += ["--save", str(out), "--lr", "1e-2", "--micro-batch-size", "4", *flags]
    port = str(free_port())
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    environments = [os.environ | shared | {"RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"} for rank in range(ranks)]
    if fresh:
        words = [sys.executable, "-W", "ignore", *command]
        done = subprocess.run(words, env=environments[0], capture_output=True, text=True, timeout=280, check=False)
        return Ended(done.returncode, done.stdout, done.stderr)
    return wait_for_all([ForkedRank(*command, env=environment) for environment in environments], 280)[0]


def weights(folder: Path) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in load_file(folder / "model.safetensors").items()}


ARRIVAL = ("--rl-micro-batch-order", "arrival")


@pytest.fixture(scope="module")
def plain(inputs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained without streaming."""
    out = tmp_path_factory.mktemp("plain") / "out"
    done = start(inputs, out, *ARRIVAL, fresh=True)
    assert done.code == 0, done.err
    assert len(re.findall(r"iteration +\d \|.*loss: [-\d.]+E.*grad norm: [\d.]+", done.out)) == STEPS
    return out


@pytest.mark.parametrize("flags", [(), ("--rl-grad-offload",)], ids=["streaming", "streaming, gradients offloaded"])
def test_streaming_ends_with_the_same_bits(
    inputs: tuple[Path, Path], plain: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    done = start(inputs, tmp_path / "out", "--rl-stream-training", *flags)
    assert done.code == 0, done.err
    assert weights(tmp_path / "out") == weights(plain)
    assert weights(plain) != weights(inputs[0])


def test_the_result_is_a_folder_that_the_script_can_begin_with(inputs: tuple[Path, Path], plain: Path) -> None:
    assert json.loads((plain / "config.json").read_text()) == json.loads((inputs[0] / "config.json").read_text())
    assert sorted(path.name for path in plain.iterdir()) == sorted(path.name for path in inputs[0].iterdir())


@pytest.mark.long
def test_two_replicas_or_two_tensor_parts_train_the_same_model(
    inputs: tuple[Path, Path], plain: Path, tmp_path: Path
) -> None:
    one = load_file(plain / "model.safetensors")
    layouts = {"dp": ("--use-distributed-optimizer",), "tp": ("--tensor-model-parallel-size", "2")}
    for name, flags in layouts.items():
        done = start(inputs, tmp_path / name, "--rl-stream-training", *flags, ranks=2)
        assert done.code == 0, done.err
        for tensor, value in load_file(tmp_path / name / "model.safetensors").items():
            # Adam's first steps turn differences of the summation order (1e-8 of a gradient) into some 1e-6 of a weight.
            assert torch.allclose(value, one[tensor], atol=1e-4), (name, tensor)


def test_help_shows_every_flag(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    done = start(inputs, tmp_path / "out", "--help")
    assert done.code == 0
    assert "--rl-stream-training" in done.out
    assert "--tensor-model-parallel-size" in done.out


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--rl-trajectories", "no-such-folder"), "--rl-trajectories = 'no-such-folder': is not a folder"),
        (("--rl-objective", "ppo"), "has none of them"),
        (("--rl-stream-training", "--rl-objective", "reinforce++"), "--rl-stream-training = True"),
    ],
)
def test_a_wrong_flag_is_one_line_and_nothing_is_written(
    inputs: tuple[Path, Path], tmp_path: Path, flags: tuple[str, ...], complaint: str
) -> None:
    done = start(inputs, tmp_path / "out", *flags)
    assert done.code == 1
    assert complaint in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "out").exists()


# -- in the shape of Megatron-LM's own ----

LAYERS = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--vocab-size 40 --tokenizer-type NullTokenizer --swiglu --qk-layernorm --normalization RMSNorm "
    "--disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --transformer-impl local "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --use-cpu-initialization "
    "--no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion "
    "--no-gradient-accumulation-fusion --no-persist-layer-norm --distributed-backend gloo --num-workers 0 "
    "--micro-batch-size 4 --global-batch-size 12 --train-iters 3 --lr 1e-2 --lr-decay-style constant "
    "--calculate-per-token-loss --accumulate-allreduce-grads-in-fp32"
)


@pytest.mark.long
@pytest.mark.skipif(not NEWEST.is_dir(), reason="the wheel of Megatron-Core 0.19.2 is not unpacked")
def test_a_loop_on_what_megatron_lm_sets_up_streams_the_same_and_publishes_without_padding(
    inputs: tuple[Path, Path], tmp_path: Path
) -> None:
    script, said, kept = SCRIPT.parent / "train_rl_gpt.py", [], []
    for flags in (ARRIVAL, ("--rl-stream-training",)):
        place = tmp_path / str(len(said))
        relay = {"job": "gpt", "kind": "fsspec", "master": f"file://{place}", "metadata": f"{place}.sqlite"}
        words = (*LAYERS.split(), "--rl-trajectories", str(inputs[1]), "--rl-weight-relay", json.dumps(relay))
        done = run_script(script, *words, "--rl-vocab-size", "40", *flags)
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
        said.append(re.findall(r"iteration +(\d) \| loss: (\S+) \| grad norm: (\S+)", done.stdout))
        assert ("FED 0" in done.stdout) == (flags is ARRIVAL)
        subscriber = Subscriber(RelayEndpoint.from_dict(relay))
        assert subscriber.latest_version() == 3
        kept.append(
            {key.tensor: (key.global_shape, bytes(data)) for key, data in subscriber.fetch(subscriber.manifest(3))}
        )
        subscriber.close()
    assert len(said[0]) == STEPS
    assert said[0] == said[1]
    assert kept[0] == kept[1]  # the same bits
    assert kept[0]["model.embed_tokens.weight"][0] == (40, 32)  # Megatron has 128 rows


@pytest.mark.long
@pytest.mark.skipif(not NEWEST.is_dir(), reason="the wheel of Megatron-Core 0.19.2 is not unpacked")
@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--hidden-dropout 0.1", "--hidden-dropout = 0.1: must be 0"),
        ("--num-experts 2", "--num-experts = 2: must be None"),
    ],
)
def test_what_that_loop_would_train_wrongly_is_refused(words: str, complaint: str) -> None:
    done = run_script(SCRIPT.parent / "train_rl_gpt.py", *LAYERS.split(), *words.split(), "--rl-trajectories", "none")
    assert done.returncode != 0
    assert complaint in done.stderr


# -- the reader ------------------------------------------------------------------------------------------------------


def test_batches_are_those_that_were_trained_in_their_order(inputs: tuple[Path, Path]) -> None:
    batches = list(read_batches(inputs[1], first_version=5))
    assert [(batch.step, batch.version) for batch in batches] == [(0, 5), (1, 6), (2, 7)]
    numbers = sorted(range(GROUPS * MEMBERS), key=lambda number: number * 5 % (GROUPS * MEMBERS))
    for step, batch in enumerate(batches):
        assert [sample.trajectory_id for sample in batch.samples] == [f"t{step}-{number:02d}" for number in numbers]
        for number, sample in zip(numbers, batch.samples, strict=True):
            original = trajectory(step, number)
            assert sample.token_ids == original.token_ids
            assert sample.loss_mask == original.loss_mask
            assert sample.logprobs == original.logprobs
            assert sample.versions == original.versions
            assert sample.reward == original.reward
    assert list(read_batches(inputs[1] / "trajectories", steps=2)) == list(read_batches(inputs[1]))[:2]


def test_a_folder_that_holds_no_trajectories_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no trajectories"):
        list(read_batches(tmp_path))
    store = TrajectoryStore(tmp_path / "trajectories")
    store.append(trajectory(0, 0), 0, "evicted_stale")
    store.close()
    with pytest.raises(ConfigError, match="no trained trajectory"):
        list(read_batches(tmp_path))
    (damaged,) = (tmp_path / "trajectories").rglob("part-*.parquet")
    damaged.write_bytes(b"PAR1 and no more")
    with pytest.raises(ConfigError, match="cannot be read as Parquet"):
        list(read_batches(tmp_path))


def test_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    for again in range(2):
        store = TrajectoryStore(tmp_path / "trajectories")
        store.append(trajectory(0, 0), 0, "trained", position=again)
        store.close()
    with pytest.raises(ConfigError, match="t0-00 twice in step 0"):
        list(read_batches(tmp_path))


@pytest.mark.parametrize(
    ("place", "said"), [(2, r"2 trajectories at positions \[0, 2\]"), (None, "have no position in the batch")]
)
def test_positions_that_are_no_batch_are_refused(tmp_path: Path, place: int | None, said: str) -> None:
    store = TrajectoryStore(tmp_path / "trajectories")
    store.append(trajectory(0, 0), 0, "trained", position=0)
    store.append(trajectory(0, 1), 0, "trained", position=place)
    store.close()
    with pytest.raises(ConfigError, match=said):
        list(read_batches(tmp_path))
