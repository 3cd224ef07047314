"""Tests warnings about certificates that expire soon."""

from __future__ import annotations

import logging
import time

import pytest

from agent_shim.core.settings import Mbus
from agent_shim.daemon.runtime import certificates
from agent_shim.demo.pki import EXPIRED, HOUR, Authority
from agent_shim.services.certificate_watch import DAY_S, HTTPS, CertificateWatch

AUTHORITY = Authority()


def certificate(begin: float, end: float) -> str:
    """Return a certificate that is valid from ``begin`` to ``end``, both in seconds from now."""
    return AUTHORITY.agent("agent", valid=(begin, end)).certificate


@pytest.mark.parametrize(
    ("valid", "is_near"),
    [
        ((-HOUR, 365 * DAY_S), False),
        ((-300 * DAY_S, 31 * DAY_S), False),
        ((-300 * DAY_S, 29 * DAY_S), True),
        ((-0.7 * HOUR, 0.3 * HOUR), False),
        ((-0.9 * HOUR, 0.1 * HOUR), True),
        (EXPIRED, True),
    ],
)
def test_certificate_is_near_expiry_within_a_month_or_a_fifth_of_its_validity(
    valid: tuple[float, float], is_near: bool
) -> None:
    """The shorter of the two periods applies. A new VM's credentials are valid for only an hour, so a fixed period of a
    month would cause a permanent warning.
    """
    expiry = CertificateWatch(lambda: {"client": certificate(*valid)})
    expiry.look()

    assert bool(expiry.warnings) == is_near
    assert abs(expiry.ends["client"] - (time.time() + valid[1])) < 60


def test_certificate_warning_is_logged_once_and_again_at_expiry(caplog: pytest.LogCaptureFixture) -> None:
    now = time.time()
    expiry = CertificateWatch(lambda: {"client": near, "CA": AUTHORITY.ca}, lambda: now)
    near = certificate(-99 * DAY_S, DAY_S)
    for later in (0.0, HOUR, HOUR, 2 * DAY_S, DAY_S):
        now += later
        expiry.look()

    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 2
    assert said[0].startswith("the client certificate of the bus expires at 20")
    assert said[0].endswith(" UTC: rotate it before then")
    assert said[1].endswith(" UTC: the agent cannot reconnect to the bus")
    assert expiry.warnings == said[1:]


def test_certificate_warning_mentions_the_https_endpoint_instead_of_a_bus() -> None:
    """An agent with an HTTPS endpoint has no bus."""
    cert, ended = certificate(-99 * DAY_S, DAY_S), certificate(*EXPIRED)
    named = [certificates(Mbus((url,), AUTHORITY.ca, ended, "")) for url in ("https://0.0.0.0:6868", "nats://10.0.0.6")]
    said = []
    for pem in (cert, ended):
        expiry = CertificateWatch(lambda pem=pem: {HTTPS: pem})  # type: ignore[misc]
        expiry.look()
        said += expiry.warnings

    assert [list(names) for names in named] == [["server"], ["client", "CA"]]
    assert said[0].startswith("the certificate of the HTTPS endpoint expires at 20")
    assert said[1].startswith("the certificate of the HTTPS endpoint expired at ")
    assert not any("bus" in text for text in said)


def test_certificate_warning_disappears_when_the_certificate_is_rotated() -> None:
    pem = certificate(-99 * DAY_S, DAY_S)
    expiry = CertificateWatch(lambda: {"client": pem})
    expiry.look()
    assert expiry.warnings
    pem = certificate(-HOUR, 365 * DAY_S)
    expiry.look()

    assert expiry.warnings == []


def test_ca_bundle_expires_when_its_longest_lived_ca_does() -> None:
    """During a rotation, the bundle contains the old and the new CA."""
    ending = Authority().agent("old-ca", valid=(-99 * DAY_S, DAY_S)).certificate
    expiry = CertificateWatch(lambda: {"CA": ending + AUTHORITY.ca, "client": ""})
    expiry.look()

    assert expiry.warnings == []
    assert expiry.ends.keys() == {"CA"}
