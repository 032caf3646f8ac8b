"""``python -m vllm_rlplugin.judge_server``, the name by which users start :mod:`vllm_rlplugin.judge.judge_server`."""

import sys

from vllm_rlplugin.judge.judge_server import main

if __name__ == "__main__":
    sys.exit(main())
