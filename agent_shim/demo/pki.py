"""Issues bus certificates like those of BOSH, both valid and invalid, for the demo, the tests and the benchmarks.

Subjects follow the Director (``nats_client_cert_generator.rb``) and the bosh-deployment manifest. By default, the keys
are elliptic-curve keys, which take only a millisecond to generate. A real Director generates 3072-bit RSA keys.
"""

from __future__ import annotations

import ipaddress
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from agent_shim.core.errors import ConfigError

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec, rsa
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as exc:
    why = "the package cryptography is not installed (pip install 'agent-shim[demo]')"
    raise ConfigError(f"cannot make certificates: {why}") from exc

SERVER: Final = "default.nats.bosh-internal"
DIRECTOR: Final = "default.director.bosh-internal"
HEALTH_MONITOR: Final = "default.hm.bosh-internal"

HOUR: Final = 3600.0
GOOD: Final = (-HOUR, 2 * 365 * 24 * HOUR)
EXPIRED: Final = (-2 * HOUR, -HOUR)
NOT_YET_VALID: Final = (HOUR, 2 * HOUR)
"""A validity period that begins in the future: start and end, in seconds from now."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its private key, both in PEM format."""

    certificate: str
    private_key: str


def agent_name(agent_id: str, *, bootstrap: bool = False) -> str:
    """Return the common name in an agent's certificate.

    The name is the only difference between the short-lived bootstrap certificate and later certificates.
    """
    return f"{agent_id}.bootstrap.agent.bosh-internal" if bootstrap else f"{agent_id}.agent.bosh-internal"


def subject(common_name: str) -> str:
    """Return the NATS user for a certificate: the certificate's subject in nats-sync's format."""
    return f"C=USA, O=Cloud Foundry, CN={common_name}"


class Authority:
    """A certificate authority. ``ca`` is its certificate in PEM format.

    ``bits`` is the length of the authority's RSA key and of the keys that it issues; 0 means elliptic-curve keys
    (P-256). The certificate is signed by ``issuer`` or, if that is None, by the authority itself.
    """

    def __init__(
        self, common_name: str = "default.nats-ca.bosh-internal", *, bits: int = 0, issuer: Authority | None = None
    ) -> None:
        self._bits = bits
        self._key = _key(bits)
        self._name = _name(common_name)
        self.ca = _pem(
            (issuer or self).sign(
                self._name, self._key.public_key(), GOOD, [x509.BasicConstraints(ca=True, path_length=None)]
            )
        )

    def server(
        self,
        common_name: str = SERVER,
        *,
        hosts: Sequence[str] = ("127.0.0.1", "localhost", SERVER),
        valid: tuple[float, float] = GOOD,
    ) -> Pair:
        """Issue a server certificate for ``hosts`` (names and addresses). Clients look for the host in ``hosts`` and
        not in the common name.
        """
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        return self._pair(common_name, valid, [usage, x509.SubjectAlternativeName([_host(host) for host in hosts])])

    def client(self, common_name: str, *, valid: tuple[float, float] = GOOD) -> Pair:
        """Issue a client certificate as the Director does for every VM."""
        return self._pair(common_name, valid, [x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])])

    def agent(self, agent_id: str, *, bootstrap: bool = False, valid: tuple[float, float] = GOOD) -> Pair:
        """Issue an agent's client certificate: the short-lived bootstrap certificate or, by default, a later one."""
        return self.client(agent_name(agent_id, bootstrap=bootstrap), valid=valid)

    def _pair(self, common_name: str, valid: tuple[float, float], extensions: Sequence[x509.ExtensionType]) -> Pair:
        key = _key(self._bits)
        return Pair(_pem(self.sign(_name(common_name), key.public_key(), valid, extensions)), _key_pem(key))

    def sign(
        self, name: x509.Name, public_key: Any, valid: tuple[float, float], extensions: Sequence[x509.ExtensionType]
    ) -> x509.Certificate:
        """Sign a certificate that is valid from ``valid[0]`` to ``valid[1]``, in seconds from now."""
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder(
            issuer_name=self._name,
            subject_name=name,
            public_key=public_key,
            serial_number=x509.random_serial_number(),
            not_valid_before=now + timedelta(seconds=valid[0]),
            not_valid_after=now + timedelta(seconds=valid[1]),
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        return builder.sign(self._key, hashes.SHA256())


def _key(bits: int) -> Any:
    """Generate an RSA key of ``bits`` bits, or an elliptic-curve key if ``bits`` is 0."""
    return rsa.generate_private_key(65537, bits) if bits else ec.generate_private_key(ec.SECP256R1())


def _name(common_name: str) -> x509.Name:
    parts = {NameOID.COUNTRY_NAME: "USA", NameOID.ORGANIZATION_NAME: "Cloud Foundry", NameOID.COMMON_NAME: common_name}
    with warnings.catch_warnings():
        # Ignore warnings about names that are too long. X.509 limits a country to 2 letters and a common name to 64,
        # but in BOSH's certificates, the country has 3 and a bootstrap certificate's common name has 66.
        warnings.simplefilter("ignore")
        return x509.Name([x509.NameAttribute(oid, text, _validate=False) for oid, text in parts.items()])


def _host(host: str) -> x509.GeneralName:
    """Return the subject alternative name for a name or address."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(Encoding.PEM).decode()


def _key_pem(key: Any) -> str:
    pem: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    return pem.decode()
