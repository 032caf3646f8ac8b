"""A finished run's own durations as figures of ``[sim]``, which ``cost --from`` and ``sim --from`` predict another run with.

What engines take is fitted to the run's turns: a decode step costs so much, and each sequence in it so much more. Training,
publishing, updates and rewards are means. Lengths, environments and rewards are played again from the run's trajectories
(``sim.trace``). The orchestrator's own work, which the simulator does not know, is in one factor on all of these: the one with
which the run's own config, simulated, has the run's own time per step. So a prediction is as good as the other run is like this
one: the same machine, model and task, another seed, ``rollout.alpha``, batch, number of environments or steps.
"""

from __future__ import annotations

import json
import shlex
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from orchestrator.api import ConfigError, jsontext
from orchestrator.config import Config, parse_config
from orchestrator.config.run_config import apply_override, read_table
from orchestrator.durable_files import write_durably
from orchestrator.observe.report.run_log import RunLog, load_run
from orchestrator.observe.turn_lines import parse_turn
from orchestrator.ops.cost import CostEstimate, estimate_cost
from orchestrator.run_folder import TURNS_FILE, RunFolder

FILE = "calibration.json"
FEWEST_STEPS = 20
SIMULATED_STEPS = 34
SKIPPED = 4  # steps at the start that count in neither, the run or its simulation: an empty buffer, caches
_TRIES, _CLOSE = 5, 0.01
_ROWS = 50_000  # trajectories that are played again


@dataclass(frozen=True, slots=True)
class Calibration:
    """``sim``: keys of that section. Seconds: ``step`` as measured, ``simulated`` as the simulator has it now; ``startup``; of
    one warm-up step; of one held-out episode. ``factor``: on what was measured apart."""

    run: str
    sim: dict[str, Any]
    step: float
    simulated: float
    factor: float
    startup: float
    warmup_step: float
    heldout_prompt: float

    def text(self) -> str:
        """For people."""
        step, sequence = self.sim["decode_seconds_per_step"], self.sim["decode_seconds_per_sequence"]
        return (
            f"{self.run}: {self.step:.2f} s per step as measured, {self.simulated:.2f} s simulated\n"
            f"a decode step {1e3 * step:.2f} ms, and {1e3 * sequence:.3f} ms for each sequence; training "
            f"{1e6 * self.sim['train_seconds_per_token']:.1f} us per token; start-up {self.startup:.0f} s"
        )

    def wall_seconds(self, config: Config, step: float) -> float:
        """Of a whole run of ``config`` with steps of so many seconds: start-up, warm-up and evaluations included."""
        steps, every = config.run.steps, config.evaluation.every
        evaluations = 2 + ((steps - 1) // every if every else 0)
        episodes = config.evaluation.prompts * config.evaluation.samples
        beside = config.warmup.steps * self.warmup_step + evaluations * episodes * self.heldout_prompt
        return self.startup + beside + steps * step


def calibrate(folder: Path) -> Calibration:
    """Of a run of which at least :data:`FEWEST_STEPS` steps are done; writes :data:`FILE` into its folder. Raises ConfigError."""
    run, config = load_run(folder), RunFolder.open(folder).config()
    if run.kind == "simulated" and not (folder / "trajectories").is_dir():
        raise ConfigError("run", str(folder), "was simulated: calibrate a real run")
    if len(run.steps) < FEWEST_STEPS:
        fix = f"has {len(run.steps)} steps: at least {FEWEST_STEPS} are needed, since the first ones fill the pipeline"
        raise ConfigError("run", str(folder), fix)
    step = measured_step(run)
    figures = _figures(run, folder)
    factor, simulated = 1.0, 0.0
    for _ in range(_TRIES):
        simulated = _simulated_step(config, _sim(folder, figures, factor))
        if abs(simulated / step - 1) < _CLOSE:
            break
        factor *= step / simulated
    warmup, evaluations = run.warmup, [stage.end - stage.start for stage in run.stages if stage.name == "evaluate"]
    episodes = sum(item.episodes for item in run.evaluations)
    found = Calibration(
        run.name,
        _sim(folder, figures, factor),
        round(step, 6),
        round(simulated, 6),
        round(factor, 6),
        round(sum(stage.end - stage.start for stage in run.stages if stage.name == "startup"), 6),
        round(warmup.seconds / max(1, warmup.steps), 6) if warmup else 0.0,
        round(sum(evaluations) / episodes, 6) if episodes else 0.0,
    )
    write_durably(folder / FILE, json.dumps(asdict(found), indent=2, sort_keys=True) + "\n")
    return found


def read_calibration(folder: Path) -> Calibration:
    """What :func:`calibrate` wrote. Raises ConfigError."""
    file = folder / FILE
    try:
        data = jsontext.parse_object(file.read_bytes(), finite=True)
        numbers = {part.name: data[part.name] for part in fields(Calibration) if part.type == "float"}
        for name, number in numbers.items():
            if type(number) not in (int, float):
                raise ValueError(f"{name} is no number")
        return Calibration(str(data["run"]), dict(data["sim"]), **{name: float(one) for name, one in numbers.items()})
    except FileNotFoundError:
        fix = f"was not calibrated: `rl-coserve calibrate {shlex.quote(str(folder))}` writes {FILE}, in about a minute"
        raise ConfigError("--from", str(folder), fix) from None
    except (OSError, ValueError, LookupError, TypeError, OverflowError) as error:
        raise ConfigError("--from", str(file), f"cannot be read: {error!r}; calibrate the run again") from error


def config_from(folder: Path, file: str | None, overrides: Sequence[str]) -> Config:
    """The config of ``file``, or of the run itself, with the run's figures where it says none of its own. Raises ConfigError."""
    found = read_calibration(folder)
    data = read_table(file) if file else RunFolder.open(folder).config().model_dump(mode="json") | {"sim": {}}
    data["sim"] = found.sim | data.get("sim", {})
    for override in overrides:
        apply_override(data, override)
    return parse_config(data)


def _sim(folder: Path, figures: dict[str, float], factor: float) -> dict[str, Any]:
    scaled = {name: round(value * factor, 9) for name, value in figures.items()}
    return {"trace": str(folder), "trace_rows": _ROWS, "trace_spread": True, "costs": "linear", **scaled}


def predicted(config: Config) -> CostEstimate:
    """Of a config with the figures of a calibration: a run's own and any other's are simulated alike."""
    return estimate_cost(config, SIMULATED_STEPS, SKIPPED)


def _simulated_step(config: Config, sim: dict[str, Any]) -> float:
    data = config.model_dump(mode="json")
    data["run"]["steps"] = max(SIMULATED_STEPS, config.run.steps)
    return predicted(parse_config(data | {"sim": sim})).seconds_per_step


def measured_step(run: RunLog) -> float:
    """Seconds per step behind the first ones, without the evaluations between them."""
    steps = run.steps[SKIPPED:]
    between = [(stage.start, stage.end) for stage in run.stages if stage.name == "evaluate"]
    periods = [
        step.period - sum(end - begin for begin, end in between if step.t - step.period <= begin and end <= step.t)
        for step in steps
    ]
    return sum(periods) / len(periods)


def _figures(run: RunLog, folder: Path) -> dict[str, float]:
    def mean(*names: str) -> float:
        return sum(
            sum(found) / len(found)
            for name in names
            if (found := [stage.end - stage.start for stage in run.stages if stage.name == name])
        )

    tokens = sum(step.tokens for step in run.steps)
    training = sum(stage.end - stage.start for stage in run.stages if stage.name in ("train_step", "feed"))
    calls = run.rewards.get("calls", 0)
    queued = run.rewards.get("queued_seconds", 0.0)
    step, sequence = _decode(folder)
    return {
        "decode_seconds_per_step": step,
        "decode_seconds_per_sequence": sequence,
        "train_seconds_per_token": training / max(1, tokens),
        "publish_seconds": mean("publish"),
        "update_seconds": mean("prepare", "update"),
        "reward_seconds": (run.rewards.get("seconds", 0.0) - queued) / calls if calls else 0.0,
    }


def _decode(folder: Path) -> tuple[float, float]:
    """Seconds of a decode step, and of a sequence in it, fitted to the turns by least squares: a turn of k tokens beside n others
    took k (step + n sequence). Raises ConfigError for a run whose turns were not recorded."""
    lengths = dict(_lengths(folder))
    turns: dict[str, list[tuple[float, float, int]]] = defaultdict(list)
    try:
        with (folder / TURNS_FILE).open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    name, turn, worker, asked, answered, _, _ = parse_turn(line)
                except ValueError:  # cut by a kill
                    continue
                turns[worker].append((asked, answered, lengths.get((name, turn), 0)))
    except OSError as error:
        fix = f"its turns cannot be read ({error}): they are recorded with logging.turns_mb above 0"
        raise ConfigError("run", str(folder), fix) from error
    one = both = other = first = second = 0.0  # sums of squares and products
    for spans in turns.values():
        begins, ends = sorted(span[0] for span in spans), sorted(span[1] for span in spans)
        for asked, answered, count in spans:
            if count:
                middle = (asked + answered) / 2
                beside = count * (bisect_right(begins, middle) - bisect_left(ends, middle))
                one, both, other = one + count * count, both + count * beside, other + beside * beside
                first, second = first + count * (answered - asked), second + beside * (answered - asked)
    if not one:
        raise ConfigError(
            "run", str(folder), "none of its recorded turns is in its stored trajectories: nothing to fit"
        )
    scale = one * other - both * both
    if scale > 1e-9 * one * other:
        step, sequence = (first * other - second * both) / scale, (second * one - first * both) / scale
        if step > 0 and sequence >= 0:
            return step, sequence
    together = (0.0, second / other) if other and second * one > first * both else (first / one, 0.0)
    return max(together[0], 1e-6), together[1]


def _lengths(folder: Path) -> Iterator[tuple[tuple[str, int], int]]:
    """Tokens that the policy said, by trajectory and turn."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for file in sorted((folder / "trajectories").rglob("part-*.parquet")):
        try:
            rows = pq.ParquetFile(file).read(columns=["trajectory_id", "turns.list.element.versions"]).to_pylist()
        except (OSError, pa.ArrowException) as error:
            raise ConfigError("run", str(file), f"cannot be read as Parquet: {error}") from error
        for row in rows:
            for number, turn in enumerate(row["turns"]):
                yield (row["trajectory_id"], number), sum(span["count"] for span in turn["versions"])
