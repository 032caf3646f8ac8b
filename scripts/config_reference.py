#!/usr/bin/env python3
"""Writes docs/config.md and docs/config_system.md: every key with its type, default and meaning, from the sections themselves;
and the table of model families in docs/megatron.md.

    python scripts/config_reference.py            # are the pages what the code says? exit code 1: no
    python scripts/config_reference.py --write

The meaning of a key is the comment that stands behind its field, or above it where it is long; where there is none, the
help of its command-line flag.
"""

from __future__ import annotations

import inspect
import io
import re
import sys
import textwrap
import tokenize
import typing
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_rlplugin.model_families import table_rows  # noqa: E402
from orchestrator.config import Config  # noqa: E402
from orchestrator.settings.engine_settings import EngineGroup, EngineSettings  # noqa: E402
from orchestrator.settings.trainer_settings import Flag  # noqa: E402

HEAD = """# Every key of a config

A config is a TOML file, `examples/frozenlake.toml` for example, with overrides on the command line (`rollout.alpha=2`).
It is closed: a key that does not exist is an error that names the nearest one. `rl-coserve train CONFIG --dry-run`
prints all values. Seconds unless a name ends in another unit. This page has what is learned and how; where and on what
it runs, the simulator and prices are on [the second page](config_system.md). Both are written by
`scripts/config_reference.py`; a test compares them with the code.
"""
HEAD_SYSTEM = """# Every key of a config: where it runs

The second half of [the reference](config.md): environments, rewards, tools, weights, hardware, views, the simulator,
prices.
"""
FIRST = ("run", "model", "task", "rollout", "filters", "trainer", "context", "warmup", "evaluation", "checkpoint")

# What the sections leave to the reader who knows the field.
PLAIN = {
    "context.strategy": "what happens to a full context, see [long_episodes.md](long_episodes.md)",
    "context.tasks": "a table for each task that has rules of its own",
    "context.tasks.NAME.strategy": "as above",
    "run.folder": "where run folders are made",
    "run.seed": "of all random draws",
    "run.steps": "training steps, at most",
    "model.path": "Hugging Face folder of a [family that is computed](megatron.md#families); empty: a tiny Qwen3 of these sizes",
    "model.hidden_size": "of the tiny model; so are the next five",
    "model.intermediate_size": "of the MLP",
    "model.layers": "transformer layers",
    "model.heads": "attention heads; a multiple of `kv_heads`",
    "model.kv_heads": "KV heads",
    "model.head_dim": "size of a head",
    "model.dtype": "of weights in trainer and engines",
    "rollout.groups_per_step": "GRPO groups (prompts) a training step takes",
    "rollout.temperature": "of sampling",
    "rollout.environment_step_timeout": "for a step of an environment; then its trajectory has failed",
    "rollout.trajectory_timeout": "for a whole episode; then it has failed",
    "rollout.worker_restarts": "of one worker in `restart_window`; then the run continues without it",
    "rollout.engine.max_num_seqs": "requests that an engine computes at once",
    "rollout.engine.max_model_len": "tokens of context and response together",
    "rollout.engine.block_size": "tokens per KV block",
    "rollout.engine.tensor_parallel_size": "devices that share each layer of an engine",
    "rollout.engine.pipeline_parallel_size": "devices that its layers are divided over, in sequence",
    "rollout.engine.threads": "CPU threads of an engine",
    "rollout.routing.policy": "the worker that takes a turn: the one that holds its prefix, the least busy one, or each in turn",
    "filters.reward_min": "trajectories with a lower reward are left out",
    "filters.reward_max": "the same for a higher one",
    "filters.balance": "what a batch balances, see [trajectories.md](trajectories.md)",
    "trainer.learning_rate": "of Adam; the start of the decay where there is one",
    "trainer.lr_warmup_steps": "steps in which the learning rate rises from 0",
    "trainer.weight_decay": "of Adam",
    "trainer.adam_beta1": "of Adam",
    "trainer.adam_beta2": "of Adam",
    "trainer.clip_high": "importance ratio clipped at 1 + this; None: the objective's own",
    "trainer.clip_low": "importance ratio clipped at 1 - this; None: the objective's own, see [megatron.md](megatron.md)",
    "trainer.kl_estimator": "of that KL",
    "trainer.tensor_parallel": "ranks that share each layer",
    "trainer.pipeline_parallel": "stages",
    "trainer.expert_parallel": "ranks that share experts",
    "trainer.data_parallel": "replicas",
    "trainer.threads": "CPU threads of a rank",
    "warmup.steps": "supervised steps before RL; 0: none",
    "warmup.batch_size": "demonstrations per step",
    "warmup.learning_rate": "of these steps",
    "evaluation.prompts": "held-out prompts",
    "evaluation.top_p": "of sampling",
    "checkpoint.keep": "newest ones that are kept",
    "environment.backend": "where an environment is, see [environments.md](environments.md)",
    "environment.parallel_starts": "instances that start at the same time",
    "environment.start_timeout": "of one start",
    "environment.backoff_limit": "longest pause between failed starts",
    "environment.health_timeout": "of a health check",
    "environment.kubernetes.namespace": "of the pods",
    "environment.kubernetes.pull_policy": "Kubernetes' own",
    "environment.kubernetes.memory": "request and limit of a pod",
    "environment.kubernetes.node_selector": "labels of the nodes that pods may run on",
    "reward.url": "endpoint that scores; its token is in RL_COSERVE_REWARD_TOKEN",
    "reward.concurrency": "calls in flight",
    "reward.retries": "of a call that failed in transport; then the trajectory has failed",
    "reward.adaptive.factor": "times the longest run of a correct answer",
    "reward.adaptive.least": "never less than this",
    "reward.adaptive.most": "never more; the limit while nobody has solved it",
    "reward.serve.max_replicas": "at most",
    "reward.judge.path": "Hugging Face folder of a judge that the run starts",
    "reward.judge.low": "lowest score",
    "reward.judge.high": "highest score; both are mapped to 0 and 1",
    "reward.judge.max_tokens": "of an answer",
    "reward.judge.streamed.dtype": "of its weights",
    "reward.judge.streamed.threads": "of its process on a CPU",
    "reward.judges.NAME.path": "Hugging Face folder of a judge that the run starts",
    "reward.judges.NAME.low": "lowest score",
    "reward.judges.NAME.high": "highest score; both are mapped to 0 and 1",
    "reward.judges.NAME.max_tokens": "of an answer",
    "reward.judges.NAME.streamed.dtype": "of its weights",
    "reward.judges.NAME.streamed.threads": "of its process on a CPU",
    "tools.timeout": "of a call",
    "tools.retries": "of a call that failed in transport",
    "relay.kind": "what carries weights, see [weights.md](weights.md)",
    "relay.master": "host:port of a Mooncake master, or URL of a folder; empty: of the run's own",
    "relay.host": "address that the run's own master listens on",
    "relay.segment_mb": "MiB of memory that a trainer rank lends to the store",
    "relay.bucket_mb": "MiB of an object; smaller for differences",
    "relay.keep_versions": "versions that stay readable",
    "resources.devices_per_rank": "of a trainer rank",
    "resources.devices_per_server": "in one server of a pool",
    "ray.address": "of a running cluster; empty: a local Ray of the run's own",
    "ray.cpus": "CPUs that the local Ray counts with",
    "ray.object_store_mb": "MiB of /dev/shm for it",
    "view.enabled": "show the run on a web page",
    "logging.wandb.enabled": "send curves",
    "logging.wandb.project": "where the run appears",
    "logging.wandb.mode": "`offline`: write files to send later",
    "rollout.kv_transfer.enabled": "copy KV instead of recomputing it",
    "rollout.disaggregation.enabled": "prefill and decode on workers of different classes",
    "rollout.planner.enabled": "choose the tensor parallelism between steps",
    "rollout.colocation.enabled": "rollout and training on the same devices",
    "rollout.rounds.enabled": "short and long rounds",
    "rollout.prediction.enabled": "predict lengths, order turns by them",
    "rollout.placement.enabled": "place trajectories by predicted length",
    "rollout.placement.degrees.enabled": "engines of unequal width",
}


def comments(model: type[BaseModel]) -> dict[str, str]:
    """Field -> the comment behind it, with those that follow on lines of their own; before it where there is none."""
    found: dict[str, list[str]] = {}
    above: list[str] = []
    name, first, depth = "", True, 0
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(model)).readline):
        if token.type == tokenize.NAME and first and depth == 1 and token.string in model.model_fields:
            name = token.string
            found[name] = above
            above = []
        if token.type == tokenize.COMMENT and depth < 2:  # deeper: of a method
            text = token.string.lstrip("# ")
            alone = not token.line[: token.start[1]].strip()
            if alone and token.start[1] == 4 and not _goes_on(found.get(name, [])):
                above = [*above, text]
            elif name:
                found[name] = [*found[name], text]
        depth += (token.type == tokenize.INDENT) - (token.type == tokenize.DEDENT)
        first = token.type in (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT)
    return {key: " ".join(lines) for key, lines in found.items()}


def _goes_on(lines: list[str]) -> bool:
    """Whether a comment ends in the middle of a sentence, so that the next line belongs to it."""
    return bool(lines) and lines[-1][-1] in ",'"


def kind(field: FieldInfo) -> str:
    """The type in few words, with its limits."""
    limits = []
    for item in field.metadata:
        for mark, sign in (("ge", ">= "), ("gt", "> "), ("le", "<= "), ("lt", "< "), ("multiple_of", "multiple of ")):
            if (value := getattr(item, mark, None)) is not None:
                limits.append(f"{sign}{value:g}")
    return ", ".join([_type(field.annotation), *limits])


def _type(annotation: Any) -> str:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin is typing.Annotated:
        return _type(parts[0])
    if origin is dict:
        return "table" if parts[1] is Any else f"table of {_type(parts[1])}"
    if origin in (tuple, list):
        return f"list of {_type(parts[0])}"
    if parts:  # a union
        return " or ".join(_type(part) for part in parts if part is not type(None))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    return {"str": "text", "int": "integer", "float": "number", "bool": "true or false"}.get(
        getattr(annotation, "__name__", ""), str(annotation)
    )


def default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if value is None or value in ("", (), {}):
        return ""
    if isinstance(value, BaseModel):
        return "see its own table"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        value = list(value)
    return f"`{value}`"


def flag_help(field: FieldInfo) -> str:
    return next((item.help for item in field.metadata if isinstance(item, Flag)), "")


def tables(name: str, model: type[BaseModel]) -> list[str]:
    """The table of a section, then those of the sections inside it."""
    said: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base.__module__.startswith("orchestrator."):
            said |= comments(base)
    rows, inside = [], []
    known = EngineSettings.model_fields if model is EngineGroup else {}  # they have a section
    for key, field in model.model_fields.items():
        if key in known:
            continue
        nested = [
            part
            for part in (field.annotation, *typing.get_args(field.annotation))
            if isinstance(part, type) and issubclass(part, BaseModel)
        ]
        if nested:
            many = typing.get_origin(field.annotation) is dict
            inside.append((f"{name}.{key}" + (".NAME" if many else ""), nested[0]))
        if not nested or field.is_required() or not isinstance(field.get_default(), BaseModel):
            what = _readable(PLAIN.get(f"{name}.{key}") or said.get(key) or flag_help(field))
            rows.append(f"| `{key}` | {kind(field).replace('|', chr(92) + '|')} | {default(field)} | {what} |")
    about = " ".join(inspect.cleandoc(model.__doc__ or "").split())
    text = [f"## {name}\n", textwrap.fill(_readable(about), 118, break_long_words=False, break_on_hyphens=False) + "\n"]
    if rows:
        text += ["| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows, ""]
    for nested_name, nested_model in inside:
        if nested_model is not model:
            text += tables(nested_name, nested_model)
    return text


def _parts(text: str) -> list[str]:
    """Text and quotes in backticks, in turn."""
    return re.split(r"(`[^`]*`)", text)


def _readable(text: str) -> str:
    """A comment as Markdown: pages as links, one kind of code marks."""
    text = re.sub(r":\w+:`~?([\w.]+)`", r"`\1`", text.replace("``", "`")).replace("|", "\\|")
    text = "".join(
        part if part.startswith("`") else re.sub(r"[a-z]+://[^\s,;]+", r"`\g<0>`", part) for part in _parts(text)
    )
    return re.sub(r"(?<![`\w/(])docs/(\w+\.md)", r"[\1](\1)", text)


def pages() -> dict[str, str]:
    """Page -> its text."""
    text = {"config.md": [HEAD], "config_system.md": [HEAD_SYSTEM]}
    for name, field in Config.model_fields.items():
        assert isinstance(field.annotation, type)
        text["config.md" if name in FIRST else "config_system.md"] += tables(name, field.annotation)
    return {name: "\n".join(lines).rstrip() + "\n" for name, lines in text.items()}


def families_page() -> str:
    """docs/megatron.md with its table of families as the code has it."""
    text = (ROOT / "docs" / "megatron.md").read_text(encoding="utf-8")
    head, rest = text.split("| architecture | models |", 1)
    return head + "\n".join(table_rows()) + "\n\n" + rest.split("\n\n", 1)[1]


def main() -> int:
    stale = 0
    for name, text in {**pages(), "megatron.md": families_page()}.items():
        file = ROOT / "docs" / name
        if "--write" in sys.argv[1:]:
            file.write_text(text, encoding="utf-8")
        elif not file.is_file() or file.read_text(encoding="utf-8") != text:
            print(f"docs/{name} is not what the code says: scripts/config_reference.py --write", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
