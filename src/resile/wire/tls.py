"""TLS for the wire: contexts from the certificate files of a job's Secret, with one clear sentence for each wrong file.

TLS encrypts. The job token still decides which peers may talk (`resile.wire.handshake`). Mutual TLS needs a CA at the
server and a certificate at the client.
"""

from __future__ import annotations

import ssl
from asyncio import sslproto
from collections.abc import Callable
from pathlib import Path

OLDEST = ssl.TLSVersion.TLSv1_3
"""The oldest version of TLS that is accepted: both ends are resile, so no older one is needed."""

READ_BUFFER = 16 * 1024
"""What asyncio sets aside for every TLS connection: the size of the largest record. Its default of 256 KiB would cost a
master with 10,000 agents 2.6 GB."""


class BadTLS(ValueError):
    """A certificate, key or CA file that cannot be used; the text is one sentence that names the file."""


def server_context(certificate: Path, key: Path, *, client_ca: Path | None = None) -> ssl.SSLContext:
    """The TLS context of a server. With `client_ca`, it accepts only clients with a certificate of that CA.

    Raises BadTLS if a file is missing, unreadable, no PEM, or key and certificate do not belong together.
    """
    sslproto.SSLProtocol.max_size = READ_BUFFER  # for the whole process, since asyncio has no option per server
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = OLDEST
    context.num_tickets = 0  # an agent that connects again shows its token again, and no session is resumed
    _load_pair(context, certificate, key)
    if client_ca is not None:
        _load_ca(context, client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(
    ca: Path, *, certificate: Path | None = None, key: Path | None = None, check_name: bool = True
) -> ssl.SSLContext:
    """The TLS context of a client. It trusts only servers whose certificate `ca` has signed.

    If `check_name` is False, the server's name in the certificate is not checked. Use that only if `ca` signs for one
    job alone. The certificate of the job's master is made before the address of the master is known.

    Raises BadTLS as `server_context` does, or if only one of `certificate` and `key` is given.
    """
    if (certificate is None) != (key is None):
        given, lacking = ("certificate", "key") if key is None else ("key", "certificate")
        raise BadTLS(f"a TLS {given} was given without its {lacking}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = OLDEST
    context.check_hostname = check_name
    _load_ca(context, ca)
    if certificate is not None and key is not None:
        _load_pair(context, certificate, key)
    return context


def _load_pair(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    _readable("certificate", certificate, b"CERTIFICATE-----")
    _readable("key", key, b"PRIVATE KEY-----")
    try:
        context.load_cert_chain(certificate, key, password=_no_password(key))
    except ssl.SSLError as error:
        if error.reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
            raise BadTLS(f"the TLS key {key} does not belong to the certificate {certificate}") from None
        why = error.reason or error
        raise BadTLS(f"the TLS certificate {certificate} and key {key} cannot be used: {why}") from None


def _load_ca(context: ssl.SSLContext, ca: Path) -> None:
    _readable("CA", ca, b"CERTIFICATE-----")
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError as error:
        raise BadTLS(f"the TLS CA {ca} cannot be used: {error.reason or error}") from None


def _readable(what: str, file: Path, mark: bytes) -> None:
    """Raise BadTLS unless `file` is readable and has `mark`, because OpenSSL's errors name neither file nor problem."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise BadTLS(f"the TLS {what} {file} cannot be read: {error.strerror}") from None
    if mark not in content:
        raise BadTLS(f"the TLS {what} {file} holds no PEM {what.lower() if what != 'CA' else 'certificate'}")


def _no_password(key: Path) -> Callable[[], str]:
    """A callback that raises BadTLS. OpenSSL calls it if `key` has a password, instead of asking at the terminal."""

    def refuse() -> str:
        raise BadTLS(f"the TLS key {key} is protected by a password")

    return refuse
