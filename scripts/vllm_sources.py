"""The sources of a vLLM release, without installing it: only the files that are asked for, from the wheel on pip's index.

``python scripts/vllm_sources.py --check`` compares every hook of ours with the real sources of the supported version that
is not installed here, prints what differs, and exits with 1 if anything does, with 3 if the index is not reachable.

pip itself finds the wheel, so its configuration counts (index-url, PIP_INDEX_URL, ...); ``--index-url`` goes before it.
By range requests some megabytes are read instead of 400; each file is checked against the wheel's CRC-32. ``--whole``
lets pip download the whole wheel, for an index without range requests, and checks the sha256 that the index announces.
What was read is kept in a cache folder by version, so that a second run asks nobody.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import http.client
import io
import json
import os
import ssl
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from orchestrator.hooks.signatures import FUNCTION, Parameter, SourceTree, missing_names, signature_mismatches
from vllm_rlplugin.hookpoints import HOOKS, attribute_targets

OTHER_VERSION = "0.33.0"  # supported, and not the one that is installed; scripts/next_vllm.py runs it
ROOT = Path(__file__).resolve().parent.parent
OUR_FOLDERS = ("vllm_rlplugin", "patches/vllm")  # what they import from vLLM is looked for as well
BLOCK = 256 << 10  # bytes a range request reads
BLOCKS_KEPT = 64
TIMEOUT = 30.0  # seconds, of one request
PIP_TIMEOUT = 120.0  # seconds, to find the wheel
_ABSENT = ".absent"  # file name suffix in the cache: the wheel has no such file


class UnavailableError(Exception):
    """The sources cannot be had here; says why."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """Where the index has the wheel, and its announced sha256 (hexadecimal; empty: none announced)."""

    url: str
    sha256: str


class RemoteFile(io.RawIOBase):
    """A file on an HTTP server, read by range requests; seekable, so that zipfile can open it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT") or None)
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._at = 0
        self._size = 0
        self._fetch(0, 0)

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        index, start = divmod(self._at, BLOCK)
        data = self._block(index)[start : start + len(buffer)] if self._at < self._size else b""
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _block(self, index: int) -> bytes:
        if index not in self._blocks:
            self._blocks[index] = self._fetch(index * BLOCK, min((index + 1) * BLOCK, self._size) - 1)
            if len(self._blocks) > BLOCKS_KEPT:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(index)
        return self._blocks[index]

    def _fetch(self, first: int, last: int) -> bytes:
        request = urllib.request.Request(self._url, headers={"Range": f"bytes={first}-{last}"})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT, context=self._context) as answer:
                if answer.status != 206:
                    raise UnavailableError("the index answers no range requests; try --whole")
                self._size = int(answer.headers["Content-Range"].rpartition("/")[2])
                return bytes(answer.read())
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(f"the index does not answer: {error}") from error


class Sources:
    """Files of one release, from the cache folder or the index. ``read`` is what :class:`SourceTree` takes."""

    def __init__(self, version: str, cache: Path, pip_options: Sequence[str] = (), whole: bool = False) -> None:
        self._version = version
        self._folder = cache / f"vllm-{version}"
        self._pip_options = pip_options
        self._whole = whole
        self._archive: zipfile.ZipFile | None = None

    def read(self, path: str) -> str | None:
        """The text of a file of the wheel; None if it has none of that name. Raises UnavailableError."""
        kept = self._folder / PurePosixPath(path)
        absent = kept.with_name(kept.name + _ABSENT)
        if kept.is_file():
            return kept.read_text(encoding="utf-8")
        if absent.is_file():
            return None
        archive = self.archive()
        there = path in archive.NameToInfo
        data = archive.read(path) if there else b""  # zipfile checks the CRC-32
        _write(kept if there else absent, data)
        return data.decode("utf-8") if there else None

    def archive(self) -> zipfile.ZipFile:
        """The wheel; what is read of it is fetched then. Raises UnavailableError."""
        if self._archive is None:
            if self._whole:
                self._archive = zipfile.ZipFile(self._download())
            else:
                wheel = locate(self._version, self._pip_options)
                self._archive = zipfile.ZipFile(io.BufferedReader(RemoteFile(wheel.url), BLOCK))
        return self._archive

    def _download(self) -> Path:
        wheel = locate(self._version, self._pip_options)
        self._folder.mkdir(parents=True, exist_ok=True)
        _pip(["download", "--no-deps", "--only-binary=:all:", "--dest", str(self._folder), *self._pip_options,
              f"vllm=={self._version}"], 3600.0)  # fmt: skip
        (file,) = self._folder.glob("*.whl")
        with file.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if not wheel.sha256 or found != wheel.sha256:
            file.unlink()
            raise UnavailableError(f"{file.name} has the sha256 {found}; the index announces {wheel.sha256 or 'none'}")
        return file


def locate(version: str, pip_options: Sequence[str] = ()) -> Wheel:
    """Ask pip where it would get the wheel for this machine. Raises UnavailableError."""
    report = json.loads(
        _pip(
            ["install", "--dry-run", "--ignore-installed", "--no-deps", "--only-binary=:all:", "--quiet", "--report", "-",
             *pip_options, f"vllm=={version}"],
            PIP_TIMEOUT,
        )
    )  # fmt: skip
    found = report["install"][0]["download_info"]
    return Wheel(found["url"], found.get("archive_info", {}).get("hashes", {}).get("sha256", ""))


def _pip(arguments: Sequence[str], timeout: float) -> str:
    command = [sys.executable, "-m", "pip", "--no-input", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"pip gave no answer within {timeout:g} s") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise UnavailableError(f"pip: {lines[-1] if lines else f'exit code {done.returncode}'}")
    return done.stdout


def _write(file: Path, data: bytes) -> None:
    """Whole or not at all: two runs may share the cache."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as part:
        part.write(data)
    os.replace(part.name, file)


def default_cache() -> Path:
    """Below the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rl-coserve" / "sources"


def imported_names(files: Iterable[Path], package: str) -> tuple[str, ...]:
    """Every ``"module:name"`` that these Python files import from a package, in functions too; sorted."""
    found: set[str] = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == package:
                found.update(f"{node.module}:{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Import):
                found.update(f"{alias.name}:" for alias in node.names if alias.name.split(".")[0] == package)
    return tuple(sorted(found))


class SignatureTree(SourceTree):
    """Sources whose signatures can be read, too."""

    def parameters(self, target: str) -> tuple[Parameter, ...]:
        """Of ``"module:qualname"``, as ``inspect.signature`` gives them. Raises LookupError when it is not there.

        A class stands for its ``__init__``, without self; one without ``__init__`` (a dataclass) has none to show.
        """
        found = self.find(target)
        if isinstance(found.node, ast.ClassDef):
            found, bound = self.member(found, "__init__"), True
        else:
            bound = found.owner is not None and "classmethod" in _decorators(found.node)
        if not isinstance(found.node, FUNCTION):
            raise LookupError(f"a {type(found.node).__name__}, which is not callable")
        parameters = tuple(_parameters(found.node.args))
        return parameters[1:] if bound else parameters


def _decorators(node: ast.AST) -> list[str]:
    return [ast.unparse(decorator) for decorator in getattr(node, "decorator_list", [])]


def _parameters(arguments: ast.arguments) -> Iterator[Parameter]:
    positional = [*arguments.posonlyargs, *arguments.args]
    without_default = len(positional) - len(arguments.defaults)
    for index, argument in enumerate(positional):
        yield Parameter(argument.arg, index < without_default)
    if arguments.vararg is not None:
        yield Parameter(arguments.vararg.arg, required=False)
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield Parameter(argument.arg, default is None)
    if arguments.kwarg is not None:
        yield Parameter(arguments.kwarg.arg, required=False)


def differences(sources: SignatureTree) -> list[str]:
    """Every hook and every imported name that these sources do not have as we need it, one line each."""
    found = [str(mismatch) for mismatch in signature_mismatches(HOOKS, sources.parameters)]
    files = sorted(path for folder in OUR_FOLDERS for path in (ROOT / folder).glob("*.py"))
    wanted = (*attribute_targets(), *imported_names(files, "vllm"))
    return found + [f"{target}: nothing there" for target in missing_names(wanted, sources)]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", default=OTHER_VERSION, help="of vLLM (default: %(default)s)")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="folder (default: %(default)s)")
    parser.add_argument("--index-url", help="instead of pip's own configuration")
    parser.add_argument("--whole", action="store_true", help="download the whole wheel (some 400 MB)")
    parser.add_argument("--check", action="store_true", help="compare our hooks with these sources")
    parser.add_argument("files", nargs="*", help="files of the wheel to fetch, such as vllm/v1/request.py")
    options = parser.parse_args(arguments)
    pip_options = ["--index-url", options.index_url] if options.index_url else []
    sources = Sources(options.version, options.cache, pip_options, options.whole)
    try:
        for path in options.files:
            print(path, "not in the wheel" if sources.read(path) is None else "fetched")
        found = differences(SignatureTree(sources.read)) if options.check else []
    except UnavailableError as error:
        print(f"vLLM {options.version}: {error}", file=sys.stderr)
        return 3
    for line in found:
        print(line)
    if options.check:
        print(f"vLLM {options.version}: {len(found)} differences")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
