"""Who may call: one place compares tokens, takes any header, and says nothing of a token."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.api import ConfigError, bearer
from orchestrator.borrowing.http_worker import HttpWorker
from orchestrator.observe.view import view_server
from orchestrator.rewards.function_client import FunctionClient
from orchestrator.transfer.kv_wire import KvAsk, KvBlocks, KvRefused, KvServer, fetch_blocks

ROOT = Path(__file__).parents[2]
TOKEN = "of-sixteen-letters"
COMPARES = {
    "orchestrator/api/bearer.py",
    # Who asks for KV or weights without TLS proves that it has the token, and asks the other side to: nobody sends it.
    "orchestrator/transfer/proven_link.py",
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


# -- rotation ----------------------------------------------------------------------------------------------------------

NEW = "another-of-sixteen"


def replace(file: Path, token: str) -> None:
    """As an operator does: whole, at once."""
    (file.parent / "new").write_text(f"{token}\n")
    (file.parent / "new").replace(file)


@pytest.fixture
def given(tmp_path: Path) -> str:
    replace(tmp_path / "token", TOKEN)
    return f"{bearer.FILE}{tmp_path}/token"


def file_of(given: str) -> Path:
    return Path(given.removeprefix(bearer.FILE))


def later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    now = bearer.time.time
    monkeypatch.setattr(bearer.time, "time", lambda: now() + seconds)


def test_a_replaced_file_is_the_token_at_once_and_the_one_of_before_for_a_stated_time(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = bearer.Token(given)
    assert (token.current(), token.accepted()) == (TOKEN, (TOKEN,))
    replace(file_of(given), NEW)
    assert (token.current(), token.accepted()) == (NEW, (NEW, TOKEN))
    assert token.header() == {"Authorization": f"Bearer {NEW}"}
    replace(file_of(given), f"{NEW}-still")
    assert token.accepted() == (f"{NEW}-still", NEW, TOKEN)
    replace(file_of(given), TOKEN)  # back to it
    assert token.accepted() == (TOKEN, f"{NEW}-still", NEW)
    later(monkeypatch, bearer.OVERLAP + 1)
    assert token.accepted() == (TOKEN,)


def test_a_replacement_that_is_first_looked_at_late_gives_the_one_of_before_no_more_time(given: str) -> None:
    """An idle server: what counts is when the file was replaced."""
    token = bearer.Token(given)
    replace(file_of(given), NEW)
    with pytest.MonkeyPatch.context() as patch:
        later(patch, bearer.OVERLAP + 1)
        assert not token.matches(TOKEN)
        assert token.matches(NEW)


@pytest.mark.parametrize("spoil", [lambda file: file.write_text("two words"), lambda file: file.unlink()])
def test_a_spoilt_file_changes_nothing_and_is_said_once(
    given: str, spoil: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    token = bearer.Token(given, "view.token_file")
    spoil(file_of(given))
    assert [token.current() for _ in range(3)] == [TOKEN] * 3
    [record] = caplog.records
    assert "view.token_file" in record.getMessage()
    assert TOKEN not in caplog.text
    assert "two words" not in caplog.text
    replace(file_of(given), NEW)
    assert token.current() == NEW


def test_a_server_may_be_given_digests_in_a_file_and_change_them(given: str) -> None:
    replace(file_of(given), bearer.sealed(TOKEN))
    token = bearer.Token(given)
    replace(file_of(given), bearer.sealed(NEW))
    assert [token.matches(shown) for shown in (NEW, TOKEN, bearer.sealed(NEW), "")] == [True, True, False, False]


def test_a_listener_and_its_clients_go_on_over_a_rotation(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's listener; a client that was made before the rotation, one that still has the old token, one with a wrong one."""

    class Picture:
        page, picture = "page.html", b"{}"

    async def scenario() -> None:
        server = view_server.Server(Picture(), given)  # type: ignore[arg-type]
        await server.start()
        url = f"http://127.0.0.1:{server.port}/state.json"

        async def status(shown: str) -> int:
            import aiohttp

            async with (
                aiohttp.ClientSession() as session,
                session.get(url, headers=bearer.Token(shown).header()) as answer,
            ):
                return answer.status

        try:
            assert [await status(shown) for shown in (given, TOKEN, NEW)] == [200, 200, 401]
            replace(file_of(given), NEW)
            assert [await status(shown) for shown in (given, TOKEN, NEW, "wrong")] == [200, 200, 200, 401]
            assert NEW in server.url
            later(monkeypatch, bearer.OVERLAP + 1)
            assert [await status(shown) for shown in (given, TOKEN, NEW)] == [200, 401, 200]
        finally:
            await server.close()

    asyncio.run(scenario())


def test_clients_show_what_their_file_holds_now(given: str) -> None:
    clients = [FunctionClient("http://127.0.0.1:1/x", token=given), HttpWorker("http://127.0.0.1:1", given)]
    replace(file_of(given), NEW)
    assert [client._token.header() for client in clients] == [{"Authorization": f"Bearer {NEW}"}] * 2


def test_kv_is_fetched_with_the_new_token_and_for_a_time_with_the_old(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = KvAsk(np.zeros(4, np.uint32), 0, {}, 5.0)
    server = KvServer(lambda asked: KvBlocks(0, np.ones((2, 8), np.uint8), asked.facts), given)
    try:
        replace(file_of(given), NEW)
        for shown in (NEW, TOKEN):
            assert fetch_blocks(server.place, shown, ask, 8).payload.sum() == 16
        later(monkeypatch, bearer.OVERLAP + 1)
        assert fetch_blocks(server.place, NEW, ask, 8).payload.sum() == 16
        with pytest.raises(KvRefused, match=r"unreachable|unauthorized"):
            fetch_blocks(server.place, TOKEN, ask, 8)
    finally:
        server.close()


# -- environment variables ---------------------------------------------------------------------------------------------

_TAKES = """
import os, subprocess, sys
from pathlib import Path
from orchestrator.api import bearer
bearer.take_variables(["GIVEN_TOKEN", "OTHER_TOKEN"])
assert bearer.variable("GIVEN_TOKEN") == sys.stdin.read(), "it is there for this process"
assert "GIVEN_TOKEN" not in os.environ
child = subprocess.run(["/usr/bin/env"], capture_output=True).stdout
print(Path("/proc/self/environ").read_bytes() + child)
"""


def test_a_token_of_a_variable_is_taken_out_of_the_environment_for_children_and_for_the_kernel() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _TAKES],
        env={**os.environ, "GIVEN_TOKEN": TOKEN},
        input=TOKEN,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "GIVEN_TOKEN" in done.stdout, "the kernel's copy has the name still"
    assert TOKEN not in done.stdout
