"""Binding of workers to devices: nothing is given twice, servers are not cut, fallbacks are stated, impossible wishes named."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.api import ConfigError, RetryableError
from orchestrator.policies.placement.device_allocation import (
    AllocationView,
    DeviceBinding,
    DevicePool,
    DeviceWish,
    bind_worker,
    fail_devices,
    rebind_worker,
    release_workers,
    repair_devices,
)

PAPER = AllocationView(
    (DevicePool("H800", tuple(range(8))), DevicePool("H20", tuple(range(8, 32))), DevicePool("CPU", tuple(range(4))))
)


def bound(view: AllocationView, *wishes: DeviceWish) -> tuple[AllocationView, list[DeviceBinding]]:
    done = []
    for wish in wishes:
        view, binding = bind_worker(view, wish)
        done.append(binding)
    return view, done


def test_a_wish_is_served_from_its_own_class_then_from_a_compatible_one_which_is_stated() -> None:
    _, done = bound(
        PAPER, *(DeviceWish(f"w{n}", "H800", 4) for n in range(3)), DeviceWish("b200", "B200"), DeviceWish("env", "CPU")
    )
    assert [(item.hardware, item.devices) for item in done[:3]] == [
        ("H800", (0, 1, 2, 3)),
        ("H800", (4, 5, 6, 7)),
        ("H20", (8, 9, 10, 11)),
    ]
    assert [item.fallback for item in done[:2]] == ["", ""]
    assert done[2].fallback == "H800 has 0 devices free of 4 needed"
    assert done[3].fallback == "there is no pool of class B200"
    assert done[4].hardware == "CPU"


def test_what_is_compatible_can_be_said() -> None:
    view = AllocationView(PAPER.pools, compatible={"H800": (), "CPU": ("H20",)})
    view, _ = bound(view, DeviceWish("a", "H800", 8), *(DeviceWish(f"c{n}", "CPU") for n in range(4)))
    with pytest.raises(RetryableError, match="H800: 0 free"):
        bind_worker(view, DeviceWish("b", "H800"))
    assert bind_worker(view, DeviceWish("c4", "CPU"))[1].hardware == "H20"


def test_a_worker_that_fits_into_a_server_is_not_cut_and_the_fullest_server_is_taken() -> None:
    view, _ = bound(PAPER, DeviceWish("a", "H20", 6), DeviceWish("b", "H20", 3))
    assert view.bindings["b"].devices == (16, 17, 18)
    view, binding = bind_worker(view, DeviceWish("c", "H20", 2))
    assert binding.devices == (14, 15), "the two that are left of the first server"
    assert bind_worker(view, DeviceWish("d", "H20", 8))[1].devices == tuple(range(24, 32))
    cut = AllocationView((DevicePool("H20", tuple(range(8, 12)) + tuple(range(16, 20))),))
    with pytest.raises(RetryableError):
        bind_worker(cut, DeviceWish("e", "H20", 5))
    assert bind_worker(PAPER, DeviceWish("f", "H20", 12))[1].devices == tuple(range(8, 20)), "bigger than a server"


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (DeviceWish("a", "H20"), "id already has H20 8"),
        (DeviceWish("b", "serverless"), "no pool serves this class"),
        (DeviceWish("b", "H20", 25), "at most 24"),
        (DeviceWish("b", "H20", 0), "at least one"),
    ],
)
def test_what_can_never_be_bound_is_one_clear_error(wish: DeviceWish, words: str) -> None:
    view, _ = bound(PAPER, DeviceWish("a", "H20"))
    with pytest.raises(ConfigError, match=words):
        bind_worker(view, wish)


def test_a_failed_device_is_given_to_nobody_until_it_is_repaired() -> None:
    view, _ = bound(PAPER, DeviceWish("a", "H800", 8))
    view = fail_devices(view, "H800", [3])
    moved, binding = rebind_worker(view, "a")
    assert (binding.hardware, binding.devices) == ("H20", tuple(range(8, 16)))
    assert "H800 has 7 devices free of 8" in binding.fallback
    back, binding = rebind_worker(repair_devices(moved, "H800", [3]), "a")
    assert (binding.hardware, binding.fallback) == ("H800", "")
    assert back.bindings == bound(PAPER, DeviceWish("a", "H800", 8))[0].bindings
    with pytest.raises(ConfigError, match="no such devices"):
        fail_devices(view, "H800", [8])
    with pytest.raises(ConfigError, match="no worker with this id"):
        rebind_worker(view, "b")


@given(seed=st.integers(0, 2**32))
@settings(max_examples=60)
def test_whatever_is_asked_a_healthy_device_has_one_worker_and_nothing_free_is_refused(seed: int) -> None:
    draw = random.Random(seed)
    classes = ["H800", "H20", "CPU"][: draw.randint(1, 3)]
    view = AllocationView(
        tuple(DevicePool(name, tuple(range(draw.randint(1, 20))), draw.choice((2, 4, 8))) for name in classes)
    )
    for number in range(80):
        what, hardware = draw.random(), draw.choice(classes)
        if what < 0.6:
            wish = DeviceWish(f"w{draw.randrange(20)}", hardware, draw.choice((1, 1, 2, 4, 9)))
            before = view
            try:
                view, binding = bind_worker(view, wish)
            except ConfigError:
                twice = wish.worker in before.bindings
                assert twice or all(
                    len(pool.devices) < wish.devices
                    for pool in before.pools
                    if pool.hardware in before.candidates(hardware)
                )
            except RetryableError:
                for name in before.candidates(hardware):
                    pool, free = before.pool(name), before.free(name)
                    assert pool is not None
                    most = max((sum(d // pool.per_server == s for d in free) for s in range(20)), default=0)
                    assert wish.devices > (len(free) if wish.devices > pool.per_server else most)
            else:
                pool = before.pool(binding.hardware)
                assert pool is not None
                assert set(binding.devices) <= set(before.free(binding.hardware))
                assert len(binding.devices) == wish.devices
                servers = {device // pool.per_server for device in binding.devices}
                assert len(servers) == 1 or wish.devices > pool.per_server
                assert bool(binding.fallback) == (binding.hardware != hardware)
        elif what < 0.8:
            view = release_workers(view, [f"w{draw.randrange(20)}"])
        else:
            pool = view.pool(hardware)
            assert pool is not None
            view = draw.choice((fail_devices, repair_devices))(view, hardware, [draw.choice(pool.devices)])
        taken = [(item.hardware, device) for item in view.bindings.values() for device in item.devices]
        assert len(taken) == len(set(taken)), number
