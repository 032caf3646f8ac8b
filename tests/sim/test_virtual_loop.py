"""The virtual-time loop: time jumps, order is seeded, nothing hangs and nothing is lost silently."""

import asyncio
import random
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from orchestrator.sim.virtual_loop import DeadlockError, RunawayError, SimulationError, VirtualTimeLoop
from scripts.bench.virtual_run import LeakError, run, run_with_report


async def _now() -> float:
    return asyncio.get_running_loop().time()


def test_time_is_virtual_and_jumps_to_the_next_timer() -> None:
    async def main() -> list[float]:
        times = [await _now()]
        await asyncio.sleep(3600)
        times.append(await _now())
        await asyncio.sleep(0)
        times.append(await _now())
        await asyncio.sleep(0.25)
        times.append(await _now())
        return times

    assert run(main()) == [0.0, 3600.0, 3600.0, 3600.25]


def test_timeouts_and_wait_for_fire_at_their_virtual_deadline() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await loop.create_future()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(loop.create_future(), 7)
        async with asyncio.timeout(5):
            await asyncio.sleep(4)
        return loop.time()

    assert run(main()) == 16.0


def test_timers_of_one_deadline_fire_in_the_order_they_were_set() -> None:
    order: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in range(50):
            loop.call_at(10.0, order.append, number)
        loop.call_at(5.0, order.append, -1)
        await asyncio.sleep(20)

    run(main())
    assert order == [-1, *range(50)]


def test_cancelled_timers_never_fire_and_do_not_hold_time_back() -> None:
    fired: list[int] = []

    async def main() -> float:
        loop = asyncio.get_running_loop()
        timers = [loop.call_later(1 + number, fired.append, number) for number in range(2000)]
        for timer in timers:
            timer.cancel()
        await asyncio.sleep(5000)
        return loop.time()

    assert run(main()) == 5000.0
    assert fired == []


def test_a_cancelled_timer_is_no_progress_so_the_deadlock_is_seen() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(10, print).cancel()
        await loop.create_future()

    with pytest.raises(DeadlockError):
        run(main())


def test_deadlock_names_every_pending_task_and_where_it_waits() -> None:
    async def inner(queue: asyncio.Queue[int]) -> int:
        return await queue.get()

    async def main() -> None:
        await asyncio.create_task(inner(asyncio.Queue()), name="the getter")

    with pytest.raises(DeadlockError) as caught:
        run(main())
    text = str(caught.value)
    assert "the getter" in text
    assert "Queue.get" in text
    assert "inner" in text
    assert "test_virtual_loop.py" in text
    assert "0x" not in text, "an address in the message would differ from run to run"


def test_virtual_time_and_callbacks_are_limited() -> None:
    async def poll() -> None:
        while True:
            await asyncio.sleep(1)

    async def spin() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(RunawayError, match="virtual seconds"):
        run(poll(), max_seconds=1000)
    with pytest.raises(RunawayError, match="callbacks"):
        run(spin(), max_callbacks=1000)


def test_what_main_leaves_behind_is_an_error() -> None:
    async def leaves_a_task() -> None:
        asyncio.get_running_loop().create_task(asyncio.sleep(100), name="forgotten")
        await asyncio.sleep(1)

    async def leaves_an_exception() -> None:
        async def fails() -> None:
            raise ValueError("nobody asked")

        task = asyncio.create_task(fails())
        await asyncio.sleep(1)
        assert task.done()

    with pytest.raises(LeakError, match="forgotten"):
        run(leaves_a_task())
    with pytest.raises(LeakError, match="nobody asked"):
        run(leaves_an_exception())
    _, report = run_with_report(leaves_a_task())
    assert len(report.leaked) == 1
    assert report.seconds == 1.0


def test_leftover_tasks_are_cancelled_and_run_their_cleanup() -> None:
    cleaned: list[str] = []

    async def stubborn() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(1)
            cleaned.append("yes")

    async def main() -> None:
        asyncio.get_running_loop().create_task(stubborn())
        await asyncio.sleep(1)

    run_with_report(main())
    assert cleaned == ["yes"]


def test_threads_and_executors_are_refused() -> None:
    async def executor() -> None:
        await asyncio.to_thread(print)

    async def other_thread() -> None:
        loop = asyncio.get_running_loop()
        caught: list[Exception] = []

        def reach_in() -> None:
            try:
                loop.call_soon_threadsafe(print)
            except SimulationError as error:
                caught.append(error)

        thread = threading.Thread(target=reach_in)
        thread.start()
        thread.join()
        raise caught[0]

    with pytest.raises(SimulationError, match="threads have no virtual time"):
        run(executor())
    with pytest.raises(SimulationError, match="second thread"):
        run(other_thread())


async def _trace() -> list[str]:
    """Tasks that race for a queue, a lock and the same instants; the trace is the order in which they win."""
    trace: list[str] = []
    queue: asyncio.Queue[int] = asyncio.Queue()
    lock = asyncio.Lock()

    async def worker(name: str) -> None:
        for _ in range(4):
            item = await queue.get()
            async with lock:
                await asyncio.sleep(item % 3)
            trace.append(f"{name}{item}")

    async with asyncio.TaskGroup() as group:
        for name in "abcde":
            group.create_task(worker(name))
        for item in range(20):
            queue.put_nowait(item)
            if item % 4 == 0:
                await asyncio.sleep(1)
    return trace


def test_the_seed_decides_the_order_of_ready_callbacks() -> None:
    assert run(_trace()) == run(_trace())
    assert run(_trace(), seed=1, shuffle=True) == run(_trace(), seed=1, shuffle=True)
    traces = {tuple(run(_trace(), seed=seed, shuffle=True)) for seed in range(8)}
    assert len(traces) > 1, "shuffling changes nothing"


def test_task_groups_cancel_in_order_of_creation() -> None:
    """asyncio keeps a group's tasks in a set; hashing by number keeps addresses out of the order."""

    def order() -> list[str]:
        cancelled: list[str] = []

        async def wait(name: str) -> None:
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                cancelled.append(name)
                raise

        async def fail() -> None:
            await asyncio.sleep(1)
            raise ValueError

        async def main() -> None:
            async with asyncio.TaskGroup() as group:
                for number in range(40):
                    group.create_task(wait(str(number)))
                group.create_task(fail())

        with pytest.raises(ExceptionGroup):
            run(main())
        return cancelled

    first = order()
    ballast = [object() for _ in range(random.Random(1).randrange(1000, 5000))]  # other addresses the second time
    assert order() == first == [str(number) for number in range(40)]
    assert ballast


@pytest.mark.parametrize("number", range(3))
def test_a_task_sees_its_loop_and_its_result_comes_back(number: int) -> None:
    async def main() -> tuple[bool, list[int]]:
        async def square(value: int) -> int:
            await asyncio.sleep(5 - value)
            return value * value

        squares: list[Coroutine[Any, Any, int]] = [square(value) for value in range(number)]
        return isinstance(asyncio.get_running_loop(), VirtualTimeLoop), await asyncio.gather(*squares)

    assert run(main()) == (True, [value * value for value in range(number)])
