"""Tool calls in what a policy wrote, as Hermes and Qwen write them: ``<tool_call>{"name": ..., "arguments": {}}</tool_call>``.

Guarantees: an answer of which any call is not of that form has no calls: its text is given as it is, and the agent judges it; one
look at each character, whatever the policy wrote.
"""

from __future__ import annotations

import json

from orchestrator.api import jsontext

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def calls_in(text: str, identity: str) -> tuple[str, list[tuple[str, str, str]]]:
    """(the text before the first call, (id, name, arguments as JSON) of each); ids begin with ``identity``."""
    found: list[tuple[str, str, str]] = []
    at = text.find(_OPEN)
    while at >= 0:
        begin = at + len(_OPEN)
        end = text.find(_CLOSE, begin)
        if end < 0:
            break
        try:
            call = jsontext.parse_object(text[begin:end])
        except ValueError:
            return text, []
        name, arguments = call.get("name"), call.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return text, []
        found.append((f"{identity}-{len(found)}", name, json.dumps(arguments, ensure_ascii=False)))
        at = text.find(_OPEN, end)
    return (text.partition(_OPEN)[0].rstrip("\n"), found) if found else (text, [])
