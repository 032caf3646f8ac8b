"""A Megatron-Core loop of your own that trains while your ``vllm serve`` still generates. No orchestrator, no Ray.

    rl-coserve model MODEL                              # or a model of yours: Qwen3's layers, see model_provider
    vllm serve MODEL --plugin rl-coserve --rl-token-file token --logprobs-mode processed_logprobs --dtype float32
    torchrun --nproc-per-node 1 examples/megatron/own_loop.py --model MODEL --token-file token \\
        --rl-weight-relay '{"job": "mine", "kind": "fsspec", "master": "file:///tmp/relay", "metadata": "/tmp/relay.db"}' \\
        --rl-stream-training

Model, DDP, optimizer and forward step are stock Megatron-Core. What rl-coserve adds is marked: two lines, the step, the
publishing, and what the server is asked. The server gets the script's own weights at the first step, so they may be random.
The reward is a toy: the share of even token ids in the answer. It rises from 0.5 within the thirty steps.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rlplugin import cpu
from megatron_rlplugin.flags import add_rl_args, relay_from, temperature_from
from megatron_rlplugin.install import RLTraining, wrap
from megatron_rlplugin.objective.advantages import TrajectoryOutcome, advantages_of
from megatron_rlplugin.objective.policy_loss import Coefficients, Totals, policy_loss
from megatron_rlplugin.objective.user_loss import token_loss_of
from megatron_rlplugin.trainer.micro_batches import MicroBatch, MicroBatchLimits, micro_batch, row_of
from megatron_rlplugin.trainer.replicas import Replicas
from megatron_rlplugin.weights.rank_publisher import TorchRanks
from orchestrator.api import ConfigError, CoserveError, RunError, TrainSample


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the folder that the server serves; its sizes are used here")
    parser.add_argument("--server", default="http://127.0.0.1:8000", help="(default: %(default)s)")
    parser.add_argument("--token-file", required=True, help="the server's --rl-token-file")
    parser.add_argument("--train-iters", type=int, default=30)
    parser.add_argument("--groups", type=int, default=8, help="prompts a step (default: 8)")
    parser.add_argument("--members", type=int, default=8, help="answers a prompt (default: 8)")
    parser.add_argument("--ahead", type=int, default=4, help="prompts that are generated while a step is taken")
    parser.add_argument("--answer-tokens", type=int, default=12)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    add_rl_args(parser)  # <<< rl-coserve, line 1 of 2
    return parser.parse_args()


# -- stock Megatron-Core -----------------------------------------------------------------------------------------------


def model_provider(args: argparse.Namespace, shape: dict[str, Any]) -> Any:
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=shape["num_hidden_layers"],
        hidden_size=shape["hidden_size"],
        ffn_hidden_size=shape["intermediate_size"],
        num_attention_heads=shape["num_attention_heads"],
        num_query_groups=shape["num_key_value_heads"],
        kv_channels=shape["head_dim"],
        layernorm_epsilon=shape["rms_norm_eps"],
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        use_cpu_initialization=True,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
    )
    config.finalize_model_grads_func = finalize_model_grads
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"),
        shape["vocab_size"],
        shape["max_position_embeddings"],
        position_embedding_type="rope",
        rotary_base=shape["rope_theta"],
        share_embeddings_and_output_weights=shape["tie_word_embeddings"],
    )
    if torch.cuda.is_available():
        model.cuda()
    return DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)


def optimizer_provider(args: argparse.Namespace, model: Any) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    return get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=args.lr, clip_grad=1.0), [model])


def forward_step_provider(args: argparse.Namespace, rl: RLTraining) -> Any:
    """Megatron's forward step. Its loss function returns (SUM, denominator, report)."""
    from megatron.core import parallel_state

    coefficients, temperature = Coefficients.from_settings(rl.settings), temperature_from(args)
    token_loss = token_loss_of(rl.settings)
    group = parallel_state.get_tensor_model_parallel_group() if args.tensor_model_parallel_size > 1 else None

    def forward_step(data: Iterator[MicroBatch], model: Any) -> tuple[Any, Any]:
        batch = next(data)
        length = batch.inputs_BS.shape[1]
        mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool, device=batch.inputs_BS.device), 1)
        logits_BSV = model(batch.inputs_BS, batch.positions_BS, mask)

        def loss_function(logits_BSV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Totals]:
            loss, totals = policy_loss(
                batch.select(logits_BSV), batch.tokens, coefficients, temperature, group, token_loss
            )
            return loss, torch.tensor(batch.tokens.denominator, dtype=torch.int, device=loss.device), totals

        return logits_BSV, loss_function

    return forward_step


# -- rl-coserve: the rollout -------------------------------------------------------------------------------------------


class Server:
    """A ``vllm serve`` with the plugin (docs/vllm.md, Endpoints)."""

    def __init__(self, url: str, token: str) -> None:
        self.url, self._token, self._read = url, token, ""

    def call(self, path: str, body: Any = None) -> Any:
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        data = None if path.startswith("/rl/completions") else json.dumps(body or {}).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=120) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise RunError(f"{self.url}{path}: {error.code} {error.read().decode(errors='replace')}") from error
        except urllib.error.URLError as error:
            raise RunError(f"{self.url}{path}: {error.reason}; is `vllm serve` running there?") from error

    def update(self, version: int) -> None:
        """New weights; requests in flight keep their tokens and continue with them."""
        self.call("/rl/prepare", {"version": version})  # fetched and checked while the server generates
        self.call("/rl/suspend")
        self.call("/rl/update", {"version": version})
        self.call("/rl/resume")

    def completions(self) -> list[dict[str, Any]]:
        answer = self.call(f"/rl/completions?timeout=20{self._read}")
        self._read = f"&acknowledged={answer['sequence']}"
        return list(answer["completions"])


def reward(answer: list[int]) -> float:
    return sum(token % 2 == 0 for token in answer) / len(answer)


class Rollout:
    """Groups of answers to random prompts, the finished ones first; rank 0 asks the server and tells the others."""

    def __init__(self, args: argparse.Namespace, server: Server, vocabulary: int) -> None:
        self._args, self._server, self._vocabulary = args, server, vocabulary
        self._ranks, self._dice, self._asked = TorchRanks(), random.Random(0), 0
        self._open: dict[str, tuple[list[int], list[dict[str, Any]]]] = {}  # group -> prompt, its finished members

    def groups(self) -> Iterator[list[TrainSample]]:
        """As many as a step takes, each as soon as it is complete. Every rank goes through it."""
        for place in range(self._args.groups):
            group = self._next(self._args.groups - place + self._args.ahead) if dist.get_rank() == 0 else None
            told = json.loads(self._ranks.broadcast(json.dumps(group).encode()))
            yield [sample(told["name"], number, told["prompt"], one) for number, one in enumerate(told["members"])]

    def _next(self, wanted: int) -> dict[str, Any]:
        """One that is complete; ``wanted`` are under way meanwhile."""
        while len(self._open) < wanted:
            name, self._asked = f"prompt-{self._asked}", self._asked + 1
            self._open[name] = [self._dice.randrange(self._vocabulary) for _ in range(4)], []
            self._ask(name, range(self._args.members))
        while True:
            for name, (prompt, members) in self._open.items():
                if len(members) == self._args.members:
                    del self._open[name]
                    return {"name": name, "prompt": prompt, "members": members}
            for done in self._server.completions():
                name, number = done["request_id"].split("/")[1:3]
                if name not in self._open:
                    continue  # of a run of before
                if done["finish_reason"] == "error":
                    raise RunError(f"{done['request_id']}: {done['error']}")
                if done["finish_reason"] == "abort":  # a server in a KV pool hands requests back: ask again
                    self._ask(name, [int(number)])
                else:
                    self._open[name][1].append(done)

    def _ask(self, name: str, numbers: Any) -> None:
        prompt, sampling = self._open[name][0], {"max_tokens": self._args.answer_tokens, "temperature": 1.0}
        rows = []
        for number in numbers:
            trajectory = f"{os.getpid()}/{name}/{number}"
            rows.append({"request_id": f"{trajectory}/{self._dice.getrandbits(32)}", "trajectory_id": trajectory})
            rows[-1] |= {"token_ids": prompt, "sampling": sampling}
        self._server.call("/rl/add", {"requests": rows})


def sample(group: str, number: int, prompt: list[int], done: dict[str, Any]) -> TrainSample:
    answer = done["token_ids"]
    return TrainSample(
        trajectory_id=f"{group}/{number}",
        group_id=group,
        token_ids=(*prompt, *answer),
        loss_mask=(0,) * len(prompt) + (1,) * len(answer),
        logprobs=(0.0,) * len(prompt) + tuple(done["logprobs"]),
        versions=tuple((version, tokens) for version, tokens in done["versions"]),
        reward=reward(answer),
    )


def micro_batches(
    groups: Iterator[list[TrainSample]], rl: RLTraining, version: int, seen: list[TrainSample]
) -> Iterator[MicroBatch]:
    """Of the groups of this data-parallel replica, while the server makes the next ones."""
    replicas, settings = Replicas(), rl.settings
    limits = MicroBatchLimits(settings.micro_batch_size, "arrival", tokens=settings.micro_batch_tokens)
    for place, group in enumerate(groups):
        seen += group
        if place % replicas.count != replicas.index:
            continue
        rows = [row_of(one, version, settings.max_token_lag) for one in group]
        found = advantages_of([TrajectoryOutcome(row.group, row.reward, row.kept) for row in rows], settings).advantages
        rows = [replace(row, advantages=value) for row, value in zip(rows, found, strict=True)]
        chosen = [index for index, row in enumerate(rows) if row.kept.any()]
        for start in range(0, len(chosen), limits.size):
            yield micro_batch(rows, chosen[start : start + limits.size], limits, settings.loss_mean)


def train(args: argparse.Namespace, rl: RLTraining, rollout: Rollout, server: Server) -> None:
    forward_step, replicas = forward_step_provider(args, rl), Replicas()
    for version in range(args.train_iters):
        rl.publish(version)  # <<< every rank its own shards
        if replicas.rank == 0:
            if version == 0:  # the server is told where weights come from
                server.call("/init_weight_transfer_engine", {"init_info": {"endpoint": relay_from(args).to_dict()}})
            server.update(version)
        seen: list[TrainSample] = []
        data = micro_batches(rollout.groups(), rl, version, seen)
        result, reports = rl.step(  # <<< gradients of what is finished, while the rest is generated
            forward_step, data, seq_length=4 + args.answer_tokens, micro_batch_size=args.micro_batch_size
        )
        totals = Totals()
        for report in reports:
            totals.add(report)
        values = replicas.sum_report(totals).metrics()
        lag = version - min(one.versions[0][0] for one in seen)
        if replicas.rank == 0:
            print(
                f" iteration {version:4d} | reward: {sum(one.reward for one in seen) / len(seen):.3f} | lag: {lag} | "
                f"loss: {values['loss']:.6E} | grad norm: {result.grad_norm:.3f} | "
                f"logprob gap: {values.get('logprob_gap_mean', float('nan')):.1E}",
                flush=True,
            )


def main() -> None:
    args = parse_args()
    shape = json.loads((Path(args.model) / "config.json").read_text(encoding="utf-8"))
    if relay_from(args) is None:
        raise ConfigError("--rl-weight-relay", None, "is needed: the server gets the weights through it")
    from megatron.core import parallel_state

    cpu.activate()  # <<< only for a machine without CUDA; with CUDA it does nothing
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    parallel_state.initialize_model_parallel(args.tensor_model_parallel_size)
    torch.manual_seed(1)
    model = model_provider(args, shape)
    optimizer = optimizer_provider(args, model)
    rl = wrap([model], optimizer, args)  # <<< rl-coserve, line 2 of 2
    server = Server(args.server, Path(args.token_file).read_text(encoding="utf-8").strip())
    train(args, rl, Rollout(args, server, shape["vocab_size"]), server)
    rl.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except CoserveError as error:
        sys.exit(f"own_loop.py: {error}")
