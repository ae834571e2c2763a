"""The certificate of one job's master: it vouches for itself, holds the master's names, and only its nodes trust it.

There is no authority above it, so there is no key that could make a second one: whoever trusts this certificate trusts
the one key that belongs to it. It is made in less than a millisecond (P-256), and valid for longer than any job runs,
so that nothing has to be renewed under way.
"""

from __future__ import annotations

import datetime

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from resile.api.names import master_host, master_name

LIFE = datetime.timedelta(days=3650)
"""Longer than any job runs."""
EARLIER = datetime.timedelta(days=1)
"""Valid from before it was made: the clocks of machines differ."""


class Pair(msgspec.Struct, frozen=True):
    """A certificate and its key, as PEM."""

    certificate: bytes
    key: bytes

    def __repr__(self) -> str:
        return "Pair(...)"


def new_pair(job: str, namespace: str) -> Pair:
    """A new key, and a certificate for the master of this job."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, master_name(job))])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(now + LIFE)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names(job, namespace)]), False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Pair(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def names(job: str, namespace: str) -> list[str]:
    """All names of the master's Service; nodes ask for the first."""
    host = master_host(job, namespace)
    return [host, f"{host}.cluster.local", f"{master_name(job)}.{namespace}", master_name(job)]
