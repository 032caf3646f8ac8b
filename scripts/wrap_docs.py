#!/usr/bin/env python3
"""Wraps paragraphs and list items of Markdown pages that have a line of more than 120 characters; leaves all else alone.

    scripts/wrap_docs.py docs/vllm.md ...            # rewrites them
    scripts/wrap_docs.py --check docs/vllm.md ...    # says which would be rewritten, exit code 1 if any

Code blocks, tables, headings, quotes, HTML and figures stay as they are. What stands in backticks, and a link's target, is
never broken: tests look for commands and paths there.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

WIDTH = 120
_MARK = re.compile(r"\s*([-*+]|\d+\.)\s+")
_STAYS = re.compile(r"\s*(\||#|>|<|```|!\[|\[\^|={3}|-{3})|\s*$")
_WORD = re.compile(r"(?:`+[^`]*`+|\]\([^)]*\)|[^\s`])+")
_LIKE_A_MARK = re.compile(r"[-+*#>|]$|\d+\.$|#+$")


def wrapped(text: str) -> str:
    """The page with its long paragraphs wrapped."""
    found: list[str] = []
    block: list[str] = []
    fenced = False

    def flush() -> None:
        found.extend(_refill(block) if any(len(line) > WIDTH for line in block) else block)
        block.clear()

    for line in text.split("\n"):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            flush()
            found.append(line)
        elif fenced or _STAYS.match(line):
            flush()
            found.append(line)
        else:
            if _MARK.match(line):
                flush()
            block.append(line)
    flush()
    return "\n".join(found)


def _refill(lines: list[str]) -> list[str]:
    """One paragraph or list item; the lines after the first are indented as its second one is, or below its text."""
    mark = _MARK.match(lines[0])
    first = mark.group() if mark else re.match(r"\s*", lines[0]).group()  # type: ignore[union-attr]
    rest = " " * len(first) if mark else first
    words = _WORD.findall(" ".join([lines[0][len(first) :], *(line.strip() for line in lines[1:])]))
    filled, now = [], first
    for word in words:
        at_start = now in (first, rest) and not now.strip("-*+. 0123456789")
        if not at_start and len(now) + 1 + len(word) > WIDTH and not _LIKE_A_MARK.match(word):
            filled.append(now)
            now, at_start = rest, True
        now += word if at_start else f" {word}"
    return [*filled, now]


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path, metavar="PAGE")
    parser.add_argument("--check", action="store_true", help="only say which pages have longer lines")
    arguments = parser.parse_args()
    changed = []
    for page in arguments.pages:
        text = page.read_text(encoding="utf-8")
        if (new := wrapped(text)) != text:
            changed.append(str(page))
            if not arguments.check:
                page.write_text(new, encoding="utf-8")
    print("\n".join(changed))
    return int(arguments.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
