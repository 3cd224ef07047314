"""The certificates of the demo and the tests are like those of a Director."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from agent_shim_demo import pki


def read(pem: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem.encode())


@pytest.mark.parametrize(
    ("bootstrap", "name"), [(True, "a1.bootstrap.agent.bosh-internal"), (False, "a1.agent.bosh-internal")]
)
@pytest.mark.filterwarnings("ignore:Attribute's length")
def test_agent(bootstrap: bool, name: str) -> None:
    """The subject is the user that nats-sync writes; the certificate is good for clients alone."""
    authority = pki.Authority()
    certificate = read(authority.agent("a1", bootstrap=bootstrap).certificate)
    subject = {part.oid: part.value for part in certificate.subject}

    assert subject[NameOID.COMMON_NAME] == name
    assert subject[NameOID.COUNTRY_NAME] == "USA"
    assert pki.subject(name) == f"C=USA, O=Cloud Foundry, CN={name}"
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate.verify_directly_issued_by(read(authority.ca))


@pytest.mark.filterwarnings("ignore:Attribute's length")
def test_server() -> None:
    """Its hosts are alternative names, addresses as such."""
    certificate = read(pki.Authority().server(hosts=["127.0.0.1", "localhost"]).certificate)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value

    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]


@pytest.mark.filterwarnings("ignore:Attribute's length")
@pytest.mark.parametrize(
    ("valid", "begun", "ended"),
    [(pki.GOOD, True, False), (pki.EXPIRED, True, True), (pki.NOT_YET_VALID, False, False)],
)
def test_validity(valid: tuple[float, float], begun: bool, ended: bool) -> None:
    """Good, expired and not yet valid are what they are called."""
    certificate = read(pki.Authority().client("x", valid=valid).certificate)
    now = datetime.now(UTC)

    assert (certificate.not_valid_before_utc < now, certificate.not_valid_after_utc < now) == (begun, ended)
