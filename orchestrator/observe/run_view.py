"""What shows a real run to others: its sampler, and the process beside it that serves the page.

Guarantee: nothing of this ends the run or holds it up: a page that does not start, or dies, is said once, and the run goes on.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack

from orchestrator.api import ConfigError, RunError, bearer
from orchestrator.api.tls import check_listener
from orchestrator.child_process import port_taken
from orchestrator.config import Config
from orchestrator.events import EventLog
from orchestrator.hooks.tested_versions import is_installed
from orchestrator.observe.view.exporter_queue import FINISH_SECONDS
from orchestrator.observe.view.exporters import own_exporter
from orchestrator.observe.view.live_sample import Sampler
from orchestrator.observe.view.tensorboard import TensorBoard
from orchestrator.observe.view.turn_spans import Spans
from orchestrator.observe.view.view_program import DRAIN_SECONDS, TOKEN_VARIABLE, read_token
from orchestrator.observe.view.view_server import page_url
from orchestrator.pipeline import Pipeline
from orchestrator.rewards.host_launch import ServingChild
from orchestrator.run_folder import RunFolder

_FINISH_SECONDS = DRAIN_SECONDS + 2 * FINISH_SECONDS + 5.0  # that the process may take to read the end of the run
Say = Callable[[str], None]


class ViewProcess(ServingChild):
    """See :mod:`orchestrator.observe.view.view_program`. ``say`` tells people what it says."""

    name = "view"
    variable = TOKEN_VARIABLE

    def __init__(self, config: Config, folder: RunFolder, say: Say, since: float = 0.0) -> None:
        super().__init__(folder.logs / "view.log")
        self.token, self._token_file = read_token(config.view.token_file), config.view.token_file
        self.told = self.token if self._token_file else bearer.sealed(self.token)
        self._folder, self._port_wanted, self._say, self._since = folder, config.view.port, say, since
        self._shown, self._host, self._tls = config.view.enabled, config.view.host, bool(config.tls.certificate)
        self._reader: asyncio.Task[None] | None = None
        self._stopping = False

    def command(self) -> list[str]:
        """See the base."""
        return [
            sys.executable,
            "-m",
            "orchestrator.observe.view.view_program",
            str(self._folder.path),
            "--since",
            str(self._since),
        ]

    def environment(self) -> Mapping[str, str]:
        """It has little to do; what it computes must not take cores from the engines."""
        return {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

    def refusal_error(self) -> ConfigError:
        """See the base."""
        return ConfigError("view.port", self._port_wanted, f"the view did not start; see {self._log}")

    async def open(self) -> None:
        """Start it; say where, or why not."""
        try:
            await self._launch(self._port_wanted)
        except (RunError, ConfigError) as error:
            self._say(f"{error}; the run continues without")
            return
        if self._shown:
            url = page_url(self._host, int(self.base_url.rpartition(":")[2]), self._tls)
            # A token of the user's own is in his file, and belongs into no log; one that was made here is said once.
            tail = f" (token: {self._token_file})" if self._token_file else f"?token={self.token}"
            self._say(f"view: {url}{tail}")
        self._reader = asyncio.create_task(self._read(), name="read what the view says")

    async def stop(self) -> None:
        """Let it read the end of the run; then as the base."""
        self._stopping, process = True, self._process
        if process is not None and process.returncode is None and process.stdin is not None:
            process.stdin.close()
            try:
                async with asyncio.timeout(_FINISH_SECONDS):
                    await process.wait()
            except TimeoutError:
                self._say("the view did not end by itself")
        await super().stop()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            self._say(str(json.loads(line)["say"]))
        if not self._stopping:
            self._say(f"the view has ended; see {self._log}. The run continues; rl-coserve view shows it again")


def check_view(config: Config) -> None:
    """Raises ConfigError for a token that cannot be read, a port that is taken, or an exporter that is none."""
    if config.logging.exporter:
        own_exporter(config.logging.exporter)
    if not config.view.enabled:
        return
    read_token(config.view.token_file)
    check_listener(config.view.host, config.tls.files(), "view.host")
    if (port := config.view.port) and (error := port_taken(port, config.view.host)):
        fix = f"cannot be listened on ({error.strerror}); choose another, or 0 for a free one"
        raise ConfigError("view.port", port, fix) from error


async def show_run(config: Config, folder: RunFolder, events: EventLog, say: Say, stack: AsyncExitStack) -> Sampler:
    """Begin to show the run, until ``stack`` is unwound. Before its first event of this life."""
    since = events.time()  # what is emitted from now on is of this life of the run
    if config.logging.tensorboard and not is_installed("tensorboard"):
        say("no curves for TensorBoard: pip install rl-coserve[tensorboard], or logging.tensorboard=false")
    elif config.logging.tensorboard:
        board = TensorBoard(folder.path, say)
        events.listen(board.take)
        stack.callback(board.close)
    logging = config.logging
    if config.view.enabled or logging.wandb.enabled or logging.otlp.endpoint or logging.exporter:
        process = ViewProcess(config, folder, say, since)
        stack.push_async_callback(process.stop)
        await process.open()
    sampler = Sampler(folder.path, events, say)
    sampler.start()
    stack.push_async_callback(sampler.close)
    return sampler


def watch_pipeline(
    sampler: Sampler, config: Config, folder: RunFolder, events: EventLog, pipeline: Pipeline
) -> AsyncExitStack:
    """Sample this pipeline, and write down when each of its turns ran and where. Close what is returned when it has ended,
    before its workers are closed: the last sample is of the pipeline's end."""
    stack = AsyncExitStack()
    sampler.pipeline = pipeline
    stack.push_async_callback(sampler.close)
    if config.logging.turns_mb:
        spans = Spans(folder.path, events, pipeline.rollout.proxy, int(config.logging.turns_mb * 2**20))
        pipeline.rollout.environments.on_turn = spans.turn
        stack.callback(spans.close)
    return stack
