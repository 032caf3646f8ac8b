"""The resource manager: one view for all managers, in every metadata store; no device twice; jobs do not leave things behind."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from orchestrator.api import ConfigError, MetadataStore, RetryableError, RunError
from orchestrator.policies.placement.device_allocation import DevicePool
from orchestrator.policies.placement.owner_heartbeats import OwnerHeartbeats
from orchestrator.resources import ResourceManager
from orchestrator.resources.resource_manager import decode_view
from orchestrator.transfer import MemoryMetadata

POOLS = {"H800": range(8), "H20": range(8, 32), "CPU": 4}
Open = Callable[[], MetadataStore]


def test_two_jobs_see_each_others_bindings_and_never_get_the_same_device(open_store: Open) -> None:
    one = ResourceManager(POOLS, metadata=open_store(), owner="one")
    two = ResourceManager(POOLS, metadata=open_store(), owner="two")
    assert one.bind("one/train", "H800", 8).devices == tuple(range(8))
    binding = two.bind("two/train", "H800", 8)
    assert (binding.hardware, binding.devices) == ("H20", tuple(range(8, 16)))
    assert binding.fallback
    assert one.binding("two/train") == binding
    assert {name: len(one.view().free(name)) for name in POOLS} == {"H800": 0, "H20": 16, "CPU": 4}
    with pytest.raises(ConfigError, match="id already has H800 0, 1"):
        two.bind("one/train", "CPU")


def test_a_job_that_starts_again_has_nothing_and_others_keep_theirs(open_store: Open) -> None:
    first = ResourceManager(POOLS, metadata=open_store(), owner="job")
    other = ResourceManager(POOLS, metadata=open_store(), owner="other")
    first.bind("gen-0", "H20")
    other.bind("gen-1", "H20")
    again = ResourceManager(POOLS, metadata=open_store(), owner="job")
    assert [*again.view().bindings] == ["gen-1"]
    again.bind("gen-0", "H20")
    other.close()
    assert [*again.view().bindings] == ["gen-0"]


def test_a_failed_place_is_left_and_stays_marked_for_everybody(open_store: Open) -> None:
    manager = ResourceManager({"H800": 2, "H20": 1}, metadata=open_store())
    manager.bind("a", "H800", 2)
    with pytest.raises(ConfigError, match="at most 2"):
        manager.bind("b", "H800", 3)
    manager.release("a")
    manager.bind("a", "H800")
    assert manager.rebind("a", failed=True).devices == (1,)
    moved = manager.rebind("a", failed=True)
    assert (moved.hardware, moved.fallback) == ("H20", "H800 has 0 devices free of 1 needed")
    with pytest.raises(RetryableError, match="H800: 0 free, H20: 0 free"):
        manager.rebind("a", failed=True)
    assert manager.binding("a") == moved, "it has what it had"
    assert [pool.failed for pool in manager.view().pools] == [(0, 1), (0,)]
    manager.repair("H800", [1])
    assert manager.rebind("a").fallback == ""


def test_managers_in_several_threads_give_each_device_once(open_store: Open) -> None:
    given: list[tuple[str, int]] = []

    def work(name: str) -> None:
        manager = ResourceManager({"H20": 24}, metadata=open_store(), owner=name)
        for number in range(6):
            given.extend(("H20", device) for device in manager.bind(f"{name}-{number}", "H20").devices)

    threads = [threading.Thread(target=work, args=(f"job{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(given) == [("H20", device) for device in range(24)]


@pytest.mark.parametrize(
    ("pools", "words"),
    [
        ({}, "at least one pool"),
        ({"H800": [0, 0]}, "each once"),
        ({"H800": 0}, "ids of its devices"),
        ({"H800": [-1]}, "ids of its devices"),
        ({"H800": ["0"]}, "ids of its devices"),
    ],
)
def test_pools_that_make_no_sense_are_refused(pools: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ResourceManager(pools)  # type: ignore[arg-type]


def test_other_pools_under_the_same_name_are_refused(open_store: Open) -> None:
    ResourceManager(POOLS, metadata=open_store())
    with pytest.raises(ConfigError, match="H800: 8, H20: 24"):
        ResourceManager({"H800": 8}, metadata=open_store())
    ResourceManager({"H800": 8}, metadata=open_store(), name="other")


def test_the_record_says_all(open_store: Open) -> None:
    store = open_store()
    manager = ResourceManager(POOLS, metadata=store, owner="job", per_server=4)
    manager.bind("a", "H800", 2)
    manager.rebind("a", failed=True)
    present = store.get("rlc/resources/default")
    assert present is not None
    assert decode_view(present[0]) == manager.view()
    assert manager.view().pool("H800") == DevicePool("H800", tuple(range(8)), 4, (0, 1))


def test_the_same_pools_in_another_order_are_the_same() -> None:
    """A resume reads them from a file that sorts its keys."""
    metadata = MemoryMetadata()
    ResourceManager({"H800": 2, "H20": 2}, metadata=metadata, owner="one").bind("engine", "H20")
    again = ResourceManager({"H20": 2, "H800": 2}, metadata=metadata, owner="two")
    assert again.bind("other", "H20").devices == (1,)
    with pytest.raises(ConfigError, match="other pools"):
        ResourceManager({"H20": 3, "H800": 2}, metadata=metadata, owner="three")


def test_what_a_dead_job_has_is_free_when_its_heartbeat_has_stood_still_and_nobody_elses(open_store: Open) -> None:
    dead, alive, old = (ResourceManager(POOLS, metadata=open_store(), owner=name) for name in ("dead", "alive", "old"))
    for manager, worker in ((dead, "d"), (alive, "a"), (old, "o")):
        manager.bind(worker, "H20", 8)
    dead.beat()
    alive.beat()
    new, beats = ResourceManager(POOLS, metadata=open_store(), owner="new"), OwnerHeartbeats(30.0)
    for now in (0.0, 10.0, 29.0):
        assert new.free_silent(beats, now) == ()
        alive.beat()
    assert new.free_silent(beats, 30.0) == ("dead",)
    assert [*new.view().bindings] == ["a", "o"], "one that never said that it lives is nobody's to judge"
    new.bind("n", "H20", 8)
    alive.beat()
    with pytest.raises(RunError, match="another job now has the devices of d"):
        dead.beat()


def test_a_job_that_gave_its_devices_back_beats_on(open_store: Open) -> None:
    manager = ResourceManager(POOLS, metadata=open_store(), owner="job")
    manager.bind("gen", "H20")
    manager.release("gen")
    manager.bind("gen", "H20")
    manager.beat()
    manager.close()
    manager.beat()


def test_a_heartbeat_that_is_no_count_is_an_error_that_names_its_job() -> None:
    store = MemoryMetadata()
    manager = ResourceManager(POOLS, metadata=store, owner="job")
    assert store.compare_and_set("rlc/resources/default/beats/job", b"-1", 0)
    with pytest.raises(RunError, match="heartbeat of job job"):
        manager.beat()
