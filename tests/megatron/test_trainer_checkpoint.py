"""A checkpoint is of no layout: what four ranks wrote one rank reads, and the other way round, bit for bit; Megatron-LM reads it.

Four processes train and save, one loads and saves again, four load that.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron_rlplugin import parallel_layout  # noqa: E402
from megatron_rlplugin.trainer import sharded_state, sharded_writer  # noqa: E402
from megatron_rlplugin.trainer.megatron_trainer import MegatronTrainer  # noqa: E402
from orchestrator.api import ConfigError, RunError  # noqa: E402
from scripts.bench.probes.megatron.checkpoint_probe import play  # noqa: E402
from scripts.bench.probes.megatron.trainer_probe import make_batch, tiny_folder, tiny_mixture  # noqa: E402
from tests.support.forked_ranks import ForkedRank, wait_for_all  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")]
ROOT = Path(__file__).parents[2]
NEWEST = ROOT / ".venv/alternates/megatron-core-0.19.2"
BASE = {"learning_rate": 1e-2, "micro_batch_size": 4, "logprob_gap_samples": 0}
PPO = {"objective": "ppo", "normalize_advantage": False, "kl_coefficient": 0.05, "kl_estimator": "k2"}
# name -> (model, dtype, what all layouts share, of four ranks, of one)
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "dense": ("deep", "float32", PPO, {"tensor_parallel": 2, "pipeline_parallel": 2}, {}),
    "sharded": ("half", "bfloat16", {}, {"tensor_parallel": 2, "data_parallel": 2, "distributed_optimizer": True}, {}),
    "experts": (
        "mixture",
        "float32",
        {},
        {"expert_parallel": 2, "data_parallel": 2, "pipeline_parallel": 2, "distributed_optimizer": True},
        {"distributed_optimizer": True},
    ),
    "shared rows": (
        "half",
        "bfloat16",
        {},
        {"context_parallel": 2, "data_parallel": 2, "distributed_optimizer": True},
        {},
    ),
}
Answers = list[dict[str, dict[str, Any]]]


def play_ranks(folder: Path, scenarios: dict[str, Any], world: int = 4, beside: Path | None = None) -> Answers:
    """What each rank says of each scenario; ``beside``: with another Megatron-Core, in interpreters that imported none."""
    folder.mkdir()
    (folder / "scenarios.json").write_text(json.dumps(scenarios))
    command = ["-m", "scripts.bench.probes.megatron.checkpoint_probe", str(folder / "scenarios.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    meet = f"file://{folder / 'meet'}"
    words = [[*command, str(rank), str(world), meet] for rank in range(world)]
    if beside is None:
        for ended in wait_for_all([ForkedRank(*each, env=environment) for each in words], 280):
            assert ended.code == 0, ended.err[-4000:]
    else:
        environment["PYTHONPATH"] = f"{beside}{os.pathsep}{ROOT}"
        started = [subprocess.Popen([sys.executable, "-W", "ignore", *each], env=environment) for each in words]
        try:
            assert [process.wait(280) for process in started] == [0] * world
        finally:
            for process in started:
                process.kill()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


OTHER = pytest.mark.skipif(not NEWEST.is_dir(), reason="the wheel of Megatron-Core 0.19.2 is not unpacked")


@pytest.fixture(
    scope="module", params=[None, pytest.param(NEWEST, marks=[pytest.mark.long, OTHER])], ids=["installed", "0.19.2"]
)
def played(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Answers, dict[str, Any], Answers, Path]]:
    """(four ranks that trained and saved, one that loaded and saved, four that loaded what the one had saved, the folder)."""
    folder = tmp_path_factory.mktemp("checkpoints")
    models = {
        "deep": tiny_folder(folder / "deep", layers=4),
        "half": tiny_folder(folder / "half", dtype="bfloat16"),
        "mixture": tiny_mixture(folder / "mixture"),
    }

    def scenario(name: str, four: bool, **more: Any) -> dict[str, Any]:
        model, dtype, shared, of_four, of_one = CASES[name]
        settings = {**BASE, **shared, **(of_four if four else of_one)}
        return {"model": models[model], "dtype": dtype, "settings": settings, **more}

    train = {name: scenario(name, True, steps=2, save=str(folder / f"{name}-4")) for name in CASES}
    move = {
        name: scenario(name, False, load=str(folder / f"{name}-4"), save=str(folder / f"{name}-1")) for name in CASES
    }
    back = {name: scenario(name, True, load=str(folder / f"{name}-1")) for name in CASES}
    first = play_ranks(folder / "first", train, beside=request.param)
    if request.param is None:
        alone = {name: play(one, 0, 1, "") for name, one in move.items()}
    else:
        (alone,) = play_ranks(folder / "alone", move, 1, request.param)
    yield first, alone, play_ranks(folder / "again", back, beside=request.param), folder
    parallel_layout.shutdown_parallel()


@pytest.mark.parametrize("name", CASES)
def test_another_layout_has_the_same_bits(name: str, played: tuple[Answers, dict[str, Any], Answers, Path]) -> None:
    first, alone, _, _ = played
    saved, found = first[0][name], alone[name]
    assert "error" not in saved, saved["error"]
    assert "error" not in found, found["error"]
    assert found["version"] == 2
    assert found["weights"] == saved["weights"]
    moments = {key: digest for key, digest in saved["whole"].items() if not key.endswith(" master")}
    assert len(moments) > 20
    assert {key: digest for key, digest in found["whole"].items() if not key.endswith(" master")} == moments
    masters = [key for key in saved["whole"] if key.endswith(" master")]
    assert bool(masters) == (name != "dense")
    for key in masters:
        assert found["whole"][key] == saved["whole"][key], key
    assert found.get("reference") == saved.get("reference")


@pytest.mark.parametrize("name", CASES)
def test_back_in_the_first_layout_it_continues_bit_for_bit(
    name: str, played: tuple[Answers, dict[str, Any], Answers, Path]
) -> None:
    first, _, again, _ = played
    for before, after in zip(first, again, strict=True):
        assert "error" not in after[name], after[name]["error"]
        assert after[name]["state"] == before[name]["state"]
        assert after[name].get("critic") == before[name].get("critic")
        assert after[name]["next"] == before[name]["next"]
        assert after[name]["state after"] == before[name]["state after"]


def test_each_rank_writes_its_own_shards_and_digests(played: tuple[Answers, dict[str, Any], Answers, Path]) -> None:
    *_, folder = played
    for name in CASES:
        files = {file.name for file in (folder / f"{name}-4").iterdir()}
        assert {f"__{rank}_0.distcp" for rank in range(4)} | {".metadata", "metadata.json", "config.json"} <= files
        listed: dict[str, Any] = {}
        for file in (folder / f"{name}-4").glob("digests-*.json"):
            listed |= json.loads(file.read_text())
        assert listed.keys() == {file for file in files if not file.startswith("digests-")}


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_a_flat_part_of_a_tensor_is_cut_into_boxes_in_order(shape: list[int], data: st.DataObject) -> None:
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    found = [
        whole[tuple(slice(at, at + size) for at, size in zip(offset, extent, strict=True))].reshape(-1)
        for offset, extent in sharded_state.boxes(shape, start, stop)
    ]
    assert torch.cat([torch.arange(0), *found]).tolist() == list(range(start, stop))
    assert len(found) <= 2 * len(shape) - 1


# -- beside training ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


def make_trainer(folder: str, **settings: Any) -> MegatronTrainer:
    return MegatronTrainer(model=folder, settings={**BASE, **settings}, total_steps=10, seed=3)


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_waits_for_it(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, disk, order = make_trainer(folder), threading.Event(), []
    write = sharded_writer._write_bucket

    def slow(*arguments: Any) -> Any:
        order.append("begun")
        assert disk.wait(60)
        answer = write(*arguments)
        order.append("written")
        return answer

    monkeypatch.setattr(sharded_writer, "_write_bucket", slow)
    run(trainer.save(str(tmp_path / "first")))
    run(trainer.train_step(make_batch(0)))  # the disk stands still
    assert not (tmp_path / "first" / ".metadata").exists()
    threading.Timer(0.2, disk.set).start()
    run(trainer.save(str(tmp_path / "second")))
    assert (tmp_path / "first" / ".metadata").exists()
    run(trainer.saved())
    assert order == ["begun", "written"] * 2
    assert run(make_trainer(folder).load(str(tmp_path / "first"))) == 0  # as it was, not as it is
    assert run(make_trainer(folder).load(str(tmp_path / "second"))) == 1


def test_a_checkpoint_that_cannot_be_written_is_one_error_with_its_cause(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(folder)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(sharded_writer, "_write_bucket", full)
        run(trainer.save(str(tmp_path / "full")))
        with pytest.raises(RunError, match=r"full cannot be written \(\d+ MB free there\): .*No space left"):
            run(trainer.saved())
        run(trainer.saved())  # said once
        run(trainer.save(str(tmp_path / "full again")))
        with pytest.raises(RunError, match="No space left"):
            run(trainer.save(str(tmp_path / "not begun")))
    run(trainer.save(str(tmp_path / "fine")))
    run(trainer.saved())
    assert run(trainer.load(str(tmp_path / "fine"))) == 0


# -- what is refused ------------------------------------------------------------------------------------------------------


def test_an_index_that_would_run_code_is_refused_before_megatron_core_reads_it(folder: str, tmp_path: Path) -> None:
    class Opens:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "was here",)

    trainer = make_trainer(folder)
    run(trainer.save(str(tmp_path / "checkpoint")))
    run(trainer.saved())
    (tmp_path / "checkpoint" / ".metadata").write_bytes(pickle.dumps(Opens()))
    with pytest.raises(ConfigError, match=r"is not a checkpoint of this trainer.*\.metadata: .* has no place in it"):
        run(trainer.load(str(tmp_path / "checkpoint")))
    assert not (tmp_path / "was here").exists()


# -- Megatron-LM ----------------------------------------------------------------------------------------------------------

MEGATRON_LM = """
import sys, torch, typing, typing_extensions
from megatron_rlplugin import cpu
typing.override = typing_extensions.override
cpu.activate()
folder, checkpoint, arguments = sys.argv[1], sys.argv[2], sys.argv[3].split()
from megatron_rlplugin.trainer.megatron_trainer import MegatronTrainer
from megatron_rlplugin.model import unwrap
from scripts.bench.probes.megatron.trainer_probe import state_digest, weights_digest
sharded = "--use-distributed-optimizer" in arguments
trainer = MegatronTrainer(
    model=folder, settings={"learning_rate": 1e-2, "distributed_optimizer": sharded}, dtype="bfloat16", total_steps=10)
learner = trainer._learner
from megatron.training import checkpointing, global_vars
from megatron.training.arguments import parse_args, validate_args
sys.argv = ["megatron", *arguments]
args = parse_args()
args.rank, args.world_size = 0, 1
validate_args(args)
args.load, args.exit_on_missing_checkpoint = checkpoint, True
global_vars.set_args(args)
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
init_num_microbatches_calculator(0, None, 1, 1, 1)
from megatron_rlplugin.trainer import sharded_state
sharded_state.prepare_state(learner.optimizer)  # without Apex, 0.19.2's state_dict() wants a step to have been taken
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
put = DistributedOptimizer._set_main_param_and_optimizer_states  # knows Apex's and Transformer Engine's Adam, not torch's
DistributedOptimizer._set_main_param_and_optimizer_states = lambda self, p, found: put(self, p, {"step": None, **found})
checkpointing.read_metadata = lambda file: (int(open(file).read()), False)  # it reduces a number on CUDA
iteration, _ = checkpointing.load_checkpoint(learner.chunks, learner.optimizer, learner.scheduler)
lr = learner.optimizer.param_groups[0]["lr"]
print("ANSWER", iteration, weights_digest(learner), state_digest(learner), learner.scheduler.num_steps, lr)
"""


@OTHER
@pytest.mark.parametrize("sharded", [pytest.param(False, marks=pytest.mark.long), True])
def test_megatron_lm_loads_it_as_one_of_its_own(tmp_path: Path, sharded: bool) -> None:
    parallel_layout.leave_parallel()
    model = tiny_folder(tmp_path / "model", dtype="bfloat16")
    trainer = MegatronTrainer(
        model=model,
        settings={"learning_rate": 1e-2, "distributed_optimizer": sharded},
        dtype="bfloat16",
        total_steps=10,
    )
    for step in range(2):
        run(trainer.train_step(make_batch(step)))
    run(trainer.save(str(tmp_path / "all" / "iter_0000002")))
    run(trainer.saved())
    (tmp_path / "all" / "latest_checkpointed_iteration.txt").write_text("2")
    shape = trainer._learner.shape
    words = f"""--num-layers {shape.num_hidden_layers} --hidden-size {shape.hidden_size} --num-attention-heads
        {shape.num_attention_heads} --group-query-attention --num-query-groups {shape.num_key_value_heads} --seq-length 64
        --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 1 --train-iters 10 --lr 0.01 --bf16
        --tokenizer-type NullTokenizer --vocab-size 64 --transformer-impl local --no-persist-layer-norm
        --no-gradient-accumulation-fusion --ckpt-format torch_dist --no-masked-softmax-fusion"""
    words += " --use-distributed-optimizer" if sharded else ""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{NEWEST}:{ROOT}"}
    command = [sys.executable, "-W", "ignore", "-c", MEGATRON_LM, model, str(tmp_path / "all"), words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    _, iteration, weights, state, steps, rate = line.split()
    from scripts.bench.probes.megatron.trainer_probe import state_digest, weights_digest

    learner = trainer._learner
    assert (int(iteration), int(steps)) == (2, 2)
    assert weights == weights_digest(learner)
    assert state == state_digest(learner)
    assert float(rate) == learner.optimizer.param_groups[0]["lr"]
    parallel_layout.leave_parallel()
