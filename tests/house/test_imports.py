"""What an import brings along, looked at in fresh processes: engines only where an engine was asked for."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

ENGINES = {"torch", "ray", "vllm", "megatron", "mooncake", "transformers"}
DRAWN_WITH = {"matplotlib", "tensorboard"}  # imported when something is drawn or written

# Prints the top-level modules that a statement adds to those an empty interpreter has.
PROBE = """
import json, sys
before = set(sys.modules)
{statement}
print(json.dumps(sorted({{name.partition(".")[0] for name in set(sys.modules) - before}})))
"""

ALL_OF_THE_ORCHESTRATOR = """
import importlib, pkgutil, orchestrator
for module in pkgutil.walk_packages(orchestrator.__path__, "orchestrator."):
    if module.name != "orchestrator.tasks.reasoning_gym_scorer":  # of a process of its own, which loads a library first
        importlib.import_module(module.name)
"""


def brought_along(statement: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(statement=statement)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def third_party(modules: set[str]) -> set[str]:
    compiled = {name for name in modules if "cython" in name}  # what Cython registers beside a compiled module
    return modules - set(sys.stdlib_module_names) - {"orchestrator"} - compiled


@pytest.mark.parametrize(
    ("module", "needed"),
    [
        ("orchestrator", set()),
        ("orchestrator.api", set()),
        ("orchestrator.hooks.signatures", set()),
        ("orchestrator.hooks.patch_register", {"packaging"}),  # reads versions
    ],
)
def test_the_contracts_need_the_standard_library_only(module: str, needed: set[str]) -> None:
    assert third_party(brought_along(f"import {module}")) == needed


@pytest.mark.parametrize(
    "module", ["orchestrator.policies.routing.turn_routing", "orchestrator.policies.batching.staleness"]
)
def test_a_policy_needs_numpy_at_most(module: str) -> None:
    assert third_party(brought_along(f"import {module}")) <= {"numpy"}


def test_the_transfer_leaf_needs_what_the_base_install_has() -> None:
    assert third_party(brought_along("import orchestrator.transfer")) <= {"numpy", "msgpack", "xxhash"}


def test_the_settings_leaf_needs_what_the_base_install_has() -> None:
    found = third_party(brought_along("import orchestrator.settings.trainer_settings"))
    validation = {"pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection"}
    assert {name for name in found if not name.startswith("_sysconfigdata")} <= {"numpy", *validation}


@pytest.mark.parametrize(
    "module",
    ["orchestrator.config", "orchestrator.cli", "orchestrator.ops.doctor", "vllm_rlplugin", "megatron_rlplugin"],
)
def test_starting_the_command_and_naming_a_plugin_import_no_engine(module: str) -> None:
    assert not brought_along(f"import {module}") & (ENGINES | DRAWN_WITH)


def test_no_module_of_the_orchestrator_imports_an_engine() -> None:
    assert not brought_along(ALL_OF_THE_ORCHESTRATOR) & (ENGINES | DRAWN_WITH | {"vllm_rlplugin", "megatron_rlplugin"})
