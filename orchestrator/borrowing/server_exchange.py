"""Which serving GPUs a run has, looked at again and again while it runs (ROSE 4): servers are given back, others are taken.

Guarantees:

* What is decided is :class:`orchestrator.policies.serving.server_borrowing.ServerBroker`, and how many are needed
  :class:`~orchestrator.policies.serving.server_borrowing.BorrowDemand`. Here is only what carries it out.
* A server is exchanged for a less used one when an RL step has begun (the version moved), at the next look. One that is crowded,
  reclaimed, gone, another job's, no candidate any more, or not needed is given back at any look.
* What is given back has none of our requests (they go on elsewhere, with their tokens), is deactivated where it is a rollout
  engine of a pool, and its lease is free. What is taken is leased, activated, and has the present weights before its first
  request.
* A run without workers of its own keeps its last server, whatever is wrong with it, until it has another: the proxy says when
  that has lasted too long. One without any, because other jobs have them all, waits as long for one, and then ends.
* Where other jobs wait for servers of these, a run has no more than its share of them
  (:mod:`orchestrator.policies.serving.fair_shares`); where it lacks some that others have, it says so there.
* A server that the proxy has given up, as it did not come back in time, is given back, and may be taken again like any other.
* Every change is an event: ``borrowed`` and ``returned``, with the reason and the use that decided it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

from orchestrator.api import BorrowedWorker, CommandError, ConfigError, PlacedWorker, RetryableError, RunError
from orchestrator.api.http import MAX_CLAIM_SECONDS, MAX_ID_LENGTH, MAX_IDS
from orchestrator.config.rollout_keys import BorrowedSection, RoutingSection
from orchestrator.events import EventLog
from orchestrator.policies.routing.turn_routing import ANY, LEAST_UTILIZED, Seat
from orchestrator.policies.serving.fair_shares import FleetTenant, fair_shares
from orchestrator.policies.serving.server_borrowing import GONE, BorrowDemand, BorrowRules, ServerBroker
from orchestrator.proxy.membership import Membership

LOOK_SECONDS = 5.0  # that a server may take to say how it is
MOST_CLAIMS = 64  # that a server is heard with
_LARGEST = 1e300  # a whole number of JSON may be larger than any float
_OURS = ("", "")  # beside other jobs, which have names
OTHERS, DROPPED = "another job has it", "no candidate any more"
_LOST = (RetryableError, CommandError, ConfigError, TimeoutError)


Job = tuple[str, str]  # its name, and the metadata store that the name is of


@dataclass(frozen=True, slots=True)
class Claim:
    """Another job wants so many servers in all."""

    job: Job
    wanted: int
    weight: float


@dataclass(frozen=True, slots=True)
class Offer:
    """What a server says of itself. ``why`` it cannot be had, "" if it can: it does not answer, or serves another model.
    ``taken``: the job that has it, ours excepted; ``claims``: what other jobs that wait said there. ``share`` of its KV memory
    that serving uses now, and ``before``: the mean, and over how many seconds. ``lends``: rollouts get any of it now."""

    url: str
    why: str = ""
    taken: str = ""
    share: float = 0.0
    before: tuple[float, float] = (0.0, 0.0)
    lends: bool = True
    holder: Job = ("", "")  # of ``taken``
    claims: tuple[Claim, ...] = ()


class Market(Protocol):
    """Where the servers are (:mod:`orchestrator.borrowing.discovery`)."""

    job: str
    first: Sequence[Offer]  # what the servers said when the run chose those that it begins with

    async def list_offers(self) -> Sequence[Offer]:
        """All candidates, as the config names them now, in its order."""

    async def claim(self, offers: Sequence[Offer], wanted: int, seconds: float) -> None:
        """Say at those that other jobs have, for so long, that this run wants so many servers in all."""

    def worker(self, url: str) -> BorrowedWorker:
        """A client of a server. Nothing is sent yet."""

    def note_taken(self, worker: BorrowedWorker) -> None:
        """It has the present weights: an event says so where it had to be activated."""

    async def leave(self, worker: BorrowedWorker) -> None:
        """Close it: its server is deactivated where it is a rollout engine of a pool, and its lease is free."""


def rules_of(settings: BorrowedSection) -> BorrowRules:
    """What the config says."""
    return BorrowRules(
        window=settings.window,
        margin=settings.margin,
        silent=settings.patience,
        crowded=settings.crowded,
        patience=settings.patience,
        rest=settings.rest,
    )


class Exchange:
    """Of one run. ``first``: what each server said when the run chose those that it begins with."""

    def __init__(
        self,
        market: Market,
        members: Membership,
        events: EventLog,
        settings: BorrowedSection,
        routing: RoutingSection,
        first: Sequence[Offer] = (),
    ) -> None:
        self._market, self._members, self._proxy, self._events = market, members, members.proxy, events
        self._settings, self._routing = settings, routing
        self._policy = ServerBroker(rules_of(settings))
        self._demand = BorrowDemand(settings.idle)
        self._changing: dict[str, asyncio.Task[None]] = {}  # servers that are being taken or given back
        self._leaving: set[asyncio.Task[None]] = set()  # clients that are being closed, whoever was cancelled meanwhile
        self._since: dict[str, float] = {}  # server -> when it was taken
        self._version = -1
        self._had = asyncio.get_running_loop().time()  # when there was a worker
        self._refused: dict[str, str] = {}  # server -> why it cannot be had, as it was said last
        self._see(first)

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        for state in self._proxy.states:
            if state.borrowed:
                self._policy.record_owner(state.worker.name, self._market.job, loop.time())
                self._borrowed(state.worker.name, "the run starts")
        try:
            while True:
                await asyncio.sleep(self._settings.every)
                await self.refresh_servers()
        finally:
            for task in self._changing.values():
                task.cancel()
            await asyncio.gather(*self._changing.values(), return_exceptions=True)
            await asyncio.gather(*self._leaving, return_exceptions=True)

    async def refresh_servers(self) -> None:
        """Once: ask the servers how they are, and do what follows."""
        offers = await self._market.list_offers()
        now, proxy = asyncio.get_running_loop().time(), self._proxy
        self._see(offers)
        self._drop(offers)
        self._give_up(now)
        self._in_time(now)
        self._demand.observe_turns(now, proxy.peak_turns())
        if proxy.suspended:
            return  # at the next look
        own = sum(not (state.borrowed or state.removed or state.parked) for state in proxy.states)
        least = 0 if own else 1
        most = self._settings.most or len(offers)
        turns, cap = self._members.dedicated_turns(), self._routing.served_cap or 0
        if self._routing.spread == LEAST_UTILIZED:  # as long as there is a turn for each
            turns, cap = own, 1
        job, needed = self._market.job, max(least, self._demand.gpus_wanted(now, turns, cap, most))
        begins, self._version = proxy.version != self._version, proxy.version
        share = share_of_fleet(offers, self._policy.gpus_of(job), needed, self._settings.weight)
        change = self._policy.choose_gpus(job, needed, now, exchange=begins, least=least, share=max(least, share))
        for name, why in zip(change.given_back, change.reasons, strict=True):
            self._begin_return(name, why)
            if why == DROPPED:
                self._policy.remove_gpu(name)
        for name in change.taken:
            if name in self._changing:
                self._policy.record_refusal(name, now)  # at the next look
            else:
                self._begin(name, self._take(name))
        if len(self._policy.gpus_of(job)) < needed:
            await self._market.claim(offers, needed, claim_seconds(self._settings))

    def _begin(self, name: str, steps: Coroutine[Any, Any, None]) -> None:
        task = self._changing[name] = asyncio.create_task(steps, name=f"exchange {name}")
        task.add_done_callback(lambda done: self._ended(name, done))

    def _begin_return(self, name: str, why: str) -> None:
        before = self._changing.get(name)
        self._begin(name, self._give_back(name, why, before))

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        if self._changing.get(name) is task:
            del self._changing[name]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._policy.record_refusal(
                name, asyncio.get_running_loop().time()
            )  # else it would pass for ours, and rest for ever
            self._proxy.note_fault(f"borrowing {name}", f"{error!r}")

    def _see(self, offers: Sequence[Offer]) -> None:
        now = asyncio.get_running_loop().time()
        self._refused = {
            offer.url: why for offer in offers if (why := offer.why or (offer.taken and f"job {offer.taken} has it"))
        }
        for offer in offers:
            if offer.why:
                continue  # silent, and gone if that lasts
            state = self._members.find_worker(offer.url)
            full = state is not None and not state.parked and state.full
            lends = offer.lends and not full and not offer.taken
            self._policy.observe_gpu(offer.url, now, offer.share, lends=lends, before=offer.before)

    def _drop(self, offers: Sequence[Offer]) -> None:
        """Those that the config does not name any more, and those whose lease another job has got."""
        named = {offer.url: offer.taken for offer in offers}
        ours = self._policy.gpus_of(self._market.job)
        for name in self._policy.known:
            if name not in named and name in ours:
                self._policy.bar_gpu(name, DROPPED)  # given back when the policy is asked, but for a last one
            elif name not in named:
                self._policy.remove_gpu(name)
            elif name in ours and named[name]:
                self._begin_return(name, OTHERS)
                self._policy.remove_gpu(name)

    def _in_time(self, now: float) -> None:
        """A run that has nothing left to generate with waits for a server, but not for ever. Raises RunError."""
        if any(not (state.parked or state.removed) for state in self._proxy.states) or self._changing:
            self._had = now
        elif now - self._had > self._members.patience:
            why = "; ".join(f"{name}: {reason}" for name, reason in self._refused.items()) or "there is no candidate"
            raise RunError(
                f"no server could be borrowed for {now - self._had:.0f} s, and nothing else generates: {why}"
            )

    def _give_up(self, now: float) -> None:
        """Those that the proxy has given up, however well they say they are: else they would be ours, and of no use, for good."""
        ours = self._policy.gpus_of(self._market.job)
        for state in self._proxy.states:
            name = state.worker.name
            if state.borrowed and state.removed and name in ours and name not in self._changing:
                self._begin_return(name, GONE)
                self._policy.record_refusal(name, now)

    async def _take(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        worker = self._market.worker(name)
        hardware = self._routing.hardware.get(name, ANY)
        if isinstance(worker, PlacedWorker) and worker.hardware:
            hardware = worker.hardware
        try:
            await self._members.take_worker(worker, Seat(hardware, self._routing.served_cap or 0, True))
        except _LOST as error:
            late = isinstance(error, CommandError) and error.code == "leased"  # another job was first: no fault
            self._policy.record_refusal(name, loop.time(), rest=not late)
            if not late:
                self._proxy.note_fault(f"borrowing {name}", f"could not be taken: {error!r}")
            await self._leave(worker)
        except BaseException:
            await self._leave(worker)
            raise
        else:
            self._market.note_taken(worker)
            self._borrowed(name, "used least")

    async def _give_back(self, name: str, why: str, before: asyncio.Task[None] | None) -> None:
        """``before``: what is done with it now."""
        loop = asyncio.get_running_loop()
        if before is not None:
            before.cancel()
            await asyncio.gather(before, return_exceptions=True)
        state = self._members.find_worker(name)
        if state is None or state.parked:
            return
        worker = state.worker
        assert isinstance(worker, BorrowedWorker)
        try:
            moved = await self._members.give_back(state)
        finally:
            await self._leave(worker)
        held = loop.time() - self._since.pop(name, loop.time())
        use = self._policy.recent_use(name, loop.time())
        self._events.emit(
            "returned", worker=name, reason=why, use=round(use, 6), requests=moved, seconds=round(held, 3)
        )

    async def _leave(self, worker: BorrowedWorker) -> None:
        """Close it. Who is cancelled meanwhile leaves the rest of it to :meth:`run`: else its lease would last."""
        leaving = asyncio.create_task(self._market.leave(worker), name=f"leave {worker.name}")
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)
        await asyncio.shield(leaving)

    def _borrowed(self, name: str, why: str) -> None:
        now = asyncio.get_running_loop().time()
        self._since[name] = now
        self._events.emit("borrowed", worker=name, reason=why, use=round(self._policy.recent_use(name, now), 6))


def share_of_fleet(offers: Sequence[Offer], ours: Collection[str], wanted: int, weight: float) -> int:
    """Servers that a run may have which holds these of them, and wants so many."""
    there = [offer for offer in offers if not offer.why or offer.url in ours]
    holds = Counter(offer.holder for offer in there if offer.taken)
    tenants = {job: FleetTenant(count, count) for job, count in holds.items()}
    for claim in (claim for offer in there for claim in offer.claims):
        tenants[claim.job] = FleetTenant(holds[claim.job], max(holds[claim.job], claim.wanted), claim.weight)
    if not tenants:
        return wanted
    return fair_shares({**tenants, _OURS: FleetTenant(len(ours), wanted, weight)}, len(there))[_OURS]


def claim_seconds(settings: BorrowedSection) -> float:
    """That a claim holds: it is said anew at every look."""
    return min(MAX_CLAIM_SECONDS, 3 * settings.every + LOOK_SECONDS)


def offer_of(url: str, status: Mapping[str, object], mine: Job, why: str = "") -> Offer:
    """From a server's status, whatever that says. ``mine``: job and metadata store of this run."""
    lease, device = status.get("lease"), status.get("device")
    taken, holder = "", ("", "")
    if isinstance(lease, dict) and (lease.get("job"), lease.get("place")) != mine:
        taken, holder = str(lease.get("job")) or "of another run", (str(lease.get("job")), str(lease.get("place")))
    claims = _claims_of(status.get("claims"), mine)
    if not isinstance(device, dict):
        return Offer(url, why, taken, holder=holder, claims=claims)
    mean, seconds = device.get("serving_use", 0.0), device.get("seconds", 0.0)
    now, lends = device.get("serving_now", mean), device.get("lends", True)
    if not (_share(mean) and _share(now) and _number(seconds) and seconds >= 0 and isinstance(lends, bool)):
        why = why or f"reports an impossible device state: {str(device)[:200]}"
        return Offer(url, why, taken, holder=holder, claims=claims)
    return Offer(url, why, taken, float(now), (float(mean), float(seconds)), lends, holder, claims)


def _claims_of(said: object, mine: Job) -> tuple[Claim, ...]:
    """Of other jobs. What cannot be counts for nothing."""
    found = list[Claim]()
    for one in said[:MOST_CLAIMS] if isinstance(said, list) else ():
        if isinstance(one, dict):
            job = str(one.get("job"))[:MAX_ID_LENGTH], str(one.get("place"))
            wanted, weight = one.get("wanted"), one.get("weight")
            if type(wanted) is int and 0 < wanted <= MAX_IDS and _number(weight) and weight > 0 and job != mine:
                found.append(Claim(job, wanted, float(weight)))
    return tuple(found)


def _number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _share(value: object) -> TypeGuard[float]:
    return _number(value) and 0 <= value <= 1
