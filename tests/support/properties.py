"""How property tests draw: the one place that says so. ``tests/conftest.py`` loads ``fixed``.

``fixed``: the same examples in every run, so that what was green stays green. ``random`` (``make test-long``, or any run with
``--hypothesis-profile=random``): new ones each time, and those that failed are kept in ``.hypothesis`` and tried again.
"""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("fixed", deadline=None, derandomize=True, database=None, print_blob=True)
settings.register_profile("random", deadline=None, print_blob=True)
