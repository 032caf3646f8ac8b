"""Routed experts as NumPy's arrays, and back: what an engine chose, for a trainer that replays it.

Guarantees: what was packed is what is unpacked; where two parts know of a token, the one that comes first counts, since it was
there when the token was computed; a token that no part knows of is :data:`UNKNOWN` throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from orchestrator.api import RoutedExperts, RunError

UNKNOWN = -1  # nobody said which expert
Experts = np.ndarray[tuple[int, int, int], np.dtype[np.int16]]  # [tokens, layers, choices]


@dataclass(frozen=True, slots=True)
class ExpertsOfModel:
    """Of the model that is trained: its layers (those without experts too, which ``dense`` names), choices a token, and experts a
    layer."""

    layers: int
    choices: int
    experts: int
    dense: frozenset[int] = frozenset()

    def mistake(self, said: RoutedExperts, first: int, tokens: int) -> str:
        """Why an engine that was asked for a context's from its token ``first`` on, of ``tokens`` with the answer, cannot have
        chosen these; empty: it can. Numbers are compared as they came: of a million tokens that takes a second."""
        if (said.layers, said.choices) != (self.layers, self.choices):
            return f"the model has {self.layers} layers, each token {self.choices} of {self.experts} experts"
        if said.first != first or said.end > tokens:
            return f"they are of tokens {said.first} to {said.end}, asked for were {first} to {tokens}"
        rows = np.frombuffer(said.data, f"<u{said.width}").reshape(-1, said.layers, said.choices)
        if (most := int(rows.max(initial=0))) >= self.experts:
            return f"there is no expert {most}: the model has {self.experts} in a layer"
        for one, other in combinations(range(self.choices), 2):
            same = rows[:, :, one] == rows[:, :, other]
            same[:, list(self.dense)] = False
            if same.any():
                token, layer = np.argwhere(same)[0]
                return f"token {first + token} has one expert twice in layer {layer}"
        return ""


def pack_experts(chosen: np.ndarray[Any, Any] | None, first: int) -> RoutedExperts | None:
    """``chosen``: whole numbers ``[tokens, layers, choices]`` of the tokens from ``first`` on; None: there are none."""
    if chosen is None or not chosen.size:
        return None
    width = 1 if chosen.dtype.itemsize == 1 else 2
    _, layers, choices = chosen.shape
    return RoutedExperts(first, layers, choices, width, chosen.astype(f"<u{width}", copy=False).tobytes())


def unpack_experts(parts: Sequence[RoutedExperts], tokens: int) -> Experts | None:
    """Of the first ``tokens`` tokens of a context; None: nothing is known. Raises RunError for parts of different models."""
    if not parts:
        return None
    forms = {(part.layers, part.choices) for part in parts}
    if len(forms) > 1:
        raise RunError(f"routed experts of different models, (layers, choices) each: {sorted(forms)}")
    whole = np.full((tokens, *forms.pop()), UNKNOWN, np.int16)
    for part in reversed(parts):  # the first one has the last word
        rows = np.frombuffer(part.data, f"<u{part.width}").reshape(-1, part.layers, part.choices)
        rows = rows[: max(0, tokens - part.first)]
        whole[part.first : part.first + len(rows)] = rows
    return whole


def joined_experts(parts: Sequence[RoutedExperts | None]) -> RoutedExperts | None:
    """Of one turn that several engines made, one after another, up to the first gap; None: none of them said anything."""
    found: RoutedExperts | None = None
    for part in filter(None, parts):
        if found is None:
            found = part
            continue
        form = part.layers, part.choices, part.width
        if part.first > found.end or form != (found.layers, found.choices, found.width):
            break
        found = RoutedExperts(found.first, *form, found.data + part.since(found.end).data)
    return found
