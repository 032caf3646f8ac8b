"""TLS of every listener and client of a run: one certificate, one key, one authority, for all of them.

Guarantees: TLS 1.2 or later; a client checks the chain to the authority, the dates and the host name, always; with an authority
it trusts that one only, not those of the system. With ``verify_clients`` a listener takes only clients that show a certificate of
that authority. Files that cannot be used are a ConfigError that names the field. Nothing here can switch verification off.
"""

from __future__ import annotations

import ssl
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass

from orchestrator.api.errors import ConfigError
from orchestrator.api.urls import is_loopback


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths of PEM files. ``certificate`` (with its chain) and ``key``: what this side shows; ``authority``: whom it trusts."""

    certificate: str = ""
    key: str = ""
    authority: str = ""
    verify_clients: bool = False

    def server(self) -> ssl.SSLContext | None:
        """For a listener; None: it speaks plain HTTP. Raises ConfigError."""
        if not self.certificate:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._show(context)
        if self.verify_clients:
            if not self.authority:
                raise ConfigError("tls.authority", "", "tls.verify_clients needs the CA that signs client certificates")
            self._trust(context)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client(self) -> ssl.SSLContext:
        """For a client of https. Raises ConfigError."""
        context = ssl.create_default_context() if not self.authority else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if self.authority:
            self._trust(context)
        if self.certificate:
            self._show(context)
        return context

    def _show(self, context: ssl.SSLContext) -> None:
        if not self.key:
            raise ConfigError("tls.key", "", "tls.certificate needs its private key: the path of a PEM file")
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        for field, path in (("tls.certificate", self.certificate), ("tls.key", self.key)):
            _readable(field, path)
        try:
            context.load_cert_chain(self.certificate, self.key, password=_no_password)
        except (ssl.SSLError, OSError, ValueError) as error:
            fix = f"cannot be used with tls.key = {self.key!r} ({error}): give PEM files that belong together, without a password"
            raise ConfigError("tls.certificate", self.certificate, fix) from error

    def _trust(self, context: ssl.SSLContext) -> None:
        _readable("tls.authority", self.authority)
        try:
            context.load_verify_locations(self.authority)
        except (ssl.SSLError, OSError, ValueError) as error:
            fix = f"is not a PEM file of certificates ({error})"
            raise ConfigError("tls.authority", self.authority, fix) from error


SYSTEM = Tls()  # no certificate of our own, and the authorities of the system


def check_listener(host: str, tls: Tls, field: str, allow_plain: bool = False) -> ssl.SSLContext | None:
    """The context to listen on ``host`` with. Raises ConfigError for an address of a network without TLS, unless that is said."""
    context = tls.server()
    if context is None and not allow_plain and not is_loopback(host):
        fix = "others reach it, and tokens would travel unencrypted: give tls.certificate and tls.key, or listen on 127.0.0.1"
        raise ConfigError(field, host, fix)
    return context


PLAIN_FIX = "write the address as http://, or give the server a certificate"


def refusal(error: BaseException, plain_fix: str = PLAIN_FIX) -> str:
    """Why a connection failed for its certificates, in words with a fix; empty: for another reason. ``plain_fix``: where the
    other side speaks no TLS."""
    seen: list[BaseException] = []
    todo: list[BaseException | None] = [error]
    while todo and len(seen) < 16:
        found = todo.pop()
        if found is None or any(found is other for other in seen):
            continue
        seen.append(found)
        if isinstance(found, ssl.SSLCertVerificationError) and hasattr(
            found, "verify_code"
        ):  # aiohttp's own kind has none
            return f"its certificate is refused ({found.verify_message or found.reason}): {_fix(found.verify_code)}"
        reason = str(getattr(found, "reason", "") or "")
        if isinstance(found, ssl.SSLError) and "CERTIFICATE" in reason and "VERIFY" not in reason:
            return f"it refuses our certificate ({reason}): tls.certificate must be signed by its CA, and not expired"
        if isinstance(found, ssl.SSLError) and reason in (
            "WRONG_VERSION_NUMBER",
            "RECORD_LAYER_FAILURE",
            "HTTP_REQUEST",
        ):
            return f"it does not speak TLS: {plain_fix}"
        inner = (getattr(found, "os_error", None), getattr(found, "certificate_error", None))
        todo += [found.__cause__, found.__context__, *(item for item in inner if isinstance(item, BaseException))]
    return ""


def add_arguments(parser: ArgumentParser) -> None:
    """The options of a program that listens; :func:`of_arguments` reads them."""
    parser.add_argument("--tls-certificate", default="", help="PEM certificate file, with its chain: listen with TLS")
    parser.add_argument("--tls-key", default="", help="PEM file with its private key")
    parser.add_argument("--tls-authority", default="", help="PEM file of the CA that signs client certificates")
    parser.add_argument(
        "--tls-verify-clients", action="store_true", help="accept only clients with a certificate that it signed"
    )


def of_arguments(options: Namespace) -> Tls:
    return Tls(options.tls_certificate, options.tls_key, options.tls_authority, options.tls_verify_clients)


def _fix(code: int) -> str:
    if code == 10:  # X509_V_ERR_CERT_HAS_EXPIRED
        return "give the server a new one"
    if code in (62, 64):  # host name, IP address
        return "use an address that it lists, or make one for this address (subjectAltName)"
    return "tls.authority must be the CA that signed it"


def _readable(field: str, path: str) -> None:
    try:
        with open(path, "rb"):
            return
    except OSError as error:
        raise ConfigError(field, path, f"cannot be read ({error.strerror}): give the path of a PEM file") from error


def _no_password() -> str:
    raise ValueError("the key has a password")
