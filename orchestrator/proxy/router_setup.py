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


def router_of_workers(
    settings: RoutingSection,
    workers: Sequence[RolloutWorker],
    parts: DisaggregationSection | None = None,
    others: Callable[[str], bool] = lambda name: False,
) -> TurnRouter:
    """The router of these workers. ``others``: whether a worker of this name may come later. Two workers of one name, a class
    that nobody has: ConfigError."""
    names = [worker.name for worker in workers]
    placed = [worker.hardware if isinstance(worker, PlacedWorker) else "" for worker in workers]
    borrowed = [isinstance(worker, BorrowedWorker) for worker in workers]
    return planned_router(settings, names, placed, borrowed, parts or DisaggregationSection(), others)


def with_caps(settings: RolloutSection, borrows: bool, profile: EngineProfile | None = None) -> RoutingSection:
    """The routing with numbers as caps. ``borrows``: other workers than the run's own may generate; ``profile``: that the config
    names. Where placement says who goes where, or engines are cut anew, there is no limit of our own. Raises ConfigError for a
    profile without the engines that the run has."""
    routing = settings.routing
    first = borrows and settings.workers > 0 and routing.spread == "dedicated-first"
    limited = first and not settings.placement.enabled and not settings.reshapes
    least = min(settings.engine_groups, key=lambda group: group.ranks)
    own, served = (min(TURNS * least.ranks, least.max_num_seqs), TURNS) if limited else (0, 0)
    if profile is not None:
        try:
            own = min(
                saturating_turns(profile, EngineLayout(least.ranks), settings.longest_context), least.max_num_seqs
            )
        except KeyError as error:
            fix = (
                f"lacks the run's engines with {least.ranks} devices ({error}): measure them with `rl-coserve profile`"
            )
            raise ConfigError("rollout.routing.profile", routing.profile, fix) from error
    caps = {
        "cap": own if routing.cap is None else routing.cap,
        "served_cap": served if routing.served_cap is None else routing.served_cap,
    }
    return routing.model_copy(update=caps)


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
) -> TurnRouter:
    """The same before the workers are there. ``placed``: the class of each one's pool, "" where it has none."""
    for place, name in enumerate(names):
        if name in names[:place]:
            raise ConfigError("rollout.workers", name, "two workers have this name; each needs one of its own")
    for name in settings.hardware:
        if name not in names and not others(name):
            fix = f"no rollout worker has this name; there are: {', '.join(names)}"
            raise ConfigError("rollout.routing.hardware", name, fix)
    seats = [
        Seat(pool or settings.hardware.get(name, ANY), (settings.served_cap if other else settings.cap) or 0, other)
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
