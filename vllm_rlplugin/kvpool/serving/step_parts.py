"""What a step of a stock scheduler consists of, prefill and decode, without a look at every request that decodes.

Guarantees: :meth:`StepParts.note` says of each step what :func:`count_parts` would, in time that grows with the requests that
came, went or prefill; those that go on decoding are counted together, by comparisons of whole lists and sets. Only where drafts
are in a step each request is looked at, as each may have another number of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

_SPARE = 256  # names of requests that are gone, before they are forgotten


class StepParts:
    """Of the steps of one scheduler, each noted once, in order. ``find``: vLLM's request of this name, or None."""

    def __init__(self, find: Callable[[str], Any]) -> None:
        self._find = find
        self._decoding: set[str] = set()  # names that decoded; some are gone
        self._plain: list[str] = []  # names of the latest step, if all of them decoded without drafts
        self.prefilling: dict[str, Any] = {}  # requests whose tokens were not all computed after their latest step

    def running(self) -> list[Any]:
        """Requests that run, and whose prompts (or, preempted before, whose tokens) are not all computed: those that run beside
        them decode."""
        return [
            found for found in self.prefilling.values() if not found.is_finished() and found.status.name == "RUNNING"
        ]

    def note(self, output: Any) -> tuple[int, int, set[str]]:
        """(Tokens of prefill, sequences that decode, names of those that prefill or have drafts) of a step just scheduled."""
        counts = output.num_scheduled_tokens
        names = list(counts)
        if names == self._plain and not self.prefilling and output.total_num_scheduled_tokens == len(names):
            return 0, len(names), set()  # as before; the names are the same objects, which is quickly seen
        others: set[str] = set()
        if not counts.keys() <= self._decoding:
            others = counts.keys() - self._decoding
        plain = len(counts) - len(others)
        if output.total_num_scheduled_tokens - sum(counts[name] for name in others) != plain:
            others = set(counts)  # drafts, or one that computes again what it had
            plain = 0
        self._plain = [] if others else names
        tokens, batch = 0, plain
        for name in others:
            found, count = self._find(name), counts[name]
            if _decodes(output, name, count, found):
                batch += 1
                self._decoding.add(name)
            else:
                tokens += count
                self._decoding.discard(name)
                self.prefilling[name] = found
        if self.prefilling:
            self.prefilling = {
                name: found
                for name, found in self.prefilling.items()
                if found is not None and not found.is_finished() and left_of(found) > 1
            }
        if len(self._decoding) > 2 * len(counts) + _SPARE:
            self._decoding.intersection_update(counts)
        return tokens, batch, others


class QueueHead:
    """The requests at the head of a scheduler's queue that have so many tokens together; looked up anew when the queue changed,
    as stock's priority queue sorts itself for whoever reads it. ``measure``: of a request."""

    def __init__(self, scheduler: Any, measure: Callable[[Any], int]) -> None:
        self._scheduler, self._measure = scheduler, measure
        self._key: tuple[Any, ...] = ()
        self._found: list[int] = []

    def read(self, tokens: int, most: int) -> list[int]:
        """What they measure, in order: as many as reach ``tokens``, ``most`` at most."""
        waiting = self._scheduler.waiting
        key = (len(waiting), waiting.peek_request(), tokens, most) if waiting and most > 0 else ()
        if key != self._key:
            self._key, self._found, left = key, [], tokens
            for request in islice(waiting, max(0, most)):
                self._found.append(self._measure(request))
                left -= self._found[-1]
                if left <= 0:
                    break
        return self._found


def left_of(request: Any) -> int:
    """Tokens that it has and that are not computed; those of batches in flight too."""
    known = request.num_tokens_with_spec + request.num_output_placeholders
    return int(known - request.num_computed_tokens)


def count_parts(output: Any, requests: Mapping[str, Any]) -> tuple[int, int]:
    """Tokens of prefill, and sequences that decode, of a step that was scheduled just now. ``requests``: vLLM's own, by name.

    With async scheduling a request may decode while its first token is still in flight: vLLM then counts placeholders. With
    speculative decoding a sequence that decodes has its drafted tokens in the step as well."""
    tokens, batch = 0, 0
    for name, count in output.num_scheduled_tokens.items():
        if _decodes(output, name, count, requests.get(name)):
            batch += 1
        else:
            tokens += count
    return tokens, batch


def _decodes(output: Any, name: str, count: int, found: Any) -> bool:
    begun = found is not None and (found.num_output_tokens or found.num_output_placeholders > 1)
    return bool(begun) and count <= 1 + len(output.scheduled_spec_decode_tokens.get(name, ()))
