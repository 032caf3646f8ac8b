"""``rl-coserve site-cache``: the cache of a site, in the foreground, until it is told to end."""

from __future__ import annotations

import argparse
import json
import signal
import threading

from orchestrator.api import bearer, tls
from orchestrator.transfer.site_cache import SiteCache

_FIX = "give a readable file with this site's token; engines need the same (RL_COSERVE_SITE_TOKEN_FILE)"


def serve_site(arguments: argparse.Namespace) -> int:
    """Print {"place"} and serve until SIGTERM or SIGINT. Raises ConfigError."""
    bearer.read_file(arguments.token_file, "--token-file", _FIX)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    cache = SiteCache(
        f"{bearer.FILE}{arguments.token_file}",
        arguments.host,
        arguments.port,
        tls.of_arguments(arguments),
        arguments.allow_plain,
    )
    print(json.dumps({"place": cache.place}), flush=True)
    ended.wait()
    cache.close()
    return 0
