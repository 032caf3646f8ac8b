"""Two ranks of a real engine follow differences that were cut otherwise: each its part in place, or none of them anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.transfer import RelayEndpoint

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
]  # half a minute; what ranks agree on is tested in test_weight_updates_parallel.py

# A process of its own: vLLM's groups live as long as their process. Workers are forked from it.
CHILD = '''
import json, os, sys
from pathlib import Path

def spoil(worker, rank, on):
    """Let the memory of what was staged go bad on one rank, once it was proved."""
    from vllm_rlplugin.weights.delta_update import DeltaBuilder
    if worker.rank == rank:
        if on:
            kept = DeltaBuilder.kept = DeltaBuilder.prove_shards
            def prove(self):
                found = kept(self)
                found.edits[-1].new[0] ^= 1
                return found
            DeltaBuilder.prove_shards = prove
        else:
            DeltaBuilder.prove_shards = DeltaBuilder.kept

def main(settings):
    from vllm_rlplugin.worker.inprocess_engine import prepare_process
    prepare_process(1)
    import torch, vllm_rlplugin
    vllm_rlplugin.activate()
    from orchestrator.api import ShardKey
    from orchestrator.transfer import DeltaCodec, Publisher, RelayEndpoint
    from orchestrator.transfer.job_head import FULL
    from safetensors.torch import save_file
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm_rlplugin.weights.version_agreement import find_disagreement
    from scripts.bench.probes.vllm.recompute_probe import write_tiny_qwen3

    folder, relay = Path(settings["folder"]), RelayEndpoint.from_dict(settings["relay"])
    versions = [{name: one.to(torch.bfloat16) for name, one in write_tiny_qwen3(folder / "new", 2).items()}]
    write_tiny_qwen3(folder / "old", 1)
    for version in range(1, 4):
        versions.append({name: one.clone() for name, one in versions[-1].items()})
        for one in versions[-1].values():
            one.view(-1).view(torch.int16)[version::50] += 1
    save_file(versions[3], str(folder / "new" / "model.safetensors"), metadata={"format": "pt"})
    vllm_rlplugin.register_backend()

    def shards(new, old):
        """In three parts by rows, whatever the engine has of them."""
        for name, one in new.items():
            bounds = [one.shape[0] * part // 3 for part in range(4)]
            for start, stop in zip(bounds, bounds[1:]):
                key = ShardKey(name, 0, start, stop, tuple(one.shape), "bfloat16", "raw", 0)
                part = [None if x is None else x[name][start:stop].contiguous().view(-1).view(torch.uint8).numpy()
                        for x in (new, old)]
                yield key, *part

    def engine(name):
        config = EngineArgs(
            model=str(folder / name), skip_tokenizer_init=True, generation_config="vllm", dtype="bfloat16",
            max_model_len=256, block_size=32, kv_cache_memory_bytes=16 << 20, enforce_eager=True,
            weight_transfer_config={"backend": "rl_coserve"}, disable_log_stats=True, max_num_seqs=8,
            worker_extension_cls="vllm_rlplugin.extension.WorkerExtension", distributed_executor_backend="mp",
            tensor_parallel_size=2).create_engine_config()
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # vLLM for CPUs has just chosen to spawn: imports in each worker
        made = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        made.collective_rpc("rl_ready")
        return made

    found = {}
    fresh = engine("new")
    found["fresh"] = fresh.collective_rpc("compute_weight_checksums")
    fresh.engine_core.shutdown()
    made = engine("old")
    rpc = made.collective_rpc
    publisher = Publisher(relay, codec=DeltaCodec())
    rpc("init_weight_transfer_engine", kwargs={"init_info": {"endpoint": relay.to_dict()}})

    def update(version):
        error = None
        try:
            rpc("start_weight_update")
            rpc("update_weights", kwargs={"update_info": {"version": version}})
            rpc("finish_weight_update")
        except Exception as failure:
            error = str(failure)
        reports = rpc("rl_report")
        return {"error": error, "agree": find_disagreement(reports), "sums": rpc("compute_weight_checksums"), "ranks": [
            {name: report[name] for name in ("rank", "version", "state", "touched")} for report in reports]}

    publisher.publish_shards(0, shards(versions[0], None), FULL)
    found["whole"] = update(0)
    publisher.publish_shards(1, shards(versions[1], versions[0]), 0)
    found["first"] = update(1)
    for version in (2, 3):
        publisher.publish_shards(version, shards(versions[version], versions[version - 1]), version - 1)
    rpc(spoil, args=(1, True))
    found["spoilt"] = update(3)
    rpc(spoil, args=(1, False))
    found["last"] = update(3)
    found["verified"] = rpc("rl_verify")
    made.engine_core.shutdown()
    publisher.close()
    print("FOUND" + json.dumps(found), flush=True)

if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
'''


def test_both_ranks_follow_in_place_or_both_take_everything_back(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    relay = RelayEndpoint(
        job="parallel",
        kind="fsspec",
        master=f"file://{tmp_path}/relay",
        metadata=str(tmp_path / "metadata.sqlite"),
        bucket_bytes=32 << 10,
        snapshot_every=9,
    )
    child = subprocess.run(
        [sys.executable, str(tmp_path / "child.py"), json.dumps({"folder": str(tmp_path), "relay": relay.to_dict()})],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    )
    lines = [line for line in child.stdout.splitlines() if line.startswith("FOUND")]
    assert lines, (child.stdout + child.stderr)[-6000:]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("FOUND"))
    for name in ("whole", "first", "last"):
        assert found[name]["error"] is None
        assert found[name]["agree"] is None
        assert {one["state"] for one in found[name]["ranks"]} == {"intact"}
    assert [one["touched"]["how"] for one in found["whole"]["ranks"]] == ["whole"] * 2
    for name, version in (("first", 1), ("last", 3)):
        for one in found[name]["ranks"]:
            assert (one["version"], one["touched"]["how"]) == (version, "differences")
            assert 0 < one["touched"]["staged_bytes"] == 8 * one["touched"]["elements"]
    assert found["spoilt"]["error"] is not None
    assert [(one["version"], one["state"]) for one in found["spoilt"]["ranks"]] == [(1, "intact")] * 2
    assert found["spoilt"]["agree"] is None
    assert found["spoilt"]["sums"] == found["first"]["sums"] != found["last"]["sums"]
    assert found["last"]["sums"] == found["fresh"]
    assert [one["mismatches"] for one in found["verified"]] == [[], []]
