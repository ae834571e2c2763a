"""Self-signed certificates, which the operator makes for masters and agents make for each other.

No authority signs such a certificate, so no key could sign a second one: a peer that trusts the certificate trusts one
key. Making one takes less than a millisecond (P-256), importing this module 0.1 s.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFE = datetime.timedelta(days=3650)
"""How long a certificate is valid: longer than any job runs."""
EARLIER = datetime.timedelta(days=1)
"""A certificate is valid from so long before it was made, because the clocks of machines differ."""


class Pair(msgspec.Struct, frozen=True):
    """A certificate and its key, as PEM."""

    certificate: bytes
    key: bytes

    def __repr__(self) -> str:
        return "Pair(...)"


def self_signed(common_name: str, names: Sequence[str]) -> Pair:
    """Make a key, and a certificate for a server with the DNS names `names`."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(now + LIFE)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Pair(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )
