"""The section of a config that says what TLS is spoken with: docs/security.md."""

from __future__ import annotations

from pydantic import ValidationError, model_validator

from orchestrator.api.tls import Tls
from orchestrator.settings.section import Section, violation


class TlsSection(Section):
    """One certificate, key and authority, PEM files, for every listener and client of the run that leaves this machine."""

    certificate: str = ""  # with its chain; empty: listeners speak plain HTTP, on loopback only
    key: str = ""  # of the certificate; a file that only you can read
    authority: str = ""  # whom clients trust; empty: the system's authorities
    verify_clients: bool = False  # listeners take only clients with a certificate of the authority
    allow_plain_http: bool = False  # rewards, judges and tools elsewhere may be called unencrypted

    @model_validator(mode="after")
    def _pairs(self) -> TlsSection:
        wrong = ""
        if bool(self.certificate) != bool(self.key):
            name = "key" if self.certificate else "certificate"
            wrong = "certificate and key belong together: give both, or neither"
        elif self.verify_clients and not (self.certificate and self.authority):
            name, wrong = "verify_clients", "needs tls.certificate, tls.key and tls.authority"
        if wrong:
            raise ValidationError.from_exception_data("tls", [violation(name, getattr(self, name), wrong)])
        return self

    def files(self) -> Tls:
        """For listeners and clients."""
        return Tls(self.certificate, self.key, self.authority, self.verify_clients)
