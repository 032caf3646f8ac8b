"""What a scheduled step has in it: tokens of prompts, and sequences that decode. Both sides of a pool reckon with these.

With async scheduling a request may decode while its first token is still in flight: vLLM then counts placeholders.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def count_parts(output: Any, requests: Mapping[str, Any]) -> tuple[int, int]:
    """Tokens of prefill, and sequences that decode, of a step that was scheduled just now. ``requests``: vLLM's own, by name."""
    tokens = batch = 0
    for name, count in output.num_scheduled_tokens.items():
        found = requests.get(name)
        begun = found is not None and (found.num_output_tokens or found.num_output_placeholders > 1)
        if begun and count == 1:
            batch += 1
        else:
            tokens += count
    return tokens, batch
