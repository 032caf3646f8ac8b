"""What both plugins rely on when they hook into stock engines."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from orchestrator.api import ConfigError
from orchestrator.hooks import tested_versions
from orchestrator.hooks.patch_register import Patch, PatchRegister
from orchestrator.hooks.signatures import missing_names, signature_mismatches
from orchestrator.hooks.tested_versions import (
    PYTHON,
    VLLM,
    EngineComponent,
    VersionRange,
    check_version,
    find_version,
)
from scripts.vllm_sources import SignatureTree, imported_names


@pytest.mark.parametrize(
    ("version", "inside"),
    [
        ("0.32", True),
        ("0.32.0", True),
        ("0.32.0+cpu", True),
        ("0.32.0.post1", True),
        ("0.33.7", True),
        ("0.34.0", False),
        ("0.34.0rc1", False),
        ("0.32.0rc1", False),
        ("0.32.0.dev5+gabc", False),
        ("0.33.0rc2", True),
        ("0.31.9", False),
        ("1.0", False),
        ("v0.32.1", True),
        ("", False),
        ("main", False),
        ("0.32.x", False),
    ],
)
def test_only_tested_versions_lie_in_the_range(version: str, inside: bool) -> None:
    assert (version in VersionRange(">=0.32,<0.34")) is inside


@pytest.mark.parametrize(
    ("version", "inside"),
    [
        ("0.16.0", False),
        ("0.16.1", True),
        ("0.16.9", True),
        ("0.17.0", False),
        ("0.18.2", False),
        ("0.19.1", False),
        ("0.19.2rc1", False),
        ("0.19.2", True),
        ("0.19.3.post1", True),
        ("0.20.0", False),
    ],
)
def test_releases_between_two_tested_spans_are_not_tested(version: str, inside: bool) -> None:
    assert (version in VersionRange(">=0.16.1,<0.17 or >=0.19.2,<0.20")) is inside


@pytest.mark.parametrize(
    "text", ["", ">=1,<2 or ", ">=1,<2 or 3", "0.32", ">=0.32", ">=0.32,<=0.34", ">=a,<b", "<1,<2", ">=1,>=2"]
)
def test_a_range_that_is_not_half_open_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="version range"):
        VersionRange(text)


def test_the_running_interpreter_is_a_tested_one() -> None:
    assert check_version(PYTHON).version.startswith("3.1")


def test_an_untested_version_is_refused_with_the_tested_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested_versions, "installed_version", lambda names: (names[0], "0.99.0"))
    with pytest.raises(ConfigError, match=r"not tested.*>=0\.32,<0\.34") as caught:
        check_version(VLLM)
    assert (caught.value.field, caught.value.value) == ("vLLM", "0.99.0")


def test_a_missing_component_is_refused_with_the_tested_range() -> None:
    missing = EngineComponent("Nothing", ("rl-coserve-no-such-distribution",), VersionRange(">=1,<2"), ())
    assert find_version(missing) is None
    with pytest.raises(ConfigError, match=r"not installed.*>=1,<2"):
        check_version(missing)


def test_the_first_distribution_that_is_there_provides_the_component() -> None:
    component = EngineComponent("pytest", ("rl-coserve-no-such-distribution", "pytest"), VersionRange(">=8,<99"), ())
    assert check_version(component).distribution == "pytest"


class _Engine:
    """Stands for a stock engine."""

    patched = 0


def _patch(name: str, tested: str) -> Patch:
    def apply() -> None:
        _Engine.patched += 1

    return Patch(
        name, "test:_Engine", "a test", VersionRange(tested), "none", "never", apply, lambda: _Engine.patched > 0
    )


def test_a_patch_is_applied_once_and_reports_itself_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Engine, "patched", 0)
    register = PatchRegister(PYTHON, (_patch("one", ">=3,<4"),))
    assert register.status() == {"one": False}
    assert register.apply() == ("one",)
    assert register.apply("one") == ()
    assert register.status() == {"one": True}
    assert _Engine.patched == 1


def test_no_patch_is_applied_when_one_of_those_asked_for_is_outside_its_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Engine, "patched", 0)
    register = PatchRegister(PYTHON, (_patch("good", ">=3,<4"), _patch("old", ">=2,<3")))
    with pytest.raises(ConfigError, match=r"patch old.*>=2,<3"):
        register.apply()
    assert _Engine.patched == 0


def test_a_register_refuses_two_patches_of_one_name_and_unknown_names() -> None:
    with pytest.raises(ValueError, match="same name"):
        PatchRegister(PYTHON, (_patch("one", ">=3,<4"), _patch("one", ">=3,<4")))
    with pytest.raises(KeyError):
        PatchRegister(PYTHON).apply("none")


def test_every_signature_mismatch_is_reported_at_once() -> None:
    targets = {
        "json:dumps": ("obj", "indent"),  # fine: others have defaults or are variadic
        "json:loads": ("s", "no_such_parameter"),
        "json:no_such_function": (),
        "no_such_module_at_all:thing": (),
        "os:linesep": (),
        "shutil:copyfileobj": ("fsrc",),  # fdst has no default
    }
    found = signature_mismatches(targets)
    assert [mismatch.target for mismatch in found] == list(targets)[1:]
    assert "fdst is new and has no default" in str(found[-1])


_SOURCES = {
    "zoo_rl/__init__.py": "from zoo_rl.animals import *\nfrom . import food as meals\nTYPE = int\n",
    "zoo_rl/food.py": "def feed(animal, *, grams: int = 5): ...\n",
    "zoo_rl/animals.py": """
import abc
from typing import Generic, TypeVar
if not abc:
    from nowhere import Animal
else:
    class Animal(abc.ABC):
        legs: int = 4
        def __init__(self, name, age=3, /, *toys, colour, size=1, **rest):
            self.name, self._age = name, age
        def walk(self, steps): ...
        @classmethod
        def born(cls, name): ...
        @staticmethod
        def kinds(limit=0): ...
        @property
        def age(self): return self._age
T = TypeVar("T")
class Cat(Animal, Generic[T]):
    def walk(self, steps, quietly=False): ...
class Kitten(Cat[int]):
    async def play(self): self.tired: bool = True
""",
}
_TARGETS = (
    "zoo_rl:Cat",
    "zoo_rl:Kitten.walk",
    "zoo_rl:Kitten.born",
    "zoo_rl:Kitten.kinds",
    "zoo_rl:Kitten.play",
    "zoo_rl:meals.feed",
    "zoo_rl.food:feed",
    "zoo_rl.animals:Animal.__init__",
)


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SignatureTree:
    """A small engine, to be imported and to be read."""
    for name, text in _SOURCES.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "zoo_rl"]:
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()
    return SignatureTree.installed(tmp_path)


@pytest.mark.parametrize("target", _TARGETS)
def test_reading_a_signature_gives_what_importing_it_gives(zoo: SignatureTree, target: str) -> None:
    read = zoo.parameters(target)
    required = tuple(parameter.name for parameter in read if parameter.required)
    everything = tuple(parameter.name for parameter in read)
    assert not signature_mismatches({target: everything})
    assert not signature_mismatches({target: required})
    if required:  # exactly those: one fewer is a difference, in both ways of looking
        fewer = {target: required[:-1]}
        assert len(signature_mismatches(fewer)) == len(signature_mismatches(fewer, zoo.parameters)) == 1
    more = {target: (*everything, "another")}
    assert len(signature_mismatches(more)) == len(signature_mismatches(more, zoo.parameters)) == 1


def test_what_is_not_in_the_sources_is_a_mismatch_and_no_error(zoo: SignatureTree) -> None:
    targets = dict.fromkeys(("gone:x", "zoo_rl:Dog", "zoo_rl:Cat.bark", "zoo_rl:TYPE", "zoo_rl:Cat.walk.deeper"), ())
    assert [mismatch.target for mismatch in signature_mismatches(targets, zoo.parameters)] == list(targets)


def test_names_are_found_where_a_reader_would_find_them(zoo: SignatureTree) -> None:
    there = ("zoo_rl:TYPE", "zoo_rl:Kitten.name", "zoo_rl:Kitten._age", "zoo_rl:Cat.legs", "zoo_rl:Kitten.tired")
    there += ("zoo_rl.food:", "zoo_rl:food", "zoo_rl:Cat.age", "zoo_rl.animals:Animal")
    gone = ("zoo_rl:Cat.tired", "zoo_rl:Cat.tail", "zoo_rl.drinks:", "zoo_rl:drinks")
    assert missing_names([*there, *gone], zoo) == gone


def test_imported_names_are_those_of_the_package_only(tmp_path: Path) -> None:
    file = tmp_path / "ours.py"
    file.write_text(
        "import os, zoo_rl.food\nfrom zoo_rl import Cat as C\nfrom zoo_rlplugin import x\nfrom . import y\n"
        "def later():\n    from zoo_rl.animals import Animal\n"
    )
    assert imported_names([file], "zoo_rl") == ("zoo_rl.animals:Animal", "zoo_rl.food:", "zoo_rl:Cat")
