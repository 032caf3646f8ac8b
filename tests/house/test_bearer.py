"""Who may call: one place compares tokens, takes any header, and says nothing of a token."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.api import ConfigError, bearer

ROOT = Path(__file__).parents[2]
TOKEN = "of-sixteen-letters"
COMPARES = {
    "orchestrator/api/bearer.py",
    # Who fetches KV over a connection without TLS proves that it has the token, and asks the other side to: nobody sends it.
    "orchestrator/transfer/kv_wire.py",
}


def test_tokens_are_compared_in_one_place() -> None:
    packages = ("orchestrator", "vllm_rlplugin", "megatron_rlplugin")
    files = [file for package in packages for file in sorted((ROOT / package).rglob("*.py"))]
    spelled = ("hmac.compare_digest", "secrets.compare_digest", "import compare_digest")
    found = {str(file.relative_to(ROOT)) for file in files if any(word in file.read_text() for word in spelled)}
    assert found == COMPARES


@pytest.mark.parametrize("header", [f"Bearer {TOKEN}", f"bearer {TOKEN}", f"BEARER  {TOKEN} "])
def test_the_token_is_found_behind_its_scheme(header: str) -> None:
    assert bearer.admits(header, bearer.digest_of(TOKEN))


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", TOKEN, f"Basic {TOKEN}", f"Bearer{TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}",
     f"Bearer {TOKEN} {TOKEN}", f"Bearer {TOKEN}{' ' * bearer.LONGEST}", "Bearer \udcff\ud800"],
)  # fmt: skip
def test_another_header_opens_nothing(header: str | None) -> None:
    assert not bearer.admits(header, bearer.digest_of(TOKEN))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(st.characters(), max_size=40))
def test_any_text_is_an_answer_and_only_the_token_the_right_one(text: str) -> None:
    assert bearer.matches(text, bearer.digest_of(TOKEN)) == (text == TOKEN)
    assert bearer.matches(text, bearer.digest_of(text)) == bool(text)
    bearer.admits(text, bearer.digest_of(TOKEN))


def test_a_file_that_holds_no_token_is_an_error_that_does_not_show_it(tmp_path: Path) -> None:
    file = tmp_path / "token"
    for content in (b"", b" \n", b"two words", "t\u00e4glich".encode(), b"\xff\xfe", b"in\x00side"):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=r"view\.token_file.*say so") as caught:
            bearer.read_file(str(file), "view.token_file", "say so")
        text = content.decode("utf-8", "replace").strip()
        assert not text or text not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        bearer.read_file(str(tmp_path / "none"), "view.token_file", "say so")
    file.write_text(f"  {TOKEN}\n")
    assert bearer.read_file(str(file), "view.token_file", "say so") == TOKEN
