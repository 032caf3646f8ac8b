"""One file or folder of a run on a disk of its own that is almost full, for as long as a command runs.

A tmpfs of a given size is mounted over it in a mount namespace that only the command and its children have (root, Linux). When
the command has ended, what is on the small disk is put back: somebody has made room.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

_PAGE = 4096
_SCRIPT = """
mount -t tmpfs -o "size=$2,mode=755" none "$1" || exit 97
disk=$1 place=$3; shift 3
if [ -d "$place" ]; then
  cp -a "$place/." "$disk/" && mount --bind "$disk" "$place" || exit 97
else
  cp -a "$place" "$disk/file" && mount --bind "$disk/file" "$place" || exit 97
fi
"$@"; code=$?
umount "$place"
if [ -d "$place" ]; then
  find "$place" -mindepth 1 -delete; cp -a "$disk/." "$place/"
else
  cat "$disk/file" > "$place"
fi
exit $code
"""


def available() -> bool:
    """Whether this process may mount."""
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "-o", "size=4096", "none", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def on_small_disk(place: Path, room: int, scratch: Path, command: Sequence[str]) -> list[str]:
    """The command that runs ``command`` while ``place`` has ``room`` bytes left; ``scratch``: an empty folder."""
    scratch.mkdir(parents=True, exist_ok=True)
    size = used(place) + room // _PAGE * _PAGE
    inner = ["sh", "-c", _SCRIPT, "small-disk", str(scratch), str(size), str(place), *command]
    return ["unshare", "-m", "--propagation", "private", *inner]


def used(place: Path) -> int:
    """Bytes in whole pages."""
    files = [place] if place.is_file() else [Path(at, name) for at, _, names in os.walk(place) for name in names]
    return sum(-(-file.stat().st_size // _PAGE) * _PAGE for file in files) + _PAGE
