"""Pins container images, and actions of CI, by digest. For a machine that reaches their registries, which none here did.

    .venv/bin/python scripts/pin_digests.py            in deploy/ and .github/workflows, where there are any
    .venv/bin/python scripts/pin_digests.py --check    exit code 1 when something is not pinned

An image becomes ``NAME:TAG@sha256:DIGEST``, the digest of the manifest that the registry sends for that tag. An action becomes
``OWNER/NAME@COMMIT # TAG``. Until then the line above says ``unpinned`` (:data:`MARK`; tests/house/test_locks.py).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MARK = "# unpinned: scripts/pin_digests.py"
IMAGE = re.compile(
    r"(?<![\w/])((?:[\w-]+\.)+[a-z]+(?:/[\w.-]+)+):([\w.-]+)(?!@sha256:|[\w.-])"
)  # with its registry in front
ACTION = re.compile(r"(?<=uses: )([\w.-]+/[\w.-]+)@(?![0-9a-f]{40}\b)([\w.-]+)")
HOSTS = {"docker.io": "registry-1.docker.io"}
MANIFESTS = "application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.list.v2+json, "
MANIFESTS += "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json"
Find = Callable[[str, str], str]


def files() -> Iterator[Path]:
    """Where images and actions are named."""
    for place in ("deploy/containers/*", "deploy/kubernetes/*.yaml", ".github/workflows/*.y*ml"):
        yield from sorted(ROOT.glob(place))


def unpinned(text: str) -> list[str]:
    """What a file names without a digest, outside of comments."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    return [match[0] for line in lines for pattern in (IMAGE, ACTION) for match in pattern.finditer(line)]


def pinned(text: str, image_digest: Find, commit: Find) -> str:
    """The file with every image and action pinned, and without the marks. ``image_digest`` of (name, tag), ``commit`` of
    (owner/name, reference)."""
    done: list[str] = []
    for line in text.splitlines(keepends=True):
        new = line
        if not line.lstrip().startswith("#"):
            new = IMAGE.sub(lambda found: f"{found[0]}@{image_digest(found[1], found[2])}", new)
            new = ACTION.sub(lambda found: f"{found[1]}@{commit(found[1], found[2])} # {found[2]}", new)
        if new != line and done and done[-1].strip() == MARK:
            done.pop()
        done.append(new)
    return "".join(done)


def digest_of_image(name: str, tag: str) -> str:
    """Of the manifest that the registry has for this tag, by the registry's HTTP API (OCI Distribution 1.1)."""
    registry, _, path = name.partition("/")
    url = f"https://{HOSTS.get(registry, registry)}/v2/{path}/manifests/{tag}"
    headers = {"Accept": MANIFESTS}
    try:
        manifest = _read(url, headers)
    except urllib.error.HTTPError as error:
        if error.code != 401:
            raise
        asked = dict(re.findall(r'(\w+)="([^"]*)"', error.headers["WWW-Authenticate"]))
        query = urllib.parse.urlencode({key: asked[key] for key in ("service", "scope") if key in asked})
        answer = json.loads(_read(f"{asked['realm']}?{query}", {}))
        manifest = _read(url, {**headers, "Authorization": f"Bearer {answer.get('token') or answer['access_token']}"})
    return f"sha256:{hashlib.sha256(manifest).hexdigest()}"


def _read(url: str, headers: dict[str, str]) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
        body: bytes = answer.read()
    return body


def commit_of_action(name: str, reference: str) -> str:
    """Of a tag or branch; of an annotated tag what it points to."""
    command = ["git", "ls-remote", f"https://github.com/{name}", reference, f"{reference}^{{}}"]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    if not found:
        raise SystemExit(f"{name} has no {reference}")
    return found[-2]


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    for file in files():
        text = file.read_text(encoding="utf-8")
        for name in unpinned(text):
            print(f"{file.relative_to(ROOT)}: {name}")
        if not check:
            file.write_text(pinned(text, digest_of_image, commit_of_action), encoding="utf-8")
    return int(check and any(unpinned(file.read_text(encoding="utf-8")) for file in files()))


if __name__ == "__main__":
    sys.exit(main())
