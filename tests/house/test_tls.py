"""TLS over real sockets, with certificates made here: the right authority works, all else is refused in one clear error."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from orchestrator.api import ConfigError, RetryableError
from orchestrator.api import http as wire
from orchestrator.api.tls import Tls, check_listener
from orchestrator.borrowing.http_worker import HttpWorker
from orchestrator.config import parse_config
from orchestrator.observe.view.view_server import Hub, Server
from orchestrator.rewards.function_client import FunctionClient, FunctionFailed

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="needs the openssl program to make certificates"
)
TOKEN = "a-token-of-the-tls-tests"


class Authority:
    """Makes certificates, as an administrator would: with openssl."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        folder.mkdir(exist_ok=True)
        self.file, self.key = folder / f"{name}.pem", folder / f"{name}.key"
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        self._openssl(
            "req", "-x509", *curve, "-subj", f"/CN={name}", "-days", "30", "-keyout", self.key, "-out", self.file
        )

    def make(self, name: str, alternative: str = "IP:127.0.0.1", days: int = 30) -> Tls:
        """A certificate for these addresses; ``days`` below 0: one that has expired."""
        request, file, key = (self.folder / f"{name}.{kind}" for kind in ("csr", "pem", "key"))
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        self._openssl("req", "-new", *curve, "-subj", f"/CN={name}", "-keyout", key, "-out", request)
        (self.folder / f"{name}.ext").write_text(f"subjectAltName={alternative}\n")
        signed = (
            "-in",
            request,
            "-CA",
            self.file,
            "-CAkey",
            self.key,
            "-CAcreateserial",
            "-days",
            str(days),
            "-out",
            file,
        )
        self._openssl("x509", "-req", *signed, "-extfile", self.folder / f"{name}.ext")
        return Tls(str(file), str(key), str(self.file))

    def _openssl(self, *arguments: Any) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "a", "authority")


@pytest.fixture(scope="module")
def good(authority: Authority) -> Tls:
    return authority.make("good", "IP:127.0.0.1,DNS:localhost")


async def _status(request: web.Request) -> web.Response:
    headers = {wire.PROTOCOL_HEADER: str(wire.PROTOCOL), wire.INSTANCE_HEADER: "one"}
    if request.headers.get("Authorization") != f"Bearer {TOKEN}":
        return web.json_response({"error": {"message": "no", "type": "unauthorized"}}, status=401, headers=headers)
    return web.json_response({"ok": True}, headers=headers)


@asynccontextmanager
async def listening(tls: Tls) -> AsyncIterator[str]:
    """A server with a certificate, or a plain one; its address."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", _status)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        context = tls.server()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        yield f"{'https' if context else 'http'}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def asked(url: str, tls: Tls) -> Any:
    worker = HttpWorker(url, TOKEN, tls=tls)
    try:
        return await worker.status()
    finally:
        await worker.disconnect()


async def called(url: str, tls: Tls) -> Any:
    client = FunctionClient(url, token=TOKEN, retries=1, tls=tls)
    try:
        return await client.call({})
    finally:
        await client.close()


def test_the_right_authority_works(good: Tls) -> None:
    async def run() -> None:
        async with listening(good) as url:
            trusting = Tls(authority=good.authority)
            assert await asked(url, trusting) == {"ok": True}
            assert await asked(url.replace("127.0.0.1", "localhost"), trusting) == {"ok": True}
            assert await called(url, trusting) == {"ok": True}

    asyncio.run(run())


WRONG = {
    "another authority": ("good", "other", "tls.authority must be the CA that signed it"),
    "the system's authorities": ("good", "none", "tls.authority must be the CA that signed it"),
    "expired": ("expired", "own", "give the server a new one"),
    "another name": ("elsewhere", "own", "use an address that it lists"),
    "no TLS": ("plain", "own", "does not speak TLS"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_server_that_cannot_prove_who_it_is_is_refused_and_gets_no_token(
    name: str, authority: Authority, good: Tls, tmp_path: Path
) -> None:
    which, trusted, words = WRONG[name]
    made = {
        "good": lambda: good,
        "expired": lambda: authority.make("expired", days=-1),
        "elsewhere": lambda: authority.make("elsewhere", "DNS:elsewhere.example"),
        "plain": Tls,
    }[which]()
    trust = {"own": good.authority, "none": "", "other": str(Authority(tmp_path, "other").file)}[trusted]

    async def run() -> None:
        async with listening(made) as url:
            secure = url.replace("http://", "https://")
            with pytest.raises(ConfigError, match=words):
                await asked(secure, Tls(authority=trust))
            with pytest.raises(FunctionFailed, match=words) as failed:
                await called(secure, Tls(authority=trust))
            assert failed.value.kind == "refused"

    asyncio.run(run())


def test_a_listener_that_verifies_clients_takes_those_of_its_authority_only(
    authority: Authority, good: Tls, tmp_path: Path
) -> None:
    server = Tls(good.certificate, good.key, good.authority, verify_clients=True)
    stranger = Authority(tmp_path, "stranger").make("somebody")

    async def run() -> None:
        async with listening(server) as url:
            assert await asked(url, authority.make("client", "DNS:client")) == {"ok": True}
            for client in (Tls(authority=good.authority), Tls(stranger.certificate, stranger.key, good.authority)):
                with pytest.raises((ConfigError, RetryableError)):
                    await asked(url, client)

    asyncio.run(run())


def test_files_that_cannot_be_used_are_named(good: Tls, authority: Authority, tmp_path: Path) -> None:
    other, text = authority.make("unlike"), tmp_path / "text"
    text.write_text("no certificate")
    for tls, field in (
        (Tls(good.certificate, other.key), "tls.certificate"),
        (Tls(str(text), good.key), "tls.certificate"),
        (Tls(good.certificate, str(tmp_path / "none")), "tls.key"),
        (Tls(good.certificate), "tls.key"),
        (Tls(good.certificate, good.key, "", verify_clients=True), "tls.authority"),
    ):
        with pytest.raises(ConfigError) as error:
            tls.server()
        assert error.value.field == field
    for path in (str(text), str(tmp_path / "none")):
        with pytest.raises(ConfigError, match=r"tls\.authority"):
            Tls(authority=path).client()


def test_an_address_of_a_network_needs_tls_unless_that_is_said(good: Tls) -> None:
    assert check_listener("127.0.0.1", Tls(), "--host") is None
    assert check_listener("::1", Tls(), "--host") is None
    assert check_listener("0.0.0.0", Tls(), "--host", allow_plain=True) is None
    assert isinstance(check_listener("0.0.0.0", good, "--host"), ssl.SSLContext)
    with pytest.raises(ConfigError, match=r"--host = '0\.0\.0\.0': others reach it"):
        check_listener("0.0.0.0", Tls(), "--host")
    for data in (
        {"reward": {"url": "http://10.0.0.1/f"}},
        {"reward": {"judge": {"url": "http://judge/v1", "model": "m", "criterion": "c"}}},
        {"tools": {"urls": {"search": "http://10.0.0.1/f"}}},
    ):
        with pytest.raises(ConfigError, match=r"use https, or tls\.allow_plain_http"):
            parse_config(data)
        parse_config({**data, "tls": {"allow_plain_http": True}})
        parse_config(json.loads(json.dumps(data).replace("http://", "https://")))
    with pytest.raises(ConfigError, match="give both, or neither"):
        parse_config({"tls": {"certificate": "c.pem"}})


def test_the_page_of_a_run_is_served_with_tls_on_another_address(good: Tls, tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("")
    hub = Hub(tmp_path)
    with pytest.raises(ConfigError, match=r"view\.host"):
        Server(hub, TOKEN, 0, "0.0.0.0")

    async def run() -> None:
        await hub.look()
        server = Server(hub, TOKEN, 0, "127.0.0.1", good)
        await server.start()
        try:
            assert server.url.startswith("https://127.0.0.1:")
            trusting = aiohttp.TCPConnector(ssl=Tls(authority=good.authority).client())
            async with (
                aiohttp.ClientSession(connector=trusting) as session,
                session.get(server.url, allow_redirects=False) as answer,
            ):
                assert answer.status == 303
                assert "Secure" in answer.headers["Set-Cookie"]
            async with aiohttp.ClientSession() as session:
                with pytest.raises(aiohttp.ClientConnectorCertificateError):
                    await session.get(server.url)
        finally:
            await server.close()

    asyncio.run(run())


def test_the_function_host_speaks_tls_and_refuses_a_network_without_it(good: Tls) -> None:
    command = [
        sys.executable,
        "-m",
        "orchestrator.rewards.host",
        "--function",
        "f=json:dumps",
        "--token-env",
        "T",
    ]
    environment = {**os.environ, "T": TOKEN, "PYTHONPATH": os.pathsep.join(sys.path)}
    refused = subprocess.run(
        [*command, "--host", "0.0.0.0"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert refused.returncode == 2
    assert "tls.certificate" in refused.stderr
    options = ["--tls-certificate", good.certificate, "--tls-key", good.key]
    host = subprocess.Popen([*command, *options], env=environment, stdout=subprocess.PIPE)
    try:
        assert host.stdout is not None
        port = json.loads(host.stdout.readline())["port"]
        url = f"https://127.0.0.1:{port}/2015-03-31/functions/f/invocations"
        assert asyncio.run(called(url, Tls(authority=good.authority))) == "{}"
        with pytest.raises(FunctionFailed, match="certificate is refused"):
            asyncio.run(called(url, Tls()))
        with socket.create_connection(("127.0.0.1", port), timeout=5.0) as plain:  # nothing is answered in the clear
            plain.sendall(b"GET /stats HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200" not in plain.recv(1000)
    finally:
        host.send_signal(signal.SIGTERM)
        host.wait(20.0)
