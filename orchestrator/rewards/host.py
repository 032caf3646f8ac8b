"""``python -m orchestrator.rewards.host``, the name by which users start :mod:`orchestrator.rewards.function_host`."""

import sys

from orchestrator.rewards.function_host import main

if __name__ == "__main__":
    sys.exit(main())
