"""A hook of the documentation's build: files of the repository that a page links to become pages of the site.

On a code host a page may link to ``../examples/frozenlake.toml``; a site has only what is under ``docs/``. So each such file is
shown on a page of its own under ``source/``, and the link leads there. A link to a file that does not exist stays as it is, and
the strict build refuses it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?:\.\./)+[^)#\s]+)\)")
ANY_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#:\s]+)\)")
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".sh": "bash", "": "text", ".yaml": "yaml"}


def outside(page: str, link: str) -> str | None:
    """The path in the repository that a link of ``page`` (below docs/) means, if it leaves docs/ and is a file."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return path if not path.startswith(("docs/", "..")) and (ROOT / path).is_file() else None


def target(path: str) -> str:
    """Where the site has a file of the repository."""
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def shown(path: str) -> str:
    """The page of a file."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    return f"# {path}\n\n````{LANGUAGES.get(Path(path).suffix, 'text')}\n{text}````\n"


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each file that is linked to."""
    for file in list(files.documentation_pages()):
        for _, link in LINK.findall(Path(file.abs_src_path).read_text(encoding="utf-8")):
            path = outside(file.src_uri, link)
            if path and not files.get_file_from_path(target(path)):
                files.append(File.generated(config, target(path), content=shown(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lead the links there, and those of a file that became a page back."""
    here = page.file.src_uri
    origin = here.removeprefix("source/") if here.startswith("source/") else ""

    def moved(match: re.Match[str]) -> str:
        path = outside(here, match[2])
        return match[0] if path is None else link(match[1], target(path))

    def back(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), match[2]))
        if path.startswith("docs/"):
            return link(match[1], path.removeprefix("docs/"))
        shown_here = files.get_file_from_path(target(path)) is not None
        return link(match[1], target(path)) if shown_here else match[1]

    def link(text: str, to: str) -> str:
        return f"[{text}]({posixpath.relpath(to, posixpath.dirname(here) or '.')})"

    return ANY_LINK.sub(back, markdown) if origin.endswith(".md") else LINK.sub(moved, markdown)
