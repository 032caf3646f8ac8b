"""The file of a profile: JSON, keyed by model, engine and device, complete after every point.

Guarantees: a file is replaced as a whole, so that one that was interrupted holds every point measured before; a profile of
another model, engine or device is one ConfigError that names both; what is no profile is one ConfigError, never half read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.api import ConfigError
from orchestrator.api.jsontext import parse, parse_object
from orchestrator.durable_files import replace_text
from orchestrator.policies.parallelism.engine_profile import (
    EngineLayout,
    EngineProfile,
    EngineShape,
    Phase,
    ProfilePoint,
    point_from_dict,
    point_to_dict,
    shape_from_dict,
    shape_to_dict,
)

FORMAT = 1
_VOLATILE = (
    "transformers_version",
    "_name_or_path",
    "torch_dtype",
    "dtype",
)  # of a config.json: say nothing of the cost
_HOW = "make one with `rl-coserve profile`"


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """What a profile is true of, in words that people can compare."""

    model: str
    engine: str
    device: str

    def file_name(self) -> str:
        """One of its own."""
        words = "-".join((self.model, self.engine, self.device)).lower()
        return re.sub(r"[^a-z0-9.]+", "-", words).strip("-")[:160] + ".json"


@dataclass
class ProfileFile:
    """``skipped``: places that cannot be measured in this engine, and why; they are not tried again."""

    path: Path
    key: ProfileKey
    points: dict[tuple[Phase, EngineLayout, int, int], ProfilePoint] = field(default_factory=dict)
    shapes: dict[EngineLayout, EngineShape] = field(default_factory=dict)
    skipped: dict[tuple[Phase, EngineLayout, int, int], str] = field(default_factory=dict)
    uneven: dict[tuple[Phase, EngineLayout, int, int, float], ProfilePoint] = field(
        default_factory=dict
    )  # at imbalances above 1
    seconds: float = 0.0  # spent measuring, engine starts included, over all calls
    about: Mapping[str, Any] = field(default_factory=dict)  # machine and versions, for people

    @property
    def profile(self) -> EngineProfile:
        """What the planner, the simulator and admission read."""
        return EngineProfile([*self.points.values(), *self.uneven.values()], self.shapes.values())

    def add(self, point: ProfilePoint) -> None:
        """Keep one point; of two of one place the later."""
        place = point.phase, point.layout, point.batch, point.tokens
        if point.imbalance == 1.0:
            self.points[place] = point
        else:
            self.uneven[(*place, point.imbalance)] = point

    def save(self) -> None:
        """Replace the file. Raises ConfigError where it cannot be written."""
        skipped = [
            {"phase": phase, "tp": layout.tp, "ep": layout.ep, "batch": batch, "tokens": tokens, "why": why}
            for (phase, layout, batch, tokens), why in self.skipped.items()
        ]
        data = {
            "format": FORMAT,
            "kind": "real",
            "key": asdict(self.key),
            **self.about,
            "seconds": round(self.seconds, 3),
            "shapes": [shape_to_dict(shape) for shape in self.shapes.values()],
            "points": [point_to_dict(point) for point in (*self.points.values(), *self.uneven.values())],
            "skipped": skipped,
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self.path, json.dumps(data, indent=1) + "\n")
        except OSError as error:
            raise ConfigError("--out", str(self.path), f"cannot be written ({error.strerror or error})") from error


def load_profile(path: Path, name: str = "profile", key: ProfileKey | None = None) -> ProfileFile:
    """Read a file; ``name`` is the config field or option that it was given in, ``key`` what it must be of (None: anything).
    Raises ConfigError."""
    try:
        data = parse(path.read_bytes())
    except OSError as error:
        raise ConfigError(name, str(path), f"cannot be read ({error.strerror or error}); {_HOW}") from error
    except ValueError as error:
        raise ConfigError(name, str(path), f"is not a profile (not JSON: {error}); {_HOW}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ConfigError(name, str(path), f"is not a profile of format {FORMAT} (it says {found!r}); {_HOW}")
    try:
        found_key = ProfileKey(**{name: _text(value) for name, value in data["key"].items()})
        file = ProfileFile(path, found_key, seconds=_seconds(data["seconds"]))
        for item in data["points"]:
            file.add(point_from_dict(item))
        file.shapes = {shape.layout: shape for shape in map(shape_from_dict, data["shapes"])}
        for item in data["skipped"]:
            layout = EngineLayout(int(item["tp"]), int(item["ep"]))
            place = (_text(item["phase"]), layout, int(item["batch"]), int(item["tokens"]))
            file.skipped[place] = str(item["why"])  # type: ignore[index]  # another phase is never asked for
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigError(name, str(path), f"is a damaged profile ({error!r}); remove it and {_HOW}") from error
    if key is not None:
        check_profile(file, key, name)
    return file


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} is no text")
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1e12:
        raise ValueError(f"{value!r:.60} are no seconds")
    return float(value)


def check_profile(file: ProfileFile, key: ProfileKey, name: str = "profile") -> None:
    """Whether a profile is of this model, engine and device. Raises one ConfigError that names both."""
    differ = [what for what in ("model", "engine", "device") if getattr(file.key, what) != getattr(key, what)]
    if differ:
        pairs = "; ".join(
            f"its {what} is {getattr(file.key, what)!r}, here it is {getattr(key, what)!r}" for what in differ
        )
        raise ConfigError(name, str(file.path), f"is a profile of another {' and '.join(differ)}: {pairs}; {_HOW}")


def model_name(folder: Path, dtype: str) -> str:
    """What a model's cost depends on: its shape and its type, not its weights. Raises ConfigError when it is no folder."""
    try:
        config = parse_object((folder / "config.json").read_bytes())
        shape = {name: value for name, value in config.items() if name not in _VOLATILE}
        digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:8]
        kind, layers, hidden = config["architectures"][0], config["num_hidden_layers"], config["hidden_size"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        fix = f"its config.json cannot be read ({error!r}); give a Hugging Face folder"
        raise ConfigError("model.path", str(folder), fix) from error
    return f"{kind} {layers}x{hidden} {dtype} {digest}"
