"""The flags: inert until given, none is Megatron's own, each a trainer setting; stock ``pretrain()`` streams the same."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import free_port

pytest.importorskip("torch")

from megatron_rlplugin import flags
from megatron_rlplugin.flags import add_rl_args, flag_table, relay_from, settings_from
from orchestrator.api import ConfigError
from orchestrator.settings.trainer_settings import TrainerSettings

ROOT = Path(__file__).parents[2]
NEWEST = ROOT / ".venv/alternates/megatron-core-0.19.2"
needs_newest = pytest.mark.skipif(not NEWEST.is_dir(), reason="the wheel of Megatron-Core 0.19.2 is not unpacked")


def parse(*words: str, then: flags.Provider | None = None) -> argparse.Namespace:
    return add_rl_args(argparse.ArgumentParser(allow_abbrev=False), then).parse_args(words)


def test_not_given_they_are_the_trainers_defaults() -> None:
    assert settings_from(parse()) == TrainerSettings()
    assert relay_from(parse()) is None


def test_a_provider_of_ones_own_is_called_after_it_and_the_parser_comes_back() -> None:
    def mine(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--mine", type=int, default=0)
        return parser

    args = parse("--mine", "3", "--rl-objective", "dapo", then=mine)
    assert (args.mine, settings_from(args).objective) == (3, "dapo")


def test_megatrons_own_arguments_are_read_where_they_are() -> None:
    args = parse("--rl-stream-training", "--rl-clip-high", "0.3", "--no-rl-normalize-advantage")
    args.lr, args.min_lr, args.lr_decay_style, args.clip_grad, args.micro_batch_size = 1e-4, 1e-5, "cosine", 0.5, 2
    args.tensor_model_parallel_size, args.use_distributed_optimizer, args.weight_decay = 2, True, None
    assert settings_from(args) == TrainerSettings(
        learning_rate=1e-4,
        final_learning_rate=1e-5,
        lr_decay="cosine",
        clip_grad=0.5,
        micro_batch_size=2,
        tensor_parallel=2,
        distributed_optimizer=True,
        stream=True,
        clip_high=0.3,
        normalize_advantage=False,
    )


def test_streaming_sets_what_it_needs_of_megatrons_flags_and_nothing_else_does() -> None:
    def megatrons(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        for name in flags.STREAM_NEEDS:
            parser.add_argument(f"--{name.replace('_', '-')}", action="store_true")
        return parser

    without, streaming = parse(then=megatrons), parse("--rl-stream-training", then=megatrons)
    assert [getattr(without, name) for name in flags.STREAM_NEEDS] == [False, False]
    assert [getattr(streaming, name) for name in flags.STREAM_NEEDS] == [True, True]
    assert not any(hasattr(parse("--rl-stream-training"), name) for name in flags.STREAM_NEEDS)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--rl-clip-low", "1.5"), "--rl-clip-low = 1.5"),
        (("--rl-tis-cap", "0"), "--rl-tis-cap = 0.0"),
        (("--rl-grad-offload",), "--rl-grad-offload = True: is for the pauses of a stream: set --rl-stream-training"),
        (("--rl-kl-coefficient", "0.1", "--rl-kl-estimator", "k1"), "--rl-kl-estimator = 'k1'"),
        (("--rl-stream-training", "--rl-minibatches", "2"), "--rl-minibatches = 2"),
    ],
)
def test_a_wrong_value_is_an_error_in_the_words_of_the_command_line(words: tuple[str, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)) as caught:
        settings_from(parse(*words))
    assert "trainer." not in str(caught.value)


def test_a_parser_without_the_flags_is_an_error_that_says_so() -> None:
    with pytest.raises(ConfigError, match="add_rl_args"):
        settings_from(argparse.Namespace())


def test_the_relay_is_json_or_a_file_of_it(tmp_path: Path) -> None:
    text = json.dumps({"job": "j", "kind": "memory", "master": "m"})
    (tmp_path / "relay.json").write_text(text)
    for given in (text, str(tmp_path / "relay.json")):
        endpoint = relay_from(parse("--rl-weight-relay", given))
        assert endpoint is not None
        assert (endpoint.job, endpoint.kind) == ("j", "memory")
    for wrong in ("no-such-file", "{", "[]", '{"job": "j", "colour": 1}', "{}"):
        with pytest.raises(ConfigError, match="--rl-weight-relay"):
            relay_from(parse("--rl-weight-relay", wrong))


def test_the_page_shows_the_flags_as_help_does() -> None:
    page = (ROOT / "docs/megatron.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| `(--rl-[a-z-]+)` \| ([^|]*) \| ([^|]*) \|$", page, re.MULTILINE)
    assert [(name, default.strip(), text.strip()) for name, default, text in shown] == flag_table()


# -- stock megatron.training.pretrain() ------------------------------------------------------------------------------

# What stock training needs to start without CUDA is stubbed here: it is no part of the plugin.
PRETRAIN = """
import sys, typing, warnings
warnings.filterwarnings("ignore")
import typing_extensions
typing.override = typing_extensions.override  # the wheel is for Python 3.12
import torch

torch.set_num_threads(1)
from megatron_rlplugin import cpu

cpu.activate()

class CudaIsCpu(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            del kwargs["pin_memory"]
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        return func(*args, **kwargs)

CudaIsCpu().__enter__()
c = torch.cuda
# Megatron alone is told that there is a GPU.
c.is_available = lambda: sys._getframe(1).f_globals["__name__"].startswith("megatron.")
c.device_count, c.set_device = lambda: 1, lambda *a: None
c.get_device_capability = lambda *a: (9, 0)
c.get_device_properties = lambda *a: type("P", (), dict(major=9, minor=0, total_memory=1 << 34, multi_processor_count=1))()
for n in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "reset_peak_memory_stats"):
    setattr(c, n, lambda *a, **k: 0)
c.memory_stats, c.manual_seed, c.mem_get_info = lambda *a: {}, lambda *a: None, lambda *a: (1 << 33, 1 << 34)
c.get_rng_state, c.set_rng_state = lambda *a: torch.get_rng_state(), lambda *a: None
c.synchronize = c.empty_cache = lambda *a: None

class Stream:
    def wait_stream(self, *a): pass
    def synchronize(self): pass
    wait_event = record_event = wait_stream

import contextlib
c.Stream, c.stream, c.current_stream = Stream, (lambda *a: contextlib.nullcontext()), lambda *a: Stream()

from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
import megatron.core.tensor_parallel as tp
import megatron.training.initialize as initialize
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import core_transformer_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

tp.model_parallel_cuda_manual_seed = lambda *a, **k: None
initialize._compile_dependencies = lambda *a, **k: None
initialize._set_random_seed = lambda *a, **k: torch.manual_seed(1)

from megatron_rlplugin.flags import add_rl_args
from megatron_rlplugin.install import install
from megatron_rlplugin.stream.gradient_stream import GradientStream

def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    args = get_args()
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    return GPTModel(config or core_transformer_config_from_args(args), spec, args.padded_vocab_size, args.max_position_embeddings,
                    pre_process, post_process, position_embedding_type="rope", pg_collection=pg_collection)

def forward_step(data, model):
    length, seed = 16, int(next(data)["x"])
    tokens = torch.randint(0, 128, (1, length + 1), generator=torch.Generator().manual_seed(seed))
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    losses = model(tokens[:, :-1], torch.arange(length)[None], mask, labels=tokens[:, 1:])
    def loss(l):
        report = torch.stack([l.detach().sum(), torch.tensor(float(l.numel()))])
        return l.sum(), torch.tensor(l.numel(), dtype=torch.int), {"lm loss": report}
    return losses, loss

class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, i): return {"x": torch.tensor(i)}

def data(_):
    return Numbers(), None, None
data.is_distributed = True
args = parse_and_validate_args(extra_args_provider=add_rl_args)
streamed = install(args)
fed = 0
feed = GradientStream.feed

def counting(*args, num_microbatches, **kwargs):
    global fed
    fed += num_microbatches
    return feed(*args, num_microbatches=num_microbatches, **kwargs)

GradientStream.feed = counting
pretrain(pretrain_cfg_container_from_args(args), data, ModelType.encoder_or_decoder, forward_step, model_provider)
print("STREAMED", streamed, "fed", fed, flush=True)
"""
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 64 "
    "--vocab-size 128 --tokenizer-type NullTokenizer --swiglu --qk-layernorm --normalization RMSNorm "
    "--disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --transformer-impl local "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --use-cpu-initialization "
    "--no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion "
    "--no-gradient-accumulation-fusion --no-persist-layer-norm"
)
TRAINING = (
    "--micro-batch-size 1 --global-batch-size 6 --train-iters 3 --lr 1e-2 --lr-decay-style constant --clip-grad 1.0 "
    "--distributed-backend gloo --log-interval 1 --eval-iters 0 --eval-interval 100 --no-load-rng --num-workers 0"
)


def pretrain(*words: str) -> subprocess.CompletedProcess[str]:
    port = str(free_port())
    environment = os.environ | {
        "PYTHONPATH": f"{NEWEST}{os.pathsep}{ROOT}",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": "1",
        "RANK": "0",
        "LOCAL_RANK": "0",
    }
    command = [sys.executable, "-c", PRETRAIN, *MODEL.split(), *TRAINING.split(), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)


def logged(done: subprocess.CompletedProcess[str]) -> list[tuple[str, str]]:
    """(loss, gradient norm) of each iteration, as Megatron logs them."""
    found = re.findall(r"lm loss: (\S+) .*?grad norm: (\S+)", done.stdout)
    assert len(found) == 3, done.stdout[-1000:] + done.stderr[-3000:]
    return [(loss, norm) for loss, norm in found]


@pytest.mark.engine
@needs_newest
@pytest.mark.timeout(600)
def test_stock_pretrain_logs_the_same_losses_and_norms_with_streaming() -> None:
    stock = pretrain("--calculate-per-token-loss", "--accumulate-allreduce-grads-in-fp32")
    assert "STREAMED False fed 0" in stock.stdout, stock.stderr[-3000:]
    streamed = pretrain("--rl-stream-training")
    assert "STREAMED True fed 18" in streamed.stdout, streamed.stderr[-3000:]
    assert logged(streamed) == logged(stock)


@pytest.mark.engine
@needs_newest
def test_no_flag_and_no_attribute_is_megatrons_own() -> None:
    script = """
import argparse, typing, typing_extensions
typing.override = typing_extensions.override
from megatron.training.arguments import add_megatron_arguments
from megatron_rlplugin.flags import add_rl_args
parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
theirs = {action.dest for action in parser._actions}
add_rl_args(parser)
ours = {action.dest for action in parser._actions} - theirs
print(len(ours), len(parser._actions) - len({action.dest for action in parser._actions}))
args = parser.parse_args(["--rl-stream-training"])
print(args.calculate_per_token_loss, args.accumulate_allreduce_grads_in_fp32)
"""
    environment = os.environ | {"PYTHONPATH": f"{NEWEST}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[0] == str(len(flag_table()))
    assert done.stdout.splitlines()[-1] == "True True"
