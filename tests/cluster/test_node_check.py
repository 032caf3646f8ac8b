"""Nodes that are not alike are one error that names both sides. Reports and clock are injected."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator import __version__
from orchestrator.api import ConfigError
from orchestrator.cluster.actor import FirstReport
from orchestrator.runtime.node_check import CLOCK_LIMIT, NodeCheck

NOW = 1.7e9


def report(node: str, off: float = 0.0, **versions: str) -> FirstReport:
    return FirstReport(node, (), {name.replace("_", "-"): version for name, version in versions.items()}, NOW + off)


def test_nodes_that_are_alike_pass_and_a_package_may_be_missing_somewhere() -> None:
    nodes = NodeCheck(lambda: NOW)
    nodes.check("trainer", report("10.0.0.1", torch="2.9", megatron_core="0.16.1"))
    nodes.check("vllm-0", report("10.0.0.2", 5.0, torch="2.9", vllm="0.32.0"))
    nodes.check("vllm-1", report("10.0.0.3", -5.0, torch="2.9", vllm="0.32.0"))


def test_another_version_of_an_engine_is_refused_with_both_nodes() -> None:
    nodes = NodeCheck(lambda: NOW)
    nodes.check("vllm-0", report("10.0.0.2", vllm="0.32.0"))
    with pytest.raises(
        ConfigError, match=r"vllm-1 on 10.0.0.3 has this version, vllm-0 on 10.0.0.2 has 0.32.0"
    ) as caught:
        nodes.check("vllm-1", report("10.0.0.3", vllm="0.33.0"))
    assert (caught.value.field, caught.value.value) == ("vllm", "0.33.0")


def test_nodes_that_are_alike_with_another_version_than_the_runs_own_process_are_refused() -> None:
    nodes = NodeCheck(lambda: NOW)
    nodes.check("vllm-0", report("10.0.0.2", rl_coserve=__version__))
    with pytest.raises(ConfigError, match=rf"the run's own process has {__version__}: install the same .* resumed"):
        nodes.check("trainer", report("10.0.0.3", rl_coserve="99.0"))
    with pytest.raises(ConfigError, match=r"rl-coserve = '99\.0'"):  # also where it is the first to say so
        NodeCheck(lambda: NOW).check("trainer", report("10.0.0.3", rl_coserve="99.0"))


def test_what_is_installed_while_the_run_lives_is_said_once() -> None:
    """In between pip has removed the old one."""
    looks = iter([{"rl-coserve": "0.1.0", "vllm": "0.32.0"}, {"vllm": "0.32.0"}])
    now, said = {"rl-coserve": "0.2.0", "vllm": "0.32.0", "ray": "2.60.0"}, list[str]()

    async def main() -> None:
        nodes = NodeCheck(lambda: NOW, lambda: next(looks, now))
        watching = asyncio.create_task(nodes.watch(said.append, every=0.001))
        while not said:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        watching.cancel()

    asyncio.run(main())
    assert said == [
        "rl-coserve 0.2.0 over 0.1.0: what starts again from now on may be refused; end the run and resume it"
    ]


@pytest.mark.parametrize(("off", "words"), [(180.0, "ahead of"), (-180.0, "behind")])
def test_a_clock_that_is_minutes_off_is_refused(off: float, words: str) -> None:
    nodes = NodeCheck(lambda: NOW)
    nodes.check("vllm-0", report("10.0.0.2", CLOCK_LIMIT - 1))
    with pytest.raises(ConfigError, match=f"clock = 180: the clock of vllm-1 on 10.0.0.3 is this many seconds {words}"):
        nodes.check("vllm-1", report("10.0.0.3", off))
