"""Tests how validity periods are read from certificates, by comparing the results with another parser's."""

from __future__ import annotations

import pytest
from cryptography import x509 as reference

from agent_shim.core import x509
from agent_shim.demo import pki

pytestmark = pytest.mark.filterwarnings("ignore:Attribute's length")


@pytest.mark.parametrize("valid", [pki.GOOD, pki.EXPIRED, (-10.0, 60.0 * 365 * 86400)])
def test_certificate_validity_matches_another_parser(valid: tuple[float, float]) -> None:
    """Times before and after 2050 are tested, because X.509 encodes them differently."""
    pem = pki.Authority().agent("a1", valid=valid).certificate
    known = reference.load_pem_x509_certificate(pem.encode())

    found = x509.validity(f"Bag Attributes\n{pem}")

    assert found.begins == known.not_valid_before_utc.timestamp()
    assert found.ends == known.not_valid_after_utc.timestamp()


@pytest.mark.parametrize(
    "pem",
    [
        "",
        "-----BEGIN CERTIFICATE-----\n!!!\n-----END CERTIFICATE-----",
        "-----BEGIN CERTIFICATE-----\nMAAwAA==\n-----END CERTIFICATE-----",
        "-----BEGIN CERTIFICATE-----\nMIIF\n-----END CERTIFICATE-----",
        "-----BEGIN CERTIFICATE-----\nMA==\n-----END CERTIFICATE-----",
    ],
)
def test_invalid_certificate_raises_value_error(pem: str) -> None:
    with pytest.raises(ValueError, match="certificate"):
        x509.validity(pem)


def test_truncated_certificate_raises_value_error() -> None:
    import base64

    body = pki.Authority().agent("a1").certificate.split("-----")[2]
    whole = base64.b64decode(body)
    for length in range(0, 300, 7):
        cut = base64.b64encode(whole[:length]).decode()
        with pytest.raises(ValueError, match="certificate"):
            x509.validity(f"-----BEGIN CERTIFICATE-----{cut}=\n-----END CERTIFICATE-----")


def test_all_certificates_in_a_bundle_are_read_in_order() -> None:
    authority = pki.Authority()
    leaf = authority.agent("a1", valid=(-60.0, 60.0)).certificate
    broken = "-----BEGIN CERTIFICATE-----\nMIIF\n-----END CERTIFICATE-----"

    assert x509.validities(f"leaf:\n{leaf}{broken}its authority:{authority.ca}") == [
        x509.validity(leaf),
        x509.validity(authority.ca),
    ]
    assert x509.validities("CERT") == []


def test_megabyte_of_unterminated_certificates_is_read_quickly() -> None:
    """If the parser searched for an end line again after each ``BEGIN`` line, it would take hours."""
    assert x509.validities("-----BEGIN CERTIFICATE-----" * 40_000) == []
    assert len(list(x509.blocks("-----BEGIN CERTIFICATE-----" * 40_000 + "-----END CERTIFICATE-----"))) == 1
