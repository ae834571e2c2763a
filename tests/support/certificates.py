"""Throw-away certificates for tests."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

Key = ec.EllipticCurvePrivateKey


class Authority:
    """A throw-away CA that writes certificates into a directory."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(self._key, name, ca=True)
        self.file = directory / f"{name}.pem"
        self.file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *, password: bytes | None = None) -> tuple[Path, Path]:
        key = ec.generate_private_key(ec.SECP256R1())
        files = self._directory / f"{name}.crt", self._directory / f"{name}.key"
        files[0].write_bytes(self._sign(key, name).public_bytes(serialization.Encoding.PEM))
        lock = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        files[1].write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock),
        )
        return files

    def _sign(self, key: Key, name: str, *, ca: bool = False) -> x509.Certificate:
        def named(name: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

        now = datetime.datetime.now(datetime.UTC)
        names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("master.example")]
        return (
            x509.CertificateBuilder()
            .subject_name(named(name))
            .issuer_name(named(self._name))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
