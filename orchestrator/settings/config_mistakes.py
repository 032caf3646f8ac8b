"""What is wrong with a config, in words that name the cure: the key that was meant, and what a value must be.

A key that is not there may be another system's name for one of ours, a slip of the pen, or stand in another section: at most
five are offered, and only keys that exist.
"""

from __future__ import annotations

import difflib
import json
import re
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

MOST = 5  # keys that are offered
# What verl, slime, prime-rl, TRL and the engines call it -> what we do.
ALIASES: dict[str, tuple[str, ...]] = {
    "lr": ("trainer.learning_rate",),
    "batch_size": ("rollout.groups_per_step", "trainer.micro_batch_size"),
    "train_batch_size": ("rollout.groups_per_step",),
    "global_batch_size": ("rollout.groups_per_step",),
    "micro_batch": ("trainer.micro_batch_size", "trainer.micro_batch_tokens"),
    "num_generations": ("rollout.group_size",),
    "n_samples": ("rollout.group_size",),
    "rollouts_per_example": ("rollout.group_size",),
    "n": ("rollout.group_size",),
    "tp": ("trainer.tensor_parallel", "rollout.engine.tensor_parallel_size"),
    "tp_size": ("trainer.tensor_parallel", "rollout.engine.tensor_parallel_size"),
    "pp": ("trainer.pipeline_parallel",),
    "dp": ("trainer.data_parallel",),
    "ep": ("trainer.expert_parallel",),
    "max_steps": ("run.steps",),
    "total_training_steps": ("run.steps",),
    "num_rollout": ("run.steps",),
    "epochs": ("run.steps",),
    "kl_coef": ("trainer.kl_coefficient",),
    "beta": ("trainer.kl_coefficient",),
    "clip_ratio": ("trainer.clip_low", "trainer.clip_high"),
    "eps_clip": ("trainer.clip_low", "trainer.clip_high"),
    "epsilon": ("trainer.clip_low", "trainer.clip_high"),
    "max_grad_norm": ("trainer.clip_grad",),
    "entropy_coeff": ("trainer.entropy_coefficient",),
    "model_name": ("model.path",),
    "model_name_or_path": ("model.path",),
    "num_engines": ("rollout.workers",),
    "num_envs": ("rollout.environments",),
    "staleness": ("rollout.alpha",),
    "max_staleness": ("rollout.alpha",),
    "max_off_policy_steps": ("rollout.alpha",),
    "max_head_offpolicyness": ("rollout.alpha",),
}
_OPEN = ("rollout.engine.",)  # whose keys are an engine's own: nobody lists them here
_TARGET = r"^[\w.]+:\w+$"
# pydantic's names of the forms of a value that may have several, and how it says that one is not there.
_FORM = re.compile(r"constrained-\w+|(literal|dict|list|tuple)\[.*\]|\[key\]")
_OTHER_FORM = ("string_type", "dict_type", "list_type", "tuple_type")
_WORDS = {
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "dict_type": "must be a table",
    "model_type": "must be a section",
    "model_attributes_type": "must be a section",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "string_pattern_mismatch": "must match {pattern}",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "missing": "is missing, and has no default",
}


def mistakes_in(
    error: ValidationError, model: type[BaseModel], prefix: tuple[str, ...]
) -> list[tuple[str, object, str]]:
    """Field, value and what to do about it, of everything that is wrong in ``model``. A value that may have several forms has the
    config's own name, and is named once: of its other forms nothing is said where one is meant."""
    items = error.errors()
    names = [[str(part) for part in item["loc"] if not _FORM.fullmatch(str(part))] for item in items]
    shaped = [len(name) < len(item["loc"]) for name, item in zip(names, items, strict=True)]
    meant = [name for name, item in zip(names, items, strict=True) if item["type"] not in _OTHER_FORM]
    found: list[tuple[str, object, str]] = []
    for name, item, one_of in zip(names, items, shaped, strict=True):
        if one_of and item["type"] in _OTHER_FORM and any(other[: len(name)] == name for other in meant):
            continue
        field, fix = ".".join((*prefix, *name)) or "config", fix_of(item, model, prefix)
        if one_of and found and found[-1][0] == field:
            fix = f"{found.pop()[2]}, or {fix}"
        found.append((field, item["input"], fix))
    return found


def fix_of(item: Any, model: type[BaseModel], prefix: tuple[str, ...]) -> str:
    """What to do about one of pydantic's errors in ``model``, which lies in the tables ``prefix`` of a config."""
    place = (*prefix, *map(str, item["loc"]))
    match item["type"]:
        case "extra_forbidden":
            return _unknown(place, item, model, prefix)
        case "tuple_type" | "list_type" | "set_type":
            said = item["input"]
            listed = [said] if isinstance(said, str | int | float) else ["..."]
            if isinstance(said, str) and said.startswith("[") and said.endswith("]"):  # the shell took its quotes
                listed = [part.strip() for part in said[1:-1].split(",")]
            return f"must be a list: '{'.'.join(place)}={json.dumps(listed)}'"
        case "string_pattern_mismatch" if item["ctx"]["pattern"] == _TARGET:
            return "must be module:function"
        case kind if kind in _WORDS:
            words, said = _WORDS[kind].format(**item.get("ctx", {})), item["input"]
            known = re.findall("'([^']+)'", words) if kind == "literal_error" and isinstance(said, str) else []
            near = difflib.get_close_matches(said.lower(), known, n=1) if known else []
            return f"{words}; did you mean {near[0]!r}?" if near else words
    message = str(item["msg"]).removeprefix("Value error, ")
    return message[0].lower() + message[1:]


def _unknown(place: tuple[str, ...], item: Any, model: type[BaseModel], prefix: tuple[str, ...]) -> str:
    fields = _table(model, item["loc"][:-1]).model_fields
    name, above = place[-1], ".".join(place[:-1])
    if not above and isinstance(item["input"], dict):
        near = difflib.get_close_matches(name, fields, n=1)
        return (
            f"unknown section; did you mean [{near[0]}]?" if near else "unknown section; docs/config.md lists them all"
        )
    keys = {".".join((*prefix, *path)) for path in paths_of(model)}
    there = tuple(section for section in _OPEN if section.removesuffix(".") in keys)
    own = [key for key in ALIASES.get(name, ()) if key in keys or (there and key.startswith(there))]
    if any(key.startswith(f"{above}.") for key in own):  # the section was right
        own = [key for key in own if key.startswith(f"{above}.")]
    near = [f"{above}.{key}".lstrip(".") for key in difflib.get_close_matches(name, fields, n=3)]
    elsewhere = sorted(key for key in keys if key.rpartition(".")[2] == name)
    meant = list(dict.fromkeys((*own, *near, *elsewhere)))[:MOST]
    if not meant:
        return "no such key; docs/config.md lists them all"
    *others, last = meant
    return f"no such key; did you mean {', '.join(others)}{' or ' * bool(others)}{last}?"


def paths_of(model: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key of a section and of the sections in it."""
    for name, field in getattr(model, "model_fields", {}).items():
        yield (*above, name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from paths_of(field.annotation, (*above, name))


def _table(model: Any, path: tuple[str | int, ...]) -> Any:
    """The section there; in ``dict[str, Section]`` a step of the path is a key."""
    for part in path:
        fields = getattr(model, "model_fields", {})
        model = fields[part].annotation if part in fields else typing.get_args(model)[-1]
    return model
