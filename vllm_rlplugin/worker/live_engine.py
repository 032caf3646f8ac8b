"""``LiveEngine``: vLLM's ``AsyncLLM`` as the HTTP carrier calls it. No call outlives the engine.

vLLM never answers a utility call whose engine died meanwhile: the call would wait for ever. Here every call is raced
against the end of vLLM's output handler, which ends when the engine does, however it ended. Guarantees:

* Every call either ends as vLLM's own, or raises RetryableError once the engine is dead.
* Nothing here changes the engine; all it uses are methods of the front end and the one that our patch added.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from orchestrator.api import RetryableError

_T = TypeVar("_T")


class EngineCoreClient(Protocol):
    """The one method of vLLM's core client that is used."""

    def call_utility_async(self, method: str, *args: Any) -> Awaitable[Any]:
        """Call a method of ``EngineCore`` between two engine steps."""


class EngineClient(Protocol):
    """What the carrier uses of vLLM's ``AsyncLLM``; the semantics are vLLM's."""

    engine_core: Any  # EngineCoreClient
    output_handler: asyncio.Task[None] | None
    output_processor: Any

    @property
    def errored(self) -> bool: ...

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *, priority: int, session_id: str
    ) -> AsyncGenerator[Any, None]: ...

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None: ...

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None: ...

    async def resume_generation(self) -> None: ...

    async def is_paused(self) -> bool: ...

    async def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool: ...

    def collective_rpc(self, method: str, *args: Any) -> Awaitable[list[Any]]:
        """``args``: timeout in seconds or None, positional arguments, keyword arguments."""

    async def update_weight_version(self, new_version: str) -> None: ...

    async def get_weight_version(self) -> str: ...

    async def get_supported_tasks(self) -> tuple[str, ...]: ...

    def get_num_unfinished_requests(self) -> int: ...


class LiveEngine:
    """See the module. Make it inside the event loop; ``on_death`` is called once, with the reason."""

    def __init__(self, client: EngineClient, on_death: Callable[[str], None] | None = None) -> None:
        self.client = client
        self._on_death = on_death
        self._dead: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watched: asyncio.Task[None] | None = None
        self._watch()

    @property
    def dead(self) -> bool:
        """Whether the engine's process has ended or its output handler failed."""
        return self._dead.done() or self.client.errored

    def check(self) -> None:
        """Raises RetryableError once the engine is dead."""
        if self.dead:
            raise RetryableError("the vLLM engine died; its server is ending")

    async def guard_call(self, call: Awaitable[_T]) -> _T:
        """Await a call to the engine. Raises what it raises, or RetryableError when the engine is dead."""
        task = asyncio.ensure_future(call)
        self._watch()
        try:
            await asyncio.wait((task, self._dead), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not task.done():
            task.cancel()
            self.check()
        try:
            return await task
        except Exception as error:
            if self.dead:
                raise RetryableError(f"the vLLM engine died: {error}") from error
            raise

    async def rpc(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every vLLM worker (by name: msgpack carries no functions); their answers by rank."""
        return await self.guard_call(self.client.collective_rpc(method, None, args, kwargs))

    async def command(self, command: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """One command to our scheduler, taken between two engine steps."""
        core: EngineCoreClient = self.client.engine_core
        answer: dict[str, Any] = await self.guard_call(core.call_utility_async("rl_coserve", command, dict(arguments)))
        return answer

    def _watch(self) -> None:
        handler = self.client.output_handler
        if handler is not None and handler is not self._watched:
            self._watched = handler
            handler.add_done_callback(self._handler_ended)

    def _handler_ended(self, _: asyncio.Task[None]) -> None:
        if self._dead.done():
            return
        self._dead.set_result(None)
        if self._on_death is not None:
            self._on_death("the vLLM engine died; its server is ending")
