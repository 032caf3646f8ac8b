"""Moving weights, gradients and optimizer state between device and host changes nothing but where they are."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_ranks import ForkedRank, wait_for_all

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[2]
OTHER_MEGATRON = ROOT / ".venv" / "alternates" / "megatron-core-0.19.2"
SETUPS = [
    ("float32", False),
    ("float32", True),
    ("bfloat16", False),
    ("bfloat16", True),
]  # dtype, distributed optimizer
LEVELS = ("away", "stream", "step")


class Rig:
    """A tiny GPT in DDP with Adam and a gradient stream; made twice, it is the same twice."""

    def __init__(self, dtype: str, distributed: bool) -> None:
        import torch
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        from megatron_rlplugin.model import DTYPES, build_model, read_shape
        from megatron_rlplugin.parallel_layout import ParallelLayout
        from megatron_rlplugin.stream.gradient_stream import GradientStream

        (module,) = build_model(
            read_shape(os.environ["MODEL"]), dtype, ParallelLayout(distributed_optimizer=distributed)
        )
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        module.train()
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
        self.model = DistributedDataParallel(module.config, ddp, module)
        config = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            clip_grad=1.0,
            bf16=dtype == "bfloat16",
            params_dtype=DTYPES[dtype],
            use_distributed_optimizer=distributed,
        )
        self.optimizer = get_megatron_optimizer(config, [self.model], use_gloo_process_groups=False)
        self.stream = GradientStream([self.model], self.optimizer)

    def feed(self, seed: int) -> None:
        import torch

        from megatron_rlplugin.model import causal_mask

        tokens = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(seed))
        positions = torch.arange(8).expand(2, 8)

        def forward_step(_: Any, model: Any) -> tuple[Any, Any]:
            logits = model(tokens[:, :-1], positions, causal_mask(8))

            def loss(output: Any) -> tuple[Any, Any, Any]:
                total = torch.nn.functional.cross_entropy(output.float().reshape(16, -1), tokens[:, 1:].reshape(-1))
                return total * 16, torch.tensor(16), 0

            return logits, loss

        self.stream.feed(forward_step, None, num_microbatches=1, seq_length=8, micro_batch_size=2)

    def inner(self) -> list[Any]:
        return [one.optimizer for one in self.optimizer.chained_optimizers]

    def state(self) -> list[Any]:
        """Copies of weights, masters and moments."""
        tensors = [parameter.data for parameter in self.model.parameters()]
        for inner in self.inner():
            tensors += [p.data for group in inner.param_groups for p in group["params"]]
            tensors += [v for values in inner.state.values() for v in values.values() if hasattr(v, "clone")]
        return [tensor.clone() for tensor in tensors]

    def gradients(self) -> list[Any]:
        return [parameter.main_grad.clone() for parameter in self.model.parameters()]


def same(left: list[Any], right: list[Any]) -> bool:
    import torch

    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def moments_on_device(rig: Rig) -> int:
    """Bytes of Adam's moments and of masters with storage of their own, as the tensors themselves say."""
    held = {p.data.untyped_storage()._cdata for p in rig.model.parameters()}
    storages = {}
    for inner in rig.inner():
        tensors = [p.data for group in inner.param_groups for p in group["params"]]
        tensors += [values[name] for values in inner.state.values() for name in ("exp_avg", "exp_avg_sq")]
        storages |= {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for key, storage in storages.items() if key not in held)


def run_steps(rig: Rig, residency: Any, rank: int, moves: random.Random | None) -> list[Any]:
    """Three steps of uneven feeds; with ``moves``, levels at random wherever they are allowed."""
    found = []
    for step in range(3):
        rig.stream.begin_step()
        for index in range(1 + rank + step % 2):
            if moves is not None:
                for level in (*moves.choices(LEVELS, k=3), moves.choice(LEVELS[1:])):
                    residency.move_to(level)
            rig.feed(100 * step + 10 * rank + index)
        found += rig.gradients() if moves is None else gradients_after(rig, residency, moves)
        if moves is not None:
            residency.move_to(moves.choice(LEVELS))
            residency.move_to("step")
        assert rig.stream.finish_step().taken
        found += rig.state()
        if moves is not None:
            for level in (*moves.choices(LEVELS, k=3), "stream"):
                residency.move_to(level)
    return found


def gradients_after(rig: Rig, residency: Any, moves: random.Random) -> list[Any]:
    for level in ("away", moves.choice(LEVELS), "stream"):
        residency.move_to(level)
    return rig.gradients()


def check(dtype: str, distributed: bool, rank: int) -> dict[str, Any]:
    from megatron_rlplugin.trainer.memory_residency import TrainerResidency

    expected = run_steps(Rig(dtype, distributed), None, rank, None)
    rig = Rig(dtype, distributed)
    residency = TrainerResidency([rig.model], rig.optimizer, rig.stream)
    assert same(expected, run_steps(rig, residency, rank, random.Random(rank))), "a move changed a bit"
    residency.move_to("step")
    assert residency.move_to("step").to_device == residency.move_to("step").to_host == 0, "nothing moves twice"
    sizes = {name: on_device for name, (on_device, _) in residency.where().items()}
    here = check_levels(rig, residency, sizes)
    check_guards(rig, residency)
    check_failures(rig, residency)
    residency.close()
    parameters = sum(parameter.numel() for parameter in rig.model.parameters())
    return {"parameters": parameters, "sizes": sizes, "here": here}


def check_levels(rig: Rig, residency: Any, sizes: dict[str, int]) -> dict[str, int]:
    """What each level frees, read at the tensors; the results say the same."""
    here, before, held = {}, rig.state(), sum(sizes.values())
    for level in ("stream", "away", "stream", "step"):
        result = residency.move_to(level)
        here[level] = result.device_bytes
        assert residency.level == level
        assert result.peak_bytes == max(held, result.device_bytes), "never more than the larger of both levels"
        held = result.device_bytes
        assert (moments_on_device(rig) > 0) == (level == "step")
        weights = sum(parameter.untyped_storage().nbytes() for parameter in rig.model.parameters())
        gradients = sum(buffer.grad_data.untyped_storage().nbytes() for buffer in rig.model.buffers)
        assert (weights > 0) == (gradients > 0) == (level != "away")
    assert same(before, rig.state())
    return here


def check_guards(rig: Rig, residency: Any) -> None:
    """What needs what is away raises, and changes nothing."""
    from megatron_rlplugin.trainer.memory_residency import TrainerResidency
    from orchestrator.api import ConfigError, RunError

    before = rig.state()
    rig.stream.begin_step()
    residency.move_to("away")
    with pytest.raises(RunError, match="residency"):
        rig.model(None, None, None)
    residency.move_to("stream")
    rig.feed(7)
    with pytest.raises(RunError, match="residency"):
        rig.inner()[0].step()
    with pytest.raises(ConfigError, match="residency"):
        residency.move_to("moon")
    residency.move_to("step")
    assert same(before, rig.state())
    residency.move_to("away")
    rig.stream.abandon_step()  # its gradient is of no use any more, and is not brought back
    residency.move_to("step")
    rig.stream.begin_step()
    assert not any(gradient.any() for gradient in rig.gradients())

    rig.feed(6)
    gradients, alone = rig.gradients(), TrainerResidency([rig.model], rig.optimizer)
    for level in LEVELS:
        alone.move_to(level)
    alone.close()
    assert same(gradients, rig.gradients()), "without a stream gradients are always kept"
    rig.stream.abandon_step()
    rig.stream.begin_step()


def check_failures(rig: Rig, residency: Any) -> None:
    """A move that fails at any of its copies, both ways, says what is where; it is repaired, or given up."""
    import torch

    import megatron_rlplugin.trainer.memory_residency as module
    from orchestrator.api import RetryableError, RunError

    rig.feed(8)
    weights, gradients, stock, failures = rig.state(), rig.gradients(), module._copy, 0
    for target, start in (("away", "step"), ("step", "away"), ("stream", "away"), ("stream", "step")):
        for repair in (target, start):
            for fail_at in (0, 1, 4):
                residency.move_to(start)
                left = fail_at

                def failing(to: Any, source: Any) -> None:
                    nonlocal left
                    left -= 1
                    if left < 0:
                        raise torch.cuda.OutOfMemoryError("no room")
                    stock(to, source)

                module._copy = failing
                try:
                    residency.move_to(target)
                except RetryableError as error:
                    module._copy = stock
                    failures += 1
                    assert residency.level == ""
                    assert "no room" in str(error)  # noqa: PT017
                    assert "on the host" in str(error)  # noqa: PT017
                    with pytest.raises(RunError, match="in between"):
                        residency.require_level("stream")
                finally:
                    module._copy = stock
                residency.move_to(repair)
                residency.move_to("step")
                assert same(weights, rig.state())
                assert same(gradients, rig.gradients())
    assert failures >= 8

    residency.move_to("away")
    stock_reload = rig.stream.gradients.reload

    def half_reloaded() -> None:
        rig.stream.gradients.allocate()
        raise torch.cuda.OutOfMemoryError("no room for gradients")

    rig.stream.gradients.reload = half_reloaded
    for repair in ("away", "stream"):
        with pytest.raises(RetryableError, match="no room for gradients"):
            residency.move_to("stream")
        rig.stream.gradients.reload = stock_reload if repair == "stream" else half_reloaded
        residency.move_to(repair)
        assert (residency.where()["gradients"][0] == 0) == (repair == "away")
    residency.move_to("step")
    assert same(gradients, rig.gradients())
    rig.stream.abandon_step()


def main(rank: int, world: int, rendezvous: str, results: str) -> None:
    import torch

    from megatron_rlplugin.parallel_layout import ParallelLayout, initialize_parallel, leave_parallel

    torch.set_num_threads(1)
    found = {}
    for dtype, distributed in SETUPS:
        leave_parallel()
        initialize_parallel(ParallelLayout(distributed_optimizer=distributed), rank, world, rendezvous)
        found[f"{dtype} {distributed}"] = check(dtype, distributed, rank)
    Path(f"{results}-{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def run_fresh(command: list[str], world: int, environment: dict[str, str]) -> None:
    ranks = [
        subprocess.Popen([*command, str(rank)], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(world)
    ]
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=250)
            assert process.returncode == 0, errors[-3000:]
    finally:
        for process in ranks:
            process.kill()


def spawn(folder: Path, world: int, path: str) -> list[dict[str, Any]]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    environment["MODEL"] = str(folder / "model")
    command = [__file__, str(world), f"file://{folder}/rendezvous", str(folder / "result")]
    if path == str(ROOT):
        for ended in wait_for_all([ForkedRank(*command, str(rank), env=environment) for rank in range(world)], 250):
            assert ended.code == 0, ended.err[-3000:]
    else:
        run_fresh([sys.executable, *command], world, environment)
    return [json.loads((folder / f"result-{rank}.json").read_text(encoding="utf-8")) for rank in range(world)]


@pytest.mark.parametrize(
    ("world", "other"),
    [
        pytest.param(1, False, id="one rank"),
        pytest.param(2, False, id="two ranks", marks=pytest.mark.long),
        pytest.param(2, True, id="two ranks, Megatron-Core 0.19.2", marks=pytest.mark.long),
    ],
)
def test_no_sequence_of_moves_changes_a_bit_and_each_level_frees_what_it_says(
    tmp_path: Path, world: int, other: bool
) -> None:
    from megatron_rlplugin.tiny_model import create_qwen3

    if other and not OTHER_MEGATRON.is_dir():
        pytest.skip("Megatron-Core 0.19.2 is not there")
    words = [f"w{index}" for index in range(32)]
    create_qwen3(
        str(tmp_path / "model"),
        hidden_size=32,
        intermediate_size=64,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=16,
        vocabulary=words,
        max_positions=64,
        dtype="float32",
        seed=1,
    )
    path = os.pathsep.join([*([str(OTHER_MEGATRON)] if other else []), str(ROOT)])
    for rank in spawn(tmp_path, world, path):
        for setup, found in rank.items():
            dtype, distributed = setup.split(" ")
            parameters, sizes = found["parameters"], found["sizes"]
            element = 4 if dtype == "float32" else 2
            shards = world if distributed == "True" else 1
            state = 8 if dtype == "float32" else 12  # fp32 masters are the weights themselves
            # Padding of buffers and shards, Adam's step counters, a few hundred bytes of buffers: 5 %.
            assert sizes["weights"] == pytest.approx(element * parameters, rel=0.05)
            assert sizes["gradients"] == pytest.approx(4 * parameters, rel=0.05)
            assert sizes["optimizer"] == pytest.approx(state * parameters / shards, rel=0.05)
            assert found["here"]["away"] == 0
            assert found["here"]["stream"] == sizes["weights"] + sizes["gradients"]
            assert found["here"]["step"] == sum(sizes.values())


if __name__ == "__main__":
    main(int(sys.argv[4]), int(sys.argv[1]), sys.argv[2], sys.argv[3])
