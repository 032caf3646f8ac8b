"""What both plugins rely on when they hook into stock engines."""

from __future__ import annotations

import pytest

from orchestrator.api import ConfigError
from orchestrator.hooks import (
    COMPONENTS,
    PYTHON,
    VLLM,
    Component,
    Patch,
    PatchRegister,
    VersionRange,
    check,
    find,
    parse_release,
    signature_mismatches,
    versions,
)


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
    assert (version in VersionRange.parse(">=0.32,<0.34")) is inside


@pytest.mark.parametrize("text", ["", "0.32", ">=0.32", ">=0.32,<=0.34", ">=a,<b", "<1,<2", ">=1,>=2"])
def test_a_range_that_is_not_half_open_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="version range"):
        VersionRange.parse(text)


def test_release_numbers_ignore_local_and_post_parts() -> None:
    assert parse_release("0.3.13.post1") == ((0, 3, 13), True)
    assert parse_release("2.13.0+cpu") == ((2, 13, 0), True)
    assert parse_release("1.0a2") == ((1, 0), False)


def test_every_component_prints_its_range_and_reads_it_back() -> None:
    for component in COMPONENTS:
        assert VersionRange.parse(str(component.tested)) == component.tested


def test_the_running_interpreter_is_a_tested_one() -> None:
    assert check(PYTHON).version.startswith("3.1")


def test_an_untested_version_is_refused_with_the_tested_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda names: (names[0], "0.99.0"))
    with pytest.raises(ConfigError, match=r"not tested.*>=0\.32,<0\.34") as caught:
        check(VLLM)
    assert (caught.value.field, caught.value.value) == ("vLLM", "0.99.0")


def test_a_missing_component_is_refused_with_the_tested_range() -> None:
    missing = Component("Nothing", ("rl-coserve-no-such-distribution",), VersionRange.parse(">=1,<2"), "never")
    assert find(missing) is None
    with pytest.raises(ConfigError, match=r"not installed.*>=1,<2"):
        check(missing)


def test_the_first_distribution_that_is_there_provides_the_component() -> None:
    component = Component(
        "pytest", ("rl-coserve-no-such-distribution", "pytest"), VersionRange.parse(">=8,<99"), "here"
    )
    assert check(component).distribution == "pytest"


class _Engine:
    """Stands for a stock engine."""

    patched = 0


def _patch(name: str, tested: str) -> Patch:
    def apply() -> None:
        _Engine.patched += 1

    return Patch(
        name, "test:_Engine", "a test", VersionRange.parse(tested), "none", "never", apply, lambda: _Engine.patched > 0
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
