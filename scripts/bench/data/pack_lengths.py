"""Makes one small file of the trajectories of run folders, for ``rl-coserve bench prediction``.

python scripts/bench/data/pack_lengths.py RUN_FOLDER [RUN_FOLDER ...] FILE.json.xz --what "..." --how "..." --licence "..."

Several folders are taken for runs that went on side by side: their times count from the start of each.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from scripts.bench.papers.length_sets import pack, packed, trajectories_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+")
    parser.add_argument("file", type=Path)
    for name in ("what", "how", "licence"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args()
    about = {name: getattr(options, name) for name in ("what", "how", "licence")}
    found = [one for folder in options.folders for one in trajectories_of(folder)]
    options.file.write_bytes(pack(sorted(found, key=lambda one: (one.finished_at, one.id)), about))
    cases = packed(options.file)
    print(f"{len(cases)} trajectories, {options.file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
