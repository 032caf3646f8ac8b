"""Tool calls in what a policy wrote, as Hermes and Qwen write them: ``<tool_call>{"name": ..., "arguments": {}}</tool_call>``.

Guarantee: an answer of which any call is not of that form has no calls: its text is given as it is, and the agent judges it.
"""

from __future__ import annotations

import json
import re

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def calls_in(text: str, identity: str) -> tuple[str, list[tuple[str, str, str]]]:
    """(the text before the first call, (id, name, arguments as JSON) of each); ids begin with ``identity``."""
    found: list[tuple[str, str, str]] = []
    for index, match in enumerate(_CALL.finditer(text)):
        try:
            call = json.loads(match.group(1))
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, KeyError, TypeError, AttributeError):
            return text, []
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return text, []
        found.append((f"{identity}-{index}", name, json.dumps(arguments, ensure_ascii=False)))
    return (text.partition("<tool_call>")[0].rstrip("\n"), found) if found else (text, [])
