"""What a run keeps is not looked at again and again, and what cycles keep is found before it adds up."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from orchestrator.runtime import garbage_collector


class Linked:
    """May be part of a cycle."""

    def __init__(self) -> None:
        self.other: Linked | None = None


@pytest.fixture
def calmed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The real functions, which conftest replaces; afterwards all is as it was."""
    from tests.conftest import _freeze, _unfreeze

    threshold, callbacks = gc.get_threshold(), list(gc.callbacks)
    monkeypatch.setattr(gc, "freeze", _freeze)
    monkeypatch.setattr(gc, "unfreeze", _unfreeze)
    yield
    gc.set_threshold(*threshold)
    gc.callbacks[:] = callbacks


def worked(containers: int) -> list[Linked]:
    """So many made that live on."""
    return [Linked() for _ in range(containers)]


def test_no_collection_looks_at_what_lives_on(calmed: None) -> None:
    garbage_collector.calm()
    looked: list[int] = []

    def count(phase: str, info: dict[str, Any]) -> None:
        if phase == "start" and info["generation"] == 2:
            looked.append(len(gc.get_objects()))

    gc.callbacks.append(count)
    kept = worked(400_000)
    assert len(looked) >= 5
    assert max(looked) < 100_000, "of 400,000 that live on"
    assert gc.get_freeze_count() > 300_000
    assert len(kept) == 400_000


def test_a_cycle_that_died_old_is_found_once_the_memory_has_doubled(
    calmed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = 4 << 30
    monkeypatch.setattr(garbage_collector, "most_memory", lambda: memory)
    garbage_collector.calm()
    one, other = Linked(), Linked()
    one.other, other.other = other, one
    gone = weakref.ref(one)
    kept = [worked(100_000)]
    del one, other
    memory = (8 << 30) - 1
    kept.append(worked(300_000))
    assert gone() is not None, "it was frozen when it died: else this shows nothing"
    memory = 8 << 30
    kept.append(worked(200_000))
    assert gone() is None
    before = gc.get_freeze_count()
    kept.append(worked(2_000_000))
    assert gc.get_freeze_count() > before + 1_000_000, "frozen again"


def test_a_second_call_leaves_one_that_watches(calmed: None) -> None:
    before = len(gc.callbacks)
    garbage_collector.calm()
    garbage_collector.calm()
    assert len(gc.callbacks) == before + 1
