"""The rollout workers of a run as the router sees them: class of hardware, cap, dedicated or borrowed.

Pure functions of the config and of what the workers say of themselves. Bad input is one ConfigError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from orchestrator.api import BorrowedWorker, ConfigError, PlacedWorker, RolloutWorker, urls
from orchestrator.config.rollout_keys import DisaggregationSection, RolloutSection, RoutingSection
from orchestrator.policies.parallelism.engine_profile import EngineLayout, EngineProfile
from orchestrator.policies.routing.turn_routing import ANY, DECODE, PREFILL, Seat, TurnRouter
from orchestrator.policies.serving.server_borrowing import TURNS, saturating_turns
from orchestrator.settings.engine_settings import EngineSettings


def router_of_workers(
    settings: RoutingSection,
    workers: Sequence[RolloutWorker],
    parts: DisaggregationSection | None = None,
    others: Callable[[str], bool] = lambda name: False,
    caps: Callable[[str], int] | None = None,
) -> TurnRouter:
    """The router of these workers. ``others``: whether a worker of this name may come later; ``caps``: of own engines, None: all
    have that of ``settings``. Two workers of one name, a class that nobody has: ConfigError."""
    names = [worker.name for worker in workers]
    placed = [worker.hardware if isinstance(worker, PlacedWorker) else "" for worker in workers]
    borrowed = [isinstance(worker, BorrowedWorker) for worker in workers]
    return planned_router(settings, names, placed, borrowed, parts or DisaggregationSection(), others, caps)


def _limited(settings: RolloutSection, borrows: bool) -> bool:
    """Whether dedicated workers are filled first, which needs caps."""
    first = borrows and settings.workers > 0 and settings.routing.spread == "dedicated-first"
    return first and not settings.placement.enabled and not settings.reshapes


def engine_caps(settings: RolloutSection, borrows: bool, profile: EngineProfile | None = None) -> Callable[[str], int]:
    """Turns that an own engine of this name may have at once, by its own devices (0: any number); where they are of several
    kinds the least for one of which no group is known. Arguments and errors as of :func:`with_caps`."""
    routing = settings.routing

    def cap_of(group: EngineSettings) -> int:
        if routing.cap is not None:
            return routing.cap
        if profile is None:
            return min(TURNS * group.ranks, group.max_num_seqs) if _limited(settings, borrows) else 0
        try:
            turns = saturating_turns(profile, EngineLayout(group.ranks), settings.longest_context)
        except KeyError as error:
            fix = (
                f"lacks the run's engines with {group.ranks} devices ({error}): measure them with `rl-coserve profile`"
            )
            raise ConfigError("rollout.routing.profile", routing.profile, fix) from error
        return min(turns, group.max_num_seqs)

    caps = [cap_of(group) for group in settings.engine_groups]

    def by_name(name: str) -> int:
        number = name.removeprefix("vllm-")
        return caps[settings.group_of(int(number))] if number != name and number.isdigit() else min(caps)

    return by_name


def with_caps(settings: RolloutSection, borrows: bool, profile: EngineProfile | None = None) -> RoutingSection:
    """The routing with numbers as caps. ``borrows``: other workers than the run's own may generate; ``profile``: that the config
    names. Where placement says who goes where, or engines are cut anew, there is no limit of our own. Raises ConfigError for a
    profile without the engines that the run has."""
    routing = settings.routing
    served = TURNS * _limited(settings, borrows) if routing.served_cap is None else routing.served_cap
    own = engine_caps(settings, borrows, profile)
    return routing.model_copy(update={"cap": own(""), "served_cap": served})


def may_come(settings: RolloutSection, name: str) -> bool:
    """Whether a server of this name may be borrowed later on: one that the config names, or any URL where a file names them."""
    known = name in [url.rstrip("/") for url in settings.served]
    return settings.borrowed.exchanged and (known or bool(settings.borrowed.file and not urls.mistake(name, True)))


def planned_router(
    settings: RoutingSection,
    names: Sequence[str],
    placed: Sequence[str],
    borrowed: Sequence[bool],
    parts: DisaggregationSection | None = None,
    others: Callable[[str], bool] = lambda name: False,
    caps: Callable[[str], int] | None = None,
) -> TurnRouter:
    """The same before the workers are there. ``placed``: the class of each one's pool, "" where it has none."""
    for place, name in enumerate(names):
        if name in names[:place]:
            raise ConfigError("rollout.workers", name, "two workers have this name; each needs one of its own")
    for name in settings.hardware:
        if name not in names and not others(name):
            fix = f"no rollout worker has this name; there are: {', '.join(names)}"
            raise ConfigError("rollout.routing.hardware", name, fix)
    own = caps or (lambda name: settings.cap or 0)
    seats = [
        Seat(pool or settings.hardware.get(name, ANY), (settings.served_cap or 0) if other else own(name), other)
        for name, pool, other in zip(names, placed, borrowed, strict=True)
    ]
    return TurnRouter(
        seats,
        settings.policy,
        imbalance=settings.imbalance,
        skew=settings.skew,
        affinity=settings.affinity,
        fallback=settings.fallback,
        spread=settings.spread,
        phases=phase_classes(parts or DisaggregationSection(), [seat.hardware for seat in seats]),
    )


def phase_classes(settings: DisaggregationSection, classes: Sequence[str]) -> dict[str, str]:
    """Phase -> class, for the router; empty when it is off. Raises ConfigError for a class that no worker is of."""
    if not settings.enabled:
        return {}
    for name in ("prefill", "decode"):
        wanted = getattr(settings, name)
        if wanted not in classes:
            have = ", ".join(dict.fromkeys(classes)) or "none"
            fix = f"no rollout worker is of this class (there are: {have}); set it in rollout.routing.hardware"
            raise ConfigError(f"rollout.disaggregation.{name}", wanted, fix)
    return {PREFILL: settings.prefill, DECODE: settings.decode}
