"""Certificates for the nodes of a cluster, signed by an authority made for it."""

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_VALID = timedelta(days=1)
_PEM = serialization.Encoding.PEM


class Authority:
    """Signs certificates with a key that nobody else has."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        name = _name("authority of a test")
        is_authority = x509.BasicConstraints(ca=True, path_length=None)
        builder = _builder(name, name, self._key).add_extension(is_authority, critical=True)
        self._certificate = builder.sign(self._key, hashes.SHA256())

    def issue(self, folder: Path, address: str) -> None:
        """Write `certificate`, `key` and `authority` for the node with this IP address."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_name(address), self._certificate.subject, key)
        hosts = x509.SubjectAlternativeName(
            [
                x509.IPAddress(ipaddress.ip_address(address)),
                x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
                x509.DNSName("localhost"),
            ]
        )
        certificate = builder.add_extension(hosts, critical=False).sign(self._key, hashes.SHA256())
        private = key.private_bytes(
            _PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        folder.mkdir()
        (folder / "certificate").write_bytes(certificate.public_bytes(_PEM))
        (folder / "key").write_bytes(private)
        (folder / "authority").write_bytes(self._certificate.public_bytes(_PEM))


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _VALID)
        .not_valid_after(now + _VALID)
    )
