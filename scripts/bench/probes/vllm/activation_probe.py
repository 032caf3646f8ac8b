"""A rollout engine of a pool with weights of a real model's size, deactivated and activated again: bytes held, seconds, outputs.

``python -m scripts.bench.probes.vllm.activation_probe --model 8b``: a Qwen3 of that shape with vLLM's dummy weights,
alone in a pool of its own. Prints one JSON object: for each round what the device and this process held, and whether
tokens and log-probs of the same prompts are the same, bit for bit, before and after. Exit code 1: they are not, or
weights stayed. Bars of ROSE (4.1), for ``--model 32b``: at most 2 GB held by an inactive engine, active again in at
most 5 s.

``held_bytes`` is what the device has less free than before the engine was started, so others must leave it alone meanwhile, and
the CUDA context is not in it; ``process_bytes`` is NVML's figure with the context, null where NVML cannot say. On a CPU build
it shows that the steps work: dummy weights have no checkpoint, and stay there.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_rlplugin.kvpool.engine.pool_engine import pool_path
from vllm_rlplugin.options import PluginOptions, engine_arguments
from vllm_rlplugin.sleep import sleep_options
from vllm_rlplugin.worker.inprocess_engine import prepare_process

_BLOCKS, _BLOCK_TOKENS = 256, 32  # of the KV cache, at least; vLLM on CPU takes multiples of 32
BARS = {"process_bytes": 2_000_000_000, "activate_seconds": 5.0}


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a Qwen3."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int = 151_936
    head: int = 128

    @property
    def block_bytes(self) -> int:
        """Of a block in a layer, keys and values, 2 bytes each."""
        return _BLOCK_TOKENS * self.kv_heads * self.head * 2 * 2


SHAPES = {
    "tiny": Shape(64, 128, 2, 2, 1, 64, 32),
    "4b": Shape(2560, 9728, 36, 32, 8),
    "8b": Shape(4096, 12288, 36, 32, 8),
    "32b": Shape(5120, 25600, 64, 64, 8),
}


def write_config(folder: Path, shape: Shape) -> None:
    """A Hugging Face folder without weights."""
    found = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(found), encoding="utf-8")


class Probe:
    """One engine, in this process. ``page``: bytes of a page of the pool."""

    def __init__(self, folder: Path, shape: Shape, name: str, *, page: int, eager: bool, offload: bool) -> None:
        on_cpu = prepare_process(len(os.sched_getaffinity(0)), kv_pool=True)
        import torch
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self.on_cpu = on_cpu
        self.device = "CPU" if on_cpu else torch.cuda.get_device_name()
        self._before = self._free()
        group = page // shape.block_bytes if page > shape.block_bytes else 1
        blocks = max(_BLOCKS, 2 * group) // group * group
        cache = blocks * shape.block_bytes * shape.layers
        options = PluginOptions(
            kv_pool=name,
            kv_pool_mib=-(-cache // (1 << 20)) + 1,
            kv_pool_budget_mib=-(-cache // (1 << 20)) + 1,
            kv_pool_page_kib=page >> 10,
            kv_pool_supply="created",  # an inactive engine's pages are nobody's then, and not in the figure
        )
        more = sleep_options.sleep_mode_arguments(options, os.environ, on_cpu=on_cpu)
        arguments = EngineArgs(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            generation_config="vllm",
            dtype="bfloat16",
            max_num_seqs=8,
            max_model_len=1024,
            block_size=_BLOCK_TOKENS,
            num_gpu_blocks_override=blocks,
            kv_cache_memory_bytes=cache,
            enforce_eager=eager or on_cpu,
            disable_log_stats=True,
            **({"sleep_mode_offload_cudagraph": True} if offload else {}),
            **more,
            **engine_arguments(options),
        )
        self._engine: Any = LLMEngine.from_vllm_config(arguments.create_engine_config(), disable_log_stats=True)
        self._core: Any = self._engine.engine_core.engine_core

    def answers(self, tag: str) -> list[Any]:
        """Tokens and log-probs of the same prompts each time."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        sampling = SamplingParams(max_tokens=32, ignore_eos=True, temperature=0.0, logprobs=0, detokenize=False)
        for number in range(8):
            prompt = [(7 * at + 13 * number) % 60 for at in range(64 + 8 * number)]
            self._engine.add_request(f"{tag}-{number}", tokens_input(prompt), sampling)
        found: dict[str, Any] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.finished:
                    made = output.outputs[0]
                    rows = [[row[token].logprob for token in row] for row in made.logprobs]
                    found[output.request_id.rsplit("-")[1]] = [list(made.token_ids), rows]
        return [found[name] for name in sorted(found)]

    def round(self, kept: bool) -> dict[str, Any]:
        """Inactive and active again."""
        self._core.pause_scheduler("keep", clear_cache=False)
        active = {"held_bytes": self._held(), "process_bytes": self._process()}
        began = time.monotonic()
        if why := self._core.rl_coserve("deactivate", {}).get("refused"):
            raise RuntimeError(why)
        (away,) = self._core.collective_rpc("rl_weights_away", None, (kept,))
        gone = time.monotonic()
        inactive = {"held_bytes": self._held(), "process_bytes": self._process()}
        back = time.monotonic()
        if why := self._core.rl_coserve("activate", {}).get("refused"):
            raise RuntimeError(why)
        (here,) = self._core.collective_rpc("rl_weights_back")
        seconds = {"deactivate_seconds": gone - began, "activate_seconds": time.monotonic() - back}
        if why := here["error"] or here["no_room"]:
            raise RuntimeError(why)
        self._core.resume_scheduler()
        return {
            "how": away["how"],
            "weights": away["bytes"],
            "left": away["left"],
            "active": active,
            "inactive": inactive,
            **seconds,
        }

    def _free(self) -> int:
        from vllm_rlplugin.sleep.device_memory import free_memory

        return 0 if self.on_cpu else free_memory()

    def _held(self) -> int | None:
        return None if self.on_cpu else self._before - self._free()

    def _process(self) -> int | None:
        from vllm_rlplugin.sleep.device_memory import process_memory
        from vllm_rlplugin.sleep.host_offload import resident_bytes

        return resident_bytes() if self.on_cpu else process_memory()


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=tuple(SHAPES), default="8b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--page-kib", type=int, default=2048)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--offload-graphs", action="store_true", help="vLLM's --sleep-mode-offload-cudagraph")
    given = parser.parse_args()
    shape, name = SHAPES[given.model], f"activation-probe-{os.getpid()}"
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), shape)
        try:
            probe = Probe(
                Path(folder), shape, name, page=given.page_kib << 10, eager=given.eager, offload=given.offload_graphs
            )
            first = probe.answers("first")
            rounds = []
            for number in range(given.rounds):
                rounds.append(probe.round(kept=True))
                rounds[-1]["equal"] = probe.answers(f"again{number}") == first
        finally:
            pool_path(name).unlink(missing_ok=True)
    equal, left = all(row["equal"] for row in rounds), max(row["left"] for row in rounds)
    worst = max(row["activate_seconds"] for row in rounds)
    known = [row["inactive"]["process_bytes"] for row in rounds if row["inactive"]["process_bytes"] is not None]
    found = {
        "kind": "activation",
        "model": given.model,
        "device": probe.device,
        "vllm": importlib.metadata.version("vllm"),
        "weights_bytes": rounds[0]["weights"],
        "equal": equal,
        "left_bytes": left,
        "process_bytes": max(known, default=None),
        "activate_seconds": worst,
        "rounds": rounds,
    }
    if given.model == "32b":
        found["bars"] = BARS
        found["holds"] = bool(known) and max(known) <= BARS["process_bytes"] and worst <= BARS["activate_seconds"]
    print(json.dumps(found))
    return 0 if equal and (probe.on_cpu or not left) else 1


if __name__ == "__main__":
    sys.exit(main())
