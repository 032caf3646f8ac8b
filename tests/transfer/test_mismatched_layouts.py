"""A trainer of TP2 x PP2 feeds an engine of TP1 and one of TP2 through a real Mooncake Store, by differences.

The four trainer ranks (gloo) publish bf16 versions; two real vLLM engines follow them, one from the start and one that joins
in the middle. What every rank of an engine has live is compared, by digest, with the slices that the gathered model of the
trainer has there; nothing of the way between is used for that.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from orchestrator.runtime.mooncake_master import MooncakeMaster  # noqa: E402
from orchestrator.transfer import RelayEndpoint  # noqa: E402
from scripts.bench.probes.megatron.trainer_probe import tiny_folder  # noqa: E402
from tests.support.forked_ranks import Ended, ForkedRank  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")]

VERSIONS = 4  # 0 and 3 come with a full snapshot, 1 to 3 as differences
JOINS = {"tp1": 0, "tp2": 1}  # the first version an engine asks for: the second one has to fetch a snapshot and a chain
LIMIT = 240.0  # seconds; it takes 40 on an idle machine

COMMON = """
import gc, json, os, sys, time
from pathlib import Path

folder, order = Path(sys.argv[1]), json.loads(sys.argv[2])

def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.05)

def say(name, what=""):
    (folder / (name + ".new")).write_text(what)
    os.replace(folder / (name + ".new"), folder / name)
"""

# One rank: publishes, waits until the engines have the version, trains a step.
RANK = (
    COMMON
    + """
import asyncio
import torch
from safetensors.torch import save_file
from megatron_rlplugin.weights import hf_bridge as bridge
from megatron_rlplugin.trainer.megatron_trainer import MegatronTrainer
from scripts.bench.probes.megatron.trainer_probe import make_batch

rank = int(sys.argv[3])

async def main():
    trainer = MegatronTrainer(model=order["model"], settings=order["settings"], total_steps=10, seed=3, dtype="bfloat16",
                              relay=order["relay"], rank=rank, world_size=4, init_method=f"file://{folder}/meet")
    for version in range(order["versions"]):
        if version:
            await trainer.train_step(make_batch(version - 1))
        result = await trainer.publish()
        weights = {name: value.clone() for name, value in bridge.export_hf(trainer._learner.chunks)}
        if rank == 0:
            save_file(weights, folder / f"{version}.safetensors")
            say(f"published-{version}", json.dumps([result.version, result.bytes, result.buckets]))
        for engine, joins in order["joins"].items():
            if joins <= version:
                wait_for(f"{engine}-{version}")
    await trainer.close()

asyncio.run(main())
"""
)

ENGINE = (
    COMMON
    + """
def main():
    from vllm_rlplugin.worker.inprocess_engine import prepare_process
    prepare_process(1)
    import vllm_rlplugin
    vllm_rlplugin.activate()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.inputs import tokens_input
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm_rlplugin.weights.version_agreement import find_disagreement

    name, tp = sys.argv[3], int(sys.argv[4])
    vllm_rlplugin.register_backend()
    config = EngineArgs(
        model=order["model"], skip_tokenizer_init=True, generation_config="vllm", dtype="bfloat16", max_model_len=64,
        block_size=32, kv_cache_memory_bytes=16 << 20, enforce_eager=True, disable_log_stats=True, max_num_seqs=8,
        weight_transfer_config={"backend": "rl_coserve"}, worker_extension_cls="vllm_rlplugin.extension.WorkerExtension",
        distributed_executor_backend="mp", tensor_parallel_size=tp).create_engine_config()
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # vLLM for CPUs has just chosen to spawn: imports in each worker
    gc.freeze()  # what was imported is no garbage, in the workers that are forked from here neither
    made = LLMEngine.from_vllm_config(config, disable_log_stats=True)
    rpc = made.collective_rpc
    rpc("rl_ready")
    rpc("init_weight_transfer_engine", kwargs={"init_info": {"endpoint": order["relay"]}})

    def answers(meanwhile=None):
        for index in range(4):
            made.add_request(f"r{index}", tokens_input([3 + index, 7, 1]),
                             SamplingParams(max_tokens=12, temperature=0.0, detokenize=False))
        found, turns = {}, 0
        while made.has_unfinished_requests():
            for output in made.step():
                found[output.request_id] = list(output.outputs[0].token_ids)
            turns += 1
            if meanwhile and turns == 3:
                meanwhile()
        made.reset_prefix_cache()
        return [found[f"r{index}"] for index in range(4)]

    for version in range(order["joins"][name], order["versions"]):
        wait_for(f"published-{version}")
        while_fetching = answers(lambda: rpc("rl_prepare", args=(version,)))  # fetched while it generates
        rpc("start_weight_update")
        rpc("update_weights", kwargs={"update_info": {"version": version}})
        rpc("finish_weight_update")
        reports = rpc("rl_report")
        verified = rpc("rl_verify")
        say(f"{name}-{version}", json.dumps({
            "reports": reports, "agree": find_disagreement(reports),
            "verified": [[part["state"], part["mismatches"]] for part in verified],
            "slices": [part["slices"] for part in verified], "before": while_fetching, "after": answers()}))
    made.engine_core.shutdown()

if __name__ == "__main__":
    main()
"""
)


def environment() -> dict[str, str]:
    made = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return made | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}


async def start_engine(folder: Path, *arguments: str) -> asyncio.subprocess.Process:
    path = folder / "engine.py"
    path.write_text(ENGINE)
    return await asyncio.create_subprocess_exec(
        sys.executable, "-W", "ignore", str(path), str(folder), *arguments, env=environment(),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


async def end_of_engine(child: asyncio.subprocess.Process) -> Ended:
    output, _ = await child.communicate()
    assert child.returncode is not None
    return Ended(child.returncode, output.decode(errors="replace"), "")


async def run_all(folder: Path) -> None:
    """Trainer and engines side by side, until all have ended well."""
    master = MooncakeMaster(log=folder / "master.log")
    await master.start()
    children: list[asyncio.subprocess.Process] = []
    ranks: list[ForkedRank] = []
    try:
        relay = RelayEndpoint(
            job=f"mismatched-{os.getpid()}",
            master=master.address,
            metadata=str(folder / "metadata.sqlite"),
            segment_bytes=16 << 20,
            bucket_bytes=32 << 10,
            snapshot_every=3,
            keep_versions=9,
        )
        order = {
            # 24 words: vLLM pads them to 64, so the second rank of two has nothing but padding of the embedding.
            "model": tiny_folder(folder / "model", hidden_size=64, intermediate_size=96, head_dim=32, dtype="bfloat16"),
            "settings": {
                "learning_rate": 3e-4, "micro_batch_size": 4, "micro_batch_order": "arrival",
                "tensor_parallel": 2, "pipeline_parallel": 2,
            },
            "relay": relay.to_dict(), "versions": VERSIONS, "joins": JOINS,
        }  # fmt: skip
        text = json.dumps(order)
        children += [await start_engine(folder, text, name, name.removeprefix("tp")) for name in JOINS]
        ranks += [ForkedRank("-c", RANK, str(folder), text, str(rank), env=environment()) for rank in range(4)]
        ends = {asyncio.ensure_future(end_of_engine(child)) for child in children}
        ends |= {asyncio.ensure_future(asyncio.to_thread(rank.wait, LIMIT)) for rank in ranks}
        while ends:
            done, ends = await asyncio.wait(ends, timeout=LIMIT, return_when=asyncio.FIRST_COMPLETED)
            assert done, f"nothing ended within {LIMIT} s"
            for end in done:
                assert end.result().code == 0, (end.result().out + end.result().err)[-6000:]
    finally:
        for rank in ranks:
            rank.kill()
        for child in children:
            if child.returncode is None:
                os.killpg(child.pid, 9)
                await child.wait()
        await master.stop()


def expected(model: dict[str, Any], name: str, row: list[Any]) -> int:
    """The digest of the slice of the trainer's tensor that a rank says it holds."""
    offset, size, stride = row[:3]
    part = model[name].reshape(-1).as_strided(size, stride, offset).contiguous()
    return int(xxhash.xxh3_64_intdigest(part.reshape(-1).view(torch.uint8).numpy().data))


@pytest.mark.timeout(400)
def test_engines_that_are_cut_otherwise_than_the_trainer_follow_it_by_differences(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    asyncio.run(run_all(tmp_path))
    models = [load_file(tmp_path / f"{version}.safetensors") for version in range(VERSIONS)]
    whole = sum(value.nbytes for value in models[0].values())
    generated = {}
    for engine, joins in JOINS.items():
        for version in range(joins, VERSIONS):
            found = json.loads((tmp_path / f"{engine}-{version}").read_text())
            assert found["agree"] is None
            assert len(found["reports"]) == int(engine.removeprefix("tp"))
            for report, verified, slices in zip(found["reports"], found["verified"], found["slices"], strict=True):
                assert (report["version"], report["state"], verified) == (version, "intact", ["intact", []])
                assert "in place" in report["verified"]["how"]
                assert set(slices) | set(report["unused"]) == set(models[0])
                held = 0
                for name, rows in slices.items():
                    for row in rows:
                        held += int(np.prod(row[1])) * 2
                        assert int(row[-1], 16) == expected(models[version], name, row), (engine, version, name)
                assert held < whole if engine == "tp2" else held == whole
                # What travelled: the first time all of it, then the changes only.
                if version == joins:
                    assert report["bytes"] > held // 2
                else:
                    assert 0 < report["bytes"] < held // 2
            generated[engine, version] = found["after"]
            if version > joins:
                assert found["before"] == generated[engine, version - 1]
    for version in range(max(JOINS.values()), VERSIONS):
        assert generated["tp1", version] == generated["tp2", version]
    assert len({json.dumps(generated["tp1", version]) for version in range(VERSIONS)}) > 1  # it did learn something
    changed = [
        sum(int((models[version][name] != value).sum()) for name, value in models[version - 1].items())
        for version in range(1, VERSIONS)
    ]
    assert all(0 < count < whole // 2 for count in changed)
