"""Where ``rl-coserve bench`` finds the benchmarks: in a checkout, since the wheel has none of them."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

from orchestrator.api import ConfigError

_FIX = "benchmarks are not in the wheel: git clone the repository, run `make venv`, and start it from there"


def import_bench() -> ModuleType:
    """The package ``scripts.bench`` of the checkout that this package is in, or of the working directory.

    Its folder also goes to ``PYTHONPATH``, for probes in processes of their own. Raises ConfigError where there is none.
    """
    for root in (Path(__file__).resolve().parents[2], Path.cwd()):
        if (root / "scripts" / "bench" / "__init__.py").is_file():
            if str(root) not in sys.path:
                sys.path.insert(0, str(root))
            given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
            if str(root) not in given:
                os.environ["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, given)])
            return importlib.import_module("scripts.bench")
    raise ConfigError("bench", "", _FIX)
