"""The mutations of ``scripts/mutations.py`` can still be made: what each one breaks stands in the file that it names."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_what_each_mutation_breaks_is_still_there_and_so_is_the_test_that_must_see_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location("mutations", ROOT / "scripts" / "mutations.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mutations", module)  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    assert len(module.MUTATIONS) > 80
    gone = [
        mutation.what for mutation in module.MUTATIONS if mutation.old not in (ROOT / mutation.file).read_text("utf-8")
    ]
    assert gone == []
    named = {mutation.tests.split(" ")[0].partition("::")[0] for mutation in module.MUTATIONS}
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []
