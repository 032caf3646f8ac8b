"""Signed versions, for a relay or a metadata store that others can write to: Ed25519 over the manifest.

The checksums of the other modules find damage, not a forger: xxh3 can be made to fit. A signed manifest holds the SHA-256 of
every bucket, and is itself signed by the publisher's private key, which no engine and no store ever has:

    0  magic "RLCSIG01"      8  signature, 64 bytes, of all that follows      72  manifest, as :mod:`.manifest` writes it

Guarantees: with ``RelayEndpoint.verify_key`` a subscriber uses nothing of a version before the signature over its manifest was
verified, nothing of a bucket before its SHA-256 was compared, and reads buckets whole; what is unsigned is refused. The signature
covers job, epoch, version, base and attempt, so that a version cannot pass for another one. Who has once seen a version refuses
every older history as a target (``replayed``). What it cannot know: a subscriber that is new is told by its orchestrator which
version to take, and takes an older epoch's version of this number if that is all it is shown.

The key is the extra ``signing`` (the package ``cryptography``), loaded where it is used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.api import ConfigError
from orchestrator.transfer.transfer_errors import CorruptWeightsError

KEY_FILE = "RL_COSERVE_SIGNING_KEY_FILE"  # in the publisher's environment: path of the private key, PEM
MAGIC = b"RLCSIG01"
SIGNATURE_BYTES = 64
OVERHEAD = len(MAGIC) + SIGNATURE_BYTES
DIGEST_BYTES = 32
_FIELD = "relay.signing_key"


class Signer:
    """Of a publisher. Raises ConfigError for a file that holds no Ed25519 private key, or one that others may read."""

    def __init__(self, file: str) -> None:
        serialization, ed25519 = _library()
        path = Path(file)
        try:
            text = path.read_bytes()
            mode = path.stat().st_mode
        except OSError as error:
            raise ConfigError(_FIELD, file, f"cannot be read ({error.strerror}); {_HOW}") from error
        if mode & 0o077:
            raise ConfigError(_FIELD, file, "can be read by others: chmod 600, and make a new one if they did")
        try:
            key = serialization.load_pem_private_key(text, password=None)
        except (ValueError, TypeError) as error:
            raise ConfigError(_FIELD, file, f"does not hold a private key without a password; {_HOW}") from error
        if not isinstance(key, ed25519.Ed25519PrivateKey):
            raise ConfigError(_FIELD, file, f"is not an Ed25519 key; {_HOW}")
        self._key = key

    @property
    def verify_key(self) -> str:
        """The public key, in hexadecimal: :attr:`RelayEndpoint.verify_key`."""
        return str(self._key.public_key().public_bytes_raw().hex())

    def sign(self, manifest: bytes) -> bytes:
        """The object that is stored."""
        return MAGIC + bytes(self._key.sign(manifest)) + manifest


def signer_of(verify_key: str, environment: Mapping[str, str] = os.environ) -> Signer | None:
    """Of a publisher whose endpoint has this key; None: it does not sign. Raises ConfigError without its private key."""
    if not verify_key:
        return None
    file = environment.get(KEY_FILE, "")
    if not file:
        fix = f"the trainer has no private key: name its file in relay.signing_key, or in the variable {KEY_FILE}"
        raise ConfigError(_FIELD, "", fix)
    signer = Signer(file)
    if signer.verify_key != verify_key:
        raise ConfigError(_FIELD, file, "is not the private key of the job's public key")
    return signer


class Verifier:
    """Of a subscriber. Raises ConfigError for what is no Ed25519 public key."""

    def __init__(self, verify_key: str) -> None:
        _, ed25519 = _library()
        from cryptography.exceptions import InvalidSignature

        self._invalid = InvalidSignature
        try:
            self._key = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(verify_key))
        except ValueError as error:
            raise ConfigError("relay.verify_key", verify_key, "is not an Ed25519 public key in hexadecimal") from error

    def open_manifest(self, data: memoryview) -> memoryview:
        """The manifest in a signed object. Raises CorruptWeightsError "signature"."""
        if data.nbytes <= OVERHEAD or bytes(data[: len(MAGIC)]) != MAGIC:
            raise CorruptWeightsError("signature", "the manifest is not signed, and this job's are")
        manifest = data[OVERHEAD:]
        try:
            self._key.verify(bytes(data[len(MAGIC) : OVERHEAD]), bytes(manifest))
        except self._invalid:
            raise CorruptWeightsError("signature", "the manifest was not signed by the job's key") from None
        return manifest


_HOW = "make one with `openssl genpkey -algorithm ed25519`"


def _library() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        fix = "needs the package cryptography: pip install rl-coserve[signing]"
        raise ConfigError(_FIELD, "(set)", fix) from error
    return serialization, ed25519
