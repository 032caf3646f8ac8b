"""Calls of a cluster's methods: started on some workers, waited for by blocking or by ``await``, errors named by rank.

Guarantees: a call ends in one result or one error; what a worker's method raised is a :class:`WorkerError` that names the
rank; a process that died, or gives no answer in time, is a RetryableError that names the rank. A call that may run anywhere
(``hw_mapping``) whose worker died is made again on another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.api import RetryableError
from orchestrator.cluster.cluster_errors import WorkerError
from orchestrator.cluster.role_workers import ERROR

if TYPE_CHECKING:
    from orchestrator.cluster.cluster import Member


class Died(Exception):
    """The process of a worker is gone."""


class Call:
    """One call, in progress. ``result()`` blocks; ``await call`` waits in an event loop. ``again`` makes the call anew after a
    worker died (None: that is an error)."""

    def __init__(
        self,
        method: str,
        size: int,
        asked: Sequence[tuple[Member, Any]],
        join: Callable[[list[Any]], Any],
        lost: Callable[[Member], None],
        again: Callable[[], Call] | None = None,
    ) -> None:
        self._method = method
        self._size = size
        self._asked = list(asked)
        self._join = join
        self._lost = lost
        self._again = again

    def result(self, timeout: float | None = None) -> Any:
        """Wait at most ``timeout`` seconds for each worker."""
        import ray

        answers: list[Any] = []
        for member, reference in self._asked:
            try:
                answers.append(ray.get(reference, timeout=timeout))
            except ray.exceptions.GetTimeoutError:
                answers.append(TimeoutError(f"no answer within {timeout:g} s"))
            except ray.exceptions.RayError as error:
                answers.append(self._death(member, error))
        if self._is_lost(answers):
            assert self._again is not None
            return self._again().result(timeout)
        return self._joined(answers)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._wait().__await__()

    async def _wait(self) -> Any:
        answers = await asyncio.gather(*(self._answer(member, reference) for member, reference in self._asked))
        if self._is_lost(answers):
            assert self._again is not None
            return await self._again()
        return self._joined(answers)

    async def _answer(self, member: Member, reference: Any) -> Any:
        import ray

        try:
            return await reference
        except ray.exceptions.RayError as error:
            return self._death(member, error)

    def _is_lost(self, answers: Sequence[Any]) -> bool:
        return self._again is not None and isinstance(answers[0], Died)

    def _death(self, member: Member, error: Exception) -> Died:
        self._lost(member)
        lines = str(error).strip().splitlines()
        return Died(lines[0] if lines else type(error).__name__)

    def _joined(self, answers: Sequence[Any]) -> Any:
        """The result, or the error that tells most: what user code raised, then who died, then who is late."""
        failed = [
            (member, answer[1])
            for (member, _), answer in zip(self._asked, answers, strict=True)
            if isinstance(answer, tuple) and answer[0] == ERROR
        ]
        if failed:
            member, (kind, detail, trace) = failed[0]
            where, others = member.identity, len(failed) - 1
            raise WorkerError(self._method, member.where, where.rank, self._size, kind, detail, trace, others)
        for cause in (Died, TimeoutError):
            for (member, _), answer in zip(self._asked, answers, strict=True):
                if isinstance(answer, cause):
                    what = "its process died" if cause is Died else "it hangs"
                    rank = f"rank {member.identity.rank} of {self._size}, {member.where}"
                    raise RetryableError(f"{self._method}: {rank}: {what}: {answer}")
        return self._join([value for _, value in answers])
