"""What both engine plugins need to hook into stock engines safely: tested versions, patches, signatures.

Standard library only. See the submodules for what each guarantees; ``sources`` reads an engine that is not installed.
"""

from orchestrator.hooks.patch_register import Patch, PatchRegister
from orchestrator.hooks.signatures import SignatureMismatch, missing_names, signature_mismatches
from orchestrator.hooks.tested_versions import (
    COMPONENTS,
    MEGATRON_CORE,
    MOONCAKE,
    PYTHON,
    RAY,
    VLLM,
    EngineComponent,
    InstalledComponent,
    TriedVersion,
    VersionRange,
    check_version,
    find_version,
    installed_version,
    parse_release,
)

__all__ = [
    "COMPONENTS",
    "MEGATRON_CORE",
    "MOONCAKE",
    "PYTHON",
    "RAY",
    "VLLM",
    "EngineComponent",
    "InstalledComponent",
    "Patch",
    "PatchRegister",
    "SignatureMismatch",
    "TriedVersion",
    "VersionRange",
    "check_version",
    "find_version",
    "installed_version",
    "missing_names",
    "parse_release",
    "signature_mismatches",
]
