"""The settings of a vLLM engine: tables ``[rollout.engine]`` and ``[[rollout.engines]]`` of a config, what the vLLM plugin reads.

A key is written once, here, or not at all: every option of vLLM's ``EngineArgs`` that is not ours may stand beside ours, under
vLLM's own name, and reaches the engine unchanged. Guarantees: where vLLM is installed an option that it does not have, or of
another type, is an error that names the nearest one; where it is not, :attr:`EngineSettings.unchecked` names what could not be
checked, and the engine's own process raises the same error at its start. What the run or the plugin must decide itself
(:data:`OWNED`) is refused by name in both.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, model_validator

from orchestrator.settings.section import Conflict, Positive, Section

_NODES = "is `nodes`; who is where, and at which address, is of the run's plan: leave it out"
_REPLICAS = "an engine is one replica, and the proxy balances between engines: raise rollout.workers instead"
_PLUGIN = "is the plugin's own: what a run guarantees of priorities, versions and weights hangs on it; leave it out"
_EXACT = "a run needs tokens and log-probs exactly as they were sampled, and sets this itself: leave it out"

# Options of vLLM that are no keys here -> why, and what to do instead.
OWNED: Mapping[str, str] = {
    "model": "is model.path",
    "model_weights": "is model.path",
    "dtype": "is model.dtype, of trainer and engines",
    "seed": "is run.seed, and differs from engine to engine",
    "kv_cache_memory_bytes": "is kv_cache_mb",
    "enable_sleep_mode": "is rollout.colocation.enabled",
    "device_ids": "is set by Ray, or by what divides the engines: leave it out",
    "scheduler_cls": _PLUGIN,
    "scheduling_policy": _PLUGIN,
    "weight_transfer_config": _PLUGIN,
    "worker_extension_cls": _PLUGIN,
    "additional_config": _PLUGIN,
    "kv_transfer_config": "is rollout.kv_transfer: the plugin's connector is the only one whose KV knows weight versions",
    "skip_tokenizer_init": _EXACT,
    "generation_config": _EXACT,
    "override_generation_config": _EXACT,
    "logprobs_mode": _EXACT,
    "disable_log_stats": "the engine's figures are in the run's events and metrics: leave it out",
    "distributed_executor_backend": "in its placement group vLLM would ask Ray for the same devices again: leave it out",
    "prefill_context_parallel_size": "an engine's devices are tensor_parallel_size x pipeline_parallel_size: leave it out",
    **dict.fromkeys(("nnodes", "node_rank", "master_addr", "master_port"), _NODES),
}

_KINDS = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,), "list": (list,), "dict": (dict,)}


class EngineSettings(Section):
    """The vLLM engine of a rollout worker. Beside these keys any option of the installed vLLM's ``EngineArgs`` may stand, by
    vLLM's name: ``quantization``, ``gpu_memory_utilization``, ``enable_expert_parallel`` and so on. What the run or the plugin
    decides itself is refused by name. Simulated runs do without them."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())
    table = ("rollout", "engine")

    max_num_seqs: Positive = 64
    max_model_len: Positive = 256
    block_size: Annotated[int, Field(gt=0, multiple_of=32)] = 32
    # MiB of KV cache; 0, or where gpu_memory_utilization is given: what vLLM finds free
    kv_cache_mb: Annotated[int, Field(ge=0)] = 64
    threads: Positive = 1
    tensor_parallel_size: Positive = 1
    pipeline_parallel_size: Positive = 1
    # nodes that its devices are on, as many on each: above 1 for an engine that is larger than a node (vLLM's own nodes)
    nodes: Positive = 1

    @model_validator(mode="before")
    @classmethod
    def _sized_once(cls, given: Any) -> Any:
        """vLLM ignores its share of the memory where the KV cache has a size."""
        if isinstance(given, Mapping) and "gpu_memory_utilization" in given:
            return {"kv_cache_mb": 0, **given}
        return given

    def conflicts(self) -> Iterator[Conflict]:
        options, known = self.passed_on, vllm_options() if self.passed_on else None
        ours = type(self).model_fields
        yield from (
            (name, value, fix) for name, value in options.items() if (fix := _refusal(name, value, known, ours))
        )
        if self.ranks % self.nodes:
            fix = f"each node has as many devices, and {self.ranks} is not a multiple of it"
            yield "nodes", self.nodes, fix
        if self.kv_cache_mb and "gpu_memory_utilization" in options:
            fix = f"has no effect beside kv_cache_mb = {self.kv_cache_mb}: leave one of the two out"
            yield "gpu_memory_utilization", options["gpu_memory_utilization"], fix

    @property
    def passed_on(self) -> dict[str, Any]:
        """The options that are vLLM's alone."""
        return dict(self.model_extra or {})

    @property
    def unchecked(self) -> tuple[str, ...]:
        """Those that could not be checked, as vLLM is not installed here."""
        return tuple(self.passed_on) if self.passed_on and vllm_options() is None else ()

    @property
    def ranks(self) -> int:
        """Devices of an engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def options(self) -> dict[str, Any]:
        """What an engine's process is told of it."""
        return self.model_dump(exclude={"count", "hardware"})

    def vllm_arguments(self) -> dict[str, Any]:
        """Keywords of ``EngineArgs``; what stays with us is not among them."""
        names = ("max_num_seqs", "max_model_len", "block_size", "tensor_parallel_size", "pipeline_parallel_size")
        size: dict[str, Any] = {}
        if self.kv_cache_mb:  # the share has no effect but one: vLLM starts only where so much of the device is free
            size = {"kv_cache_memory_bytes": self.kv_cache_mb << 20, "gpu_memory_utilization": 0.01}
        return {name: getattr(self, name) for name in names} | size | self.passed_on


class EngineGroup(EngineSettings):
    """Rollout workers of one kind, where a run has several: beside these two keys those of ``[rollout.engine]``, and any option
    of vLLM's as there. Workers are numbered through the groups in order: ``vllm-0``, ``vllm-1``..."""

    table = ("rollout", "engines")

    count: Positive = 1  # engines
    hardware: str = ""  # class of `resources.pools` that they use; empty: H20


@functools.cache
def vllm_options() -> Mapping[str, str] | None:
    """Name -> type, as it is written, of each field of the installed vLLM's ``EngineArgs``; None: vLLM is not installed. Read
    from its source: to import it takes seconds, and may take a device."""
    package = importlib.util.find_spec("vllm")
    if package is None or not package.submodule_search_locations:
        return None
    source = Path(package.submodule_search_locations[0]) / "engine" / "arg_utils.py"
    tree = ast.parse(source.read_text(encoding="utf-8"))
    return {
        field.target.id: ast.unparse(field.annotation)
        for made in tree.body
        if isinstance(made, ast.ClassDef) and made.name == "EngineArgs"
        for field in made.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.target.id[0] != "_"
    }


def _refusal(name: str, value: object, known: Mapping[str, str] | None, ours: Iterable[str]) -> str:
    """Why an option may not stand there, beside those that are ``ours``, and what to do; "": it may."""
    if name in OWNED:
        return OWNED[name]
    if name.startswith("data_parallel_"):
        return _REPLICAS
    if known is None:
        return ""
    if name not in known:
        near = difflib.get_close_matches(name, sorted({*known, *ours} - OWNED.keys()), n=1)
        return f"is not an option of the installed vLLM; {f'did you mean {near[0]!r}? ' if near else ''}see vllm serve --help"
    kinds = list(_kinds(ast.parse(known[name], mode="eval").body))
    if None in kinds or any(_is_a(value, kind) for kind in kinds if kind):
        return ""
    return f"is {known[name]} in the installed vLLM"


def _kinds(annotation: ast.expr) -> Iterator[str | None]:
    """The plain types of a union, "" for None (TOML has none); None: one that only vLLM knows, which checks it."""
    match annotation:
        case ast.BinOp(left=left, right=right):
            yield from (*_kinds(left), *_kinds(right))
        case ast.Constant(value=None):
            yield ""
        case ast.Subscript(value=ast.Name(id=name)) | ast.Name(id=name):
            yield name if name in _KINDS else None
        case _:
            yield None


def _is_a(value: object, kind: str) -> bool:
    return isinstance(value, _KINDS[kind]) and (kind == "bool" or not isinstance(value, bool))
