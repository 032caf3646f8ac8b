"""The flags: inert until given, none is Megatron's own, each a trainer setting; stock ``pretrain()`` streams the same."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.megatron_training import NEWEST, ROOT, run_script
from tests.support.page_blocks import page_block

pytest.importorskip("torch")

from megatron_rlplugin import flags
from megatron_rlplugin.flags import add_rl_args, flag_table, relay_from, settings_from
from orchestrator.api import ConfigError
from orchestrator.settings.trainer_settings import TrainerSettings

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


EXAMPLE = ROOT / "examples/megatron/pretrain_gpt.py"


def pretrain(*words: str, script: Path = EXAMPLE) -> subprocess.CompletedProcess[str]:
    return run_script(script, *MODEL.split(), *TRAINING.split(), *words)


def pages_script(folder: Path) -> Path:
    """The example, with the lines of the page in place of its own; ``...`` is what each script has of its own."""
    head, _, end = EXAMPLE.read_text(encoding="utf-8").partition("    args = parse_and_validate_args(")
    own = end.partition("pretrain_cfg_container_from_args(args),")[2]
    block = page_block("docs/megatron.md", "pretrain_cfg_container_from_args").replace("...)", own.strip())
    (folder / "page.py").write_text(head + textwrap.indent(block, "    "), encoding="utf-8")
    return folder / "page.py"


def logged(done: subprocess.CompletedProcess[str]) -> list[tuple[str, str]]:
    """(loss, gradient norm) of each iteration, as Megatron logs them."""
    found = re.findall(r"lm loss: (\S+) .*?grad norm: (\S+)", done.stdout)
    assert len(found) == 3, done.stdout[-1000:] + done.stderr[-3000:]
    return [(loss, norm) for loss, norm in found]


@pytest.mark.engine
@needs_newest
@pytest.mark.timeout(600)
def test_stock_pretrain_logs_the_same_losses_and_norms_with_streaming(tmp_path: Path) -> None:
    stock = pretrain("--calculate-per-token-loss", "--accumulate-allreduce-grads-in-fp32")
    assert "FED 0" in stock.stdout, stock.stderr[-3000:]
    streamed = pretrain("--rl-stream-training", script=pages_script(tmp_path))
    assert "FED 18" in streamed.stdout, streamed.stderr[-3000:]
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
