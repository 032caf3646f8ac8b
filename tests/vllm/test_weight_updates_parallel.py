"""Weight updates of engines with several ranks, over a real Mooncake Store: every rank gets its part, or none gets any."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.runtime.mooncake_master import MooncakeMaster
from orchestrator.transfer import RelayEndpoint

pytestmark = pytest.mark.engine

# A process of its own: vLLM's groups and Mooncake's threads live as long as their process. Workers are forked from it.
CHILD = '''
import gc, json, os, random, sys, time

def flip(worker, rank):
    """One bit of one parameter of one rank."""
    if worker.rank == rank:
        import torch
        name, parameter = [item for item in worker.model_runner.model.named_parameters() if "down_proj" in item[0]][-1]
        parameter.data.view(torch.int32).view(-1)[7] ^= 1

def damage_while_loading(worker, rank, on):
    """Let what is copied into the model on one rank go wrong."""
    from vllm_rlplugin.weights import live_weights as loaded
    if worker.rank == rank:
        kept = loaded.MappedWeights.mismatches
        if on:
            def mismatches(self):
                target = self.mapping.slices[-1].target
                target.view(-1)[0] += 1.0
                return kept(self)
            loaded.kept, loaded.MappedWeights.mismatches = kept, mismatches
        else:
            loaded.MappedWeights.mismatches = loaded.kept

def cut_off(worker, rank, on):
    """Let the relay be out of reach of one rank."""
    from vllm_rlplugin.weights import version_fetch as fetching
    if worker.rank == rank:
        if on:
            fetching.kept = fetching.VersionFetcher.take_staged
            fetching.VersionFetcher.take_staged = lambda *_: fetching.FetchRefusal("out of reach", True)
        else:
            fetching.VersionFetcher.take_staged = fetching.kept

def main(settings):
    from vllm_rlplugin.worker.inprocess_engine import prepare_process
    prepare_process(1)
    import vllm_rlplugin
    vllm_rlplugin.activate()
    from orchestrator.transfer import Publisher, RelayEndpoint
    from vllm.engine.arg_utils import EngineArgs
    from vllm.inputs import tokens_input
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm_rlplugin.weights.version_agreement import find_disagreement
    from scripts.bench.probes.vllm.recompute_probe import publish, write_tiny_qwen3

    folder, tied = settings["folder"], settings["tied"]
    from pathlib import Path
    weights = {name: write_tiny_qwen3(Path(folder) / name, seed, tied=tied) for name, seed in (("old", 1), ("new", 2))}
    relay = RelayEndpoint.from_dict(settings["relay"])
    vllm_rlplugin.register_backend()
    found, draw = {}, random.Random(3)
    prompts = [[draw.randrange(64) for _ in range(draw.randint(5, 40))] for _ in range(6)]

    def engine(name):
        config = EngineArgs(
            model=str(Path(folder) / name), skip_tokenizer_init=True, generation_config="vllm", dtype="float32",
            max_model_len=256, block_size=32, kv_cache_memory_bytes=16 << 20, enforce_eager=True,
            weight_transfer_config={"backend": "rl_coserve"}, disable_log_stats=True, max_num_seqs=8,
            worker_extension_cls="vllm_rlplugin.extension.WorkerExtension", distributed_executor_backend="mp",
            tensor_parallel_size=settings["tp"], pipeline_parallel_size=settings["pp"]).create_engine_config()
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # vLLM for CPUs has just chosen to spawn: imports in each worker
        gc.freeze()  # what was imported is no garbage, in the workers that are forked from here neither
        made = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        found.setdefault("ready", made.collective_rpc("rl_ready"))
        if not found["ready"][-1]["cured"]:
            made.collective_rpc("rl_ready")
        return made

    def answers(made, meanwhile=None):
        sampling = SamplingParams(max_tokens=24, temperature=0.0, detokenize=False)
        for index, prompt in enumerate(prompts):
            made.add_request(f"r{index}", tokens_input(prompt), sampling)
        texts, turns = {}, 0
        while made.has_unfinished_requests():
            for output in made.step():
                texts[output.request_id] = list(output.outputs[0].token_ids)
            turns += 1
            if meanwhile:
                meanwhile(turns)
        made.reset_prefix_cache()
        return [texts[f"r{index}"] for index in range(len(prompts))]

    def update(made, version):
        """The error, or None; and every rank's report."""
        error = None
        try:
            made.collective_rpc("start_weight_update")
            made.collective_rpc("update_weights", kwargs={"update_info": {"version": version}})
            made.collective_rpc("finish_weight_update")
        except Exception as failure:
            error = str(failure)
        return error, made.collective_rpc("rl_report")

    fresh = engine("new")
    found["fresh"], found["fresh_sums"] = answers(fresh), fresh.collective_rpc("compute_weight_checksums")
    found["fresh_slices"] = [part["slices"] for part in fresh.collective_rpc("rl_verify")]
    fresh.engine_core.shutdown()
    made = engine("old")
    publisher = Publisher(relay)  # Mooncake brings threads: after the last fork
    publish(publisher, 1, weights["new"])
    rpc = made.collective_rpc
    rpc("init_weight_transfer_engine", kwargs={"init_info": {"endpoint": relay.to_dict()}})
    found["before"] = answers(made)
    states = []

    def prepare(turn):
        if not states:
            rpc("rl_prepare", args=(1,))
        states.append([answer["state"] for answer in rpc("rl_prepared", args=(1,))])

    found["while_fetching"] = []
    while not states or "fetching" in states[-1]:
        found["while_fetching"].append(answers(made, prepare))
    found["prepared"] = states[-1]
    found["error"], reports = update(made, 1)
    found["reports"], found["agree"] = reports, find_disagreement(reports)
    found["sums"], found["after"] = rpc("compute_weight_checksums"), answers(made)
    found["slices"] = [report["slices"] for report in reports]
    found["lost_rank"] = find_disagreement(reports[:1])
    for report in reports:
        report["slices"] = {name: rows[:-1] if "down_proj" in name and report["rank"] else rows
                            for name, rows in report["slices"].items()}
    found["lost_slice"] = find_disagreement(reports)

    # A version that does not fit: nobody changes anything, and the executor stays in step.
    publish(publisher, 2, {name: tensor for name, tensor in weights["old"].items() if name != "model.norm.weight"})
    found["misfit"], reports = update(made, 2)
    found["misfit_reports"] = [[report["rank"], report["version"], report["state"]] for report in reports]
    found["misfit_sums"] = rpc("compute_weight_checksums")

    # A version that only one rank can get: the same.
    publish(publisher, 3, weights["old"])
    rpc(cut_off, args=(settings["cut_off"], True))
    found["cut_off"], reports = update(made, 3)
    found["cut_off_reports"] = [[report["rank"], report["version"], report["state"]] for report in reports]
    found["cut_off_errors"] = [report["error"] for report in reports]
    found["cut_off_sums"] = rpc("compute_weight_checksums")
    rpc(cut_off, args=(settings["cut_off"], False))

    rpc(flip, args=(1,))
    found["flipped"] = rpc("rl_verify")
    found["flipped_agree"] = find_disagreement(rpc("rl_report"))
    publish(publisher, 4, weights["new"])
    rpc(damage_while_loading, args=(1, True))
    found["damaged"], reports = update(made, 4)
    found["damaged_states"] = [report["state"] for report in reports]
    found["damaged_agree"] = find_disagreement(reports)
    rpc(damage_while_loading, args=(1, False))
    found["cured"], reports = update(made, 4)
    found["cured_agree"], found["cured_version"] = find_disagreement(reports), [report["version"] for report in reports]
    found["cured_sums"], found["cured_after"] = rpc("compute_weight_checksums"), answers(made)
    made.engine_core.shutdown()
    publisher.close()
    print("FOUND" + json.dumps(found), flush=True)

if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
'''


# Whole experts on each rank. A stand-in passes on the map that vLLM's CPU backend drops (check_experts).
EXPERTS = """
import gc, json, os, sys
from pathlib import Path

def main(settings):
    from vllm_rlplugin.worker.inprocess_engine import prepare_process
    prepare_process(1)
    import vllm_rlplugin
    vllm_rlplugin.activate()
    from safetensors.torch import save_file
    from orchestrator.transfer import Publisher, RelayEndpoint
    from vllm.engine.arg_utils import EngineArgs
    from vllm.inputs import tokens_input
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm_rlplugin.weights.version_agreement import find_disagreement
    from scripts.bench.probes.vllm.recompute_probe import publish
    from tests.support.family_models import file_tensors, write_family

    stock = CPUUnquantizedExperts.apply

    def apply(self, **given):
        own = given.get("expert_map")
        if own is not None:  # -1: another rank's, which adds its part
            ids = own[given["topk_ids"].long()]
            given["topk_weights"] = given["topk_weights"].masked_fill(ids < 0, 0.0)
            given["topk_ids"] = ids.clamp(min=0).to(given["topk_ids"].dtype)
        return stock(self, **given)

    CPUUnquantizedExperts.apply = apply  # in the workers, which are forked from here, too
    folder, weights = Path(settings["folder"]), {}
    for name in ("old", "new"):
        weights[name] = file_tensors(write_family(folder / name, "qwen3-moe"))
    (folder / "new" / "model.safetensors").unlink()
    weights["new"] = {name: tensor.flip(0).contiguous() for name, tensor in weights["new"].items()}
    save_file(weights["new"], folder / "new" / "model.safetensors", metadata={"format": "pt"})
    relay, found = RelayEndpoint.from_dict(settings["relay"]), {}
    vllm_rlplugin.register_backend()

    def engine(name, whole=True):
        config = EngineArgs(
            model=str(folder / name), skip_tokenizer_init=True, generation_config="vllm", dtype="float32",
            max_model_len=256, block_size=32, kv_cache_memory_bytes=16 << 20, enforce_eager=True,
            weight_transfer_config={"backend": "rl_coserve"}, disable_log_stats=True, max_num_seqs=8,
            worker_extension_cls="vllm_rlplugin.extension.WorkerExtension", distributed_executor_backend="mp",
            tensor_parallel_size=2, enable_expert_parallel=whole).create_engine_config()
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        gc.freeze()
        made = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        made.collective_rpc("rl_ready")
        return made

    def experts(worker):
        modules = worker.model_runner.model.modules()
        return [[m.local_num_experts, m.global_num_experts] for m in modules if hasattr(m, "local_num_experts")]

    def answers(made):
        sampling = SamplingParams(max_tokens=16, temperature=0.0, detokenize=False)
        for index in range(4):
            made.add_request(f"r{index}", tokens_input([3 + index, 7, 11, 19, 23 + index]), sampling)
        texts = {}
        while made.has_unfinished_requests():
            for output in made.step():
                texts[output.request_id] = list(output.outputs[0].token_ids)
        made.reset_prefix_cache()
        return [texts[f"r{index}"] for index in range(4)]

    sliced = engine("new", whole=False)
    found["sliced_says"], found["slices"] = answers(sliced), sliced.collective_rpc(experts)
    sliced.engine_core.shutdown()
    fresh = engine("new")
    found["experts"], found["fresh"] = fresh.collective_rpc(experts), fresh.collective_rpc("compute_weight_checksums")
    found["fresh_says"] = answers(fresh)
    fresh.engine_core.shutdown()
    made = engine("old")
    found["before_says"] = answers(made)
    publisher = Publisher(relay)
    publish(publisher, 1, weights["new"])
    made.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {"endpoint": relay.to_dict()}})
    found["before"] = made.collective_rpc("compute_weight_checksums")
    made.collective_rpc("start_weight_update")
    made.collective_rpc("update_weights", kwargs={"update_info": {"version": 1}})
    made.collective_rpc("finish_weight_update")
    reports = made.collective_rpc("rl_report")
    found["agree"], found["how"] = find_disagreement(reports), [report["verified"]["how"] for report in reports]
    found["after"], found["after_says"] = made.collective_rpc("compute_weight_checksums"), answers(made)
    made.engine_core.shutdown()
    publisher.close()
    print("FOUND" + json.dumps(found), flush=True)

if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
"""


async def run_child(folder: Path, *, tp: int, pp: int, tied: bool, program: str = CHILD) -> dict[str, Any]:
    """What the child found."""
    (folder / "child.py").write_text(program)
    master = MooncakeMaster(log=folder / "master.log")
    await master.start()
    try:
        relay = RelayEndpoint(
            job=f"parallel-{os.getpid()}-{tp}{pp}",
            master=master.address,
            metadata=str(folder / "metadata.sqlite"),
            segment_bytes=16 << 20,
            bucket_bytes=64 << 10,
        )
        settings = {"folder": str(folder), "relay": relay.to_dict(), "tp": tp, "pp": pp, "tied": tied}
        settings["cut_off"] = 0 if tied else 1  # the rank that cannot reach the relay
        environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            str(folder / "child.py"),
            json.dumps(settings),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        output, _ = await child.communicate()
    finally:
        await master.stop()
    text = output.decode(errors="replace")
    lines = [line for line in text.splitlines() if line.startswith("FOUND")]
    assert lines, text[-6000:]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("FOUND"))
    return found


def check(found: dict[str, Any]) -> None:
    """What holds for any way to split a model over two ranks."""
    # The update: every rank has its part of the new weights, and nothing else differs from a fresh engine.
    assert found["error"] is None
    assert found["agree"] is None
    assert [report["rank"] for report in found["reports"]] == [0, 1]
    assert {report["verified"]["how"] for report in found["reports"]} == {
        "in place, digest of every live slice compared"
    }
    assert found["after"] == found["fresh"] != found["before"]
    assert found["sums"] == found["fresh_sums"]
    assert found["slices"] == found["fresh_slices"]
    # Tokens were generated after PREPARE, and with the old weights.
    assert all(answers == found["before"] for answers in found["while_fetching"])
    assert found["prepared"] == ["ready", "ready"]
    # What agreement would not see, it could not refuse.
    assert "the engine has 2" in found["lost_rank"]
    assert "down_proj" in found["lost_slice"]
    # Refused on all ranks alike; the answers that follow belong to the calls that follow.
    assert "missing: model.norm.weight" in found["misfit"]
    assert found["misfit_reports"] == [[0, 1, "intact"], [1, 1, "intact"]]
    assert found["misfit_sums"] == found["sums"]
    assert found["cut_off"] is not None
    assert found["cut_off_reports"] == found["misfit_reports"]
    assert "out of reach" in "".join(found["cut_off_errors"])
    assert found["cut_off_sums"] == found["sums"]
    # A bit that flips later, and one that flips while loading, are named with their rank; an update cures both.
    first, second = found["flipped"]
    assert first["state"] == "intact"
    assert first["mismatches"] == []
    assert second["state"] == "unusable"
    assert [item["parameter"].endswith("down_proj.weight") for item in second["mismatches"]] == [True]
    assert "rank 1" in found["flipped_agree"]
    assert "down_proj" in found["flipped_agree"]
    assert found["damaged"] is not None
    assert found["damaged_states"] == ["unusable", "unusable"]
    assert "rank" in found["damaged_agree"]
    assert found["cured"] is None
    assert found["cured_agree"] is None
    assert found["cured_version"] == [4, 4]
    assert found["cured_sums"] == found["sums"]
    assert found["cured_after"] == found["after"]


def test_both_ranks_of_a_tensor_parallel_engine_get_exactly_their_slices(tmp_path: Path) -> None:
    found = asyncio.run(run_child(tmp_path, tp=2, pp=1, tied=False))
    check(found)
    rows = [slices["model.layers.0.self_attn.q_proj.weight"] for slices in found["slices"]]
    assert [row[0][:2] for row in rows] == [[0, [32, 64]], [32 * 64, [32, 64]]]
    # One key-value head: both ranks hold it whole, and the replicas agree.
    keys = [slices["model.layers.0.self_attn.k_proj.weight"] for slices in found["slices"]]
    assert keys[0] == keys[1]


@pytest.mark.long  # a minute; the agreement of stages is tested without an engine in test_version_agreement.py
def test_both_stages_of_a_pipeline_get_exactly_their_layers(tmp_path: Path) -> None:
    found = asyncio.run(run_child(tmp_path, tp=1, pp=2, tied=True))
    check(found)
    assert found["ready"][1]["cured"] == ["intermediate_tensors"]
    layers = [{name.split(".")[2] for name in slices if ".layers." in name} for slices in found["slices"]]
    assert layers == [{"0"}, {"1"}]
    # Only what a stage needs was fetched.
    whole = sum(report["bytes"] for report in found["reports"])
    assert max(report["bytes"] for report in found["reports"]) < whole


@pytest.mark.long
def test_each_rank_gets_the_new_weights_of_its_whole_experts(tmp_path: Path) -> None:
    found = asyncio.run(run_child(tmp_path, tp=2, pp=1, tied=False, program=EXPERTS))
    assert found["experts"] == [[[2, 4]] * 4] * 2, "half of the experts of each layer, whole"
    assert found["agree"] is None
    assert found["how"] == ["layerwise reload, tensors verified before loading"] * 2
    assert found["after"] == found["fresh"] != found["before"]
    assert found["after"][0] != found["after"][1]
    assert found["slices"] == [[[4, 4]] * 4] * 2, "the other way to hold them: a slice of every one"
    assert found["after_says"] == found["fresh_says"] == found["sliced_says"] != found["before_says"]
