"""The servers that a run may borrow: who they are, how they are, and clients of those that it has (ROSE 4).

Guarantees: a server is chosen by its lease, which one run gets; of several runs that start in the same second each has its own.
The candidates are those of ``rollout.served`` and the lines of ``rollout.borrowed.file``, which is read at every look: a line
that goes is a server that is given back, a file that cannot be read for a while changes nothing. What comes or goes counts when
two looks in a row found it so: a file that is just being written may be empty, or end in half a URL, to which the token must not
go. One lease key a run's life. What a server says of itself may be anything.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.api import BorrowedWorker, CommandError, ConfigError, RetryableError, RunError, Task, urls
from orchestrator.borrowing import served_workers
from orchestrator.borrowing.http_worker import HttpWorker
from orchestrator.borrowing.server_exchange import LOOK_SECONDS, Offer, claim_seconds, offer_of, rules_of
from orchestrator.config import Config
from orchestrator.events import EventLog
from orchestrator.policies.serving.server_borrowing import ServerBroker
from orchestrator.transfer import RelayEndpoint

_FILE = "rollout.borrowed.file"


def read_candidates(config: Config) -> tuple[str, ...]:
    """URLs, as the config and its file name them now, each once. Raises ConfigError."""
    rollout, file = config.rollout, config.rollout.borrowed.file
    found = [url.rstrip("/") for url in rollout.served]
    if file:
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "no UTF-8 text"
            fix = f"cannot be read ({why}); give a file with one server URL per line"
            raise ConfigError(_FILE, file, fix) from error
        for number, line in enumerate(lines, 1):
            url = line.partition("#")[0].strip().rstrip("/")
            if url and (mistake := urls.mistake(url, rollout.served_allow_plain_http)):
                raise ConfigError(_FILE, file, f"line {number} ({url[:100]}): {mistake}")
            found += [url] if url else []
    return tuple(dict.fromkeys(found))


def check(config: Config, task: Task) -> None:
    """Ask every server whether it fits. Raises ConfigError. Not inside an event loop."""
    if found := read_candidates(config):
        served_workers.check(config, task, found)


class Market:
    """See :class:`orchestrator.borrowing.server_exchange.Market`. One a run; :meth:`close` at its end. ``at_site``: the endpoint
    as the server of a URL is told of it; ``resumed``: an earlier life of the run has ended."""

    def __init__(
        self,
        config: Config,
        task: Task,
        endpoint: RelayEndpoint,
        events: EventLog,
        at_site: Callable[[str, RelayEndpoint], RelayEndpoint] = lambda _, endpoint: endpoint,
        *,
        resumed: bool = False,
    ) -> None:
        self.job = endpoint.job
        self.first: Sequence[Offer] = ()  # what the servers said when the run chose
        self._config, self._task, self._endpoint, self._events = config, task, endpoint, events
        self._at_site, self._resumed = at_site, resumed
        self._mine = (endpoint.job, endpoint.metadata)
        self._key = secrets.token_hex(16)
        self._token = served_workers.read_token(config, os.environ) if config.rollout.served or self.exchanged else ""
        self._candidates: tuple[str, ...] = ()
        self._read: tuple[str, ...] | None = None  # at the last look
        self._made: dict[str, HttpWorker] = {}
        self._status: dict[str, dict[str, Any]] = {}
        self._complaint = ""

    @property
    def exchanged(self) -> bool:
        """Whether the servers change while the run goes on."""
        return self._config.rollout.borrowed.exchanged

    async def borrow(self) -> list[HttpWorker]:
        """Clients of the servers that the run begins with: all, or ``rollout.borrowed.most``, those that are used least and that
        no other job has. Their leases are taken. While other jobs have all it waits for its share, for
        ``rollout.restart_timeout``. Raises RunError when there is none, and nothing else would generate."""
        rollout = self._config.rollout
        if not self.exchanged:
            return [self.worker(url) for url in rollout.served]
        loop = asyncio.get_running_loop()
        deadline = loop.time() + rollout.restart_timeout
        while True:
            chosen, why = await self._take_free()
            if chosen or rollout.workers:
                return chosen
            if not any(offer.taken for offer in self.first) or loop.time() > deadline:
                raise RunError(f"no server of rollout.served can be borrowed: {'; '.join(why)}")
            await self.claim(self.first, rollout.borrowed.most or len(self.first), claim_seconds(rollout.borrowed))
            await asyncio.sleep(rollout.borrowed.every)

    async def _take_free(self) -> tuple[list[HttpWorker], list[str]]:
        """Those that could be leased, and why others could not."""
        self.first = await self.list_offers()
        now, most = asyncio.get_running_loop().time(), self._config.rollout.borrowed.most or len(self.first)
        policy, why = ServerBroker(rules_of(self._config.rollout.borrowed)), list[str]()
        for offer in self.first:
            if offer.why or offer.taken:
                why.append(f"{offer.url}: {offer.why or f'job {offer.taken} has it'}")
            else:
                policy.observe_gpu(offer.url, now, offer.share, lends=offer.lends, before=offer.before)
        while True:
            refused = False
            for url in policy.choose_gpus(self.job, most, now).taken:
                worker = self.worker(url)
                try:
                    await worker.hold()
                except (CommandError, RetryableError, ConfigError) as error:
                    why.append(f"{url}: {error}")
                    policy.remove_gpu(url)
                    refused = True
                    await worker.disconnect()
                    del self._made[url]
            if not refused:
                break
        return [self._made[url] for url in policy.gpus_of(self.job)], why

    async def claim(self, offers: Sequence[Offer], wanted: int, seconds: float) -> None:
        taken = [offer.url for offer in offers if offer.taken and not offer.why]
        said = (served_workers.claim(self._config, url, self._token, self._mine, wanted, seconds) for url in taken)
        await asyncio.gather(*said)

    async def list_offers(self) -> Sequence[Offer]:
        try:
            self._candidates = self._steady(await asyncio.to_thread(read_candidates, self._config))
            self._complaint = ""
        except ConfigError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                self._events.emit("fault", what="borrowing", cause="borrowing", detail=self._complaint[:300])
        offers, seen = await asyncio.gather(*map(self._offer, self._candidates)), dict[str, str]()
        for index, offer in enumerate(offers):  # a server has one client, whatever names it has
            if not offer.why:
                other = seen.setdefault(str(self._status[offer.url].get("instance")), offer.url)
                if other != offer.url:
                    offers[index] = replace(offer, why=f"is the same server as {other}")
        return offers

    def _steady(self, found: tuple[str, ...]) -> tuple[str, ...]:
        """Of what was found now and at the last look: what both say; where they differ, as it was."""
        before, self._read = found if self._read is None else self._read, found
        known = self._candidates
        stay = [url for url in found if url in before or url in known]
        return (*stay, *(url for url in known if url in before and url not in found))

    async def _offer(self, url: str) -> Offer:
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                _, status = await served_workers.ask(self._config, url, self._token)
        except TimeoutError:
            return Offer(url, f"no answer within {LOOK_SECONDS:g} s")
        except ConfigError as error:
            return Offer(url, error.fix)
        self._status[url] = status
        why = "; ".join(served_workers.mistakes(self._config, self._task, status))
        return offer_of(url, status, self._mine, why)

    def worker(self, url: str) -> HttpWorker:
        endpoint = self._at_site(url.rstrip("/"), self._endpoint)
        (made,) = served_workers.workers(self._config, endpoint, [url], self._key, self._task, self._resumed)
        self._made[made.name] = made
        return made

    def note_taken(self, worker: BorrowedWorker) -> None:
        assert isinstance(worker, HttpWorker)
        served_workers.tell_activated(worker, self._events)

    async def leave(self, worker: BorrowedWorker) -> None:
        assert isinstance(worker, HttpWorker)
        options = self._status.get(worker.name, {}).get("options")
        if isinstance(options, dict) and options.get("kv_pool") and options.get("kv_pool_role") == "rollout":
            worker.deactivate = True
        if self._made.get(worker.name) is worker:
            del self._made[worker.name]
        await worker.close()

    async def close(self) -> None:
        """Of those that the run has now; ``rollout.served_deactivate`` says how they are left."""
        await asyncio.gather(*(worker.close() for worker in self._made.values()))
