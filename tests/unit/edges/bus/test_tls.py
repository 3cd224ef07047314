"""Tests the bus's TLS settings, and that private keys are not left on disk."""

from __future__ import annotations

import base64
import contextlib
import ssl
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from agent_shim.core.errors import CredentialsError
from agent_shim.core.settings import Mbus
from agent_shim.demo.pki import Authority
from agent_shim.edges.bus import tls

AUTHORITY = Authority()
OURS = AUTHORITY.agent("agent")
BROKEN = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"


def mbus(**changes: str) -> Mbus:
    """Return valid credentials in which the members in ``changes`` are replaced."""
    good = {"ca": AUTHORITY.ca, "certificate": OURS.certificate, "private_key": OURS.private_key}
    return Mbus(urls=(), **good | changes)


def locked(key: str) -> str:
    """Return the private key encrypted with a password."""
    return (
        load_pem_private_key(key.encode(), None)
        .private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
        .decode()
    )


def costly() -> str:
    """Return a private key whose header asks for two billion rounds of key derivation (RFC 8018)."""

    def element(tag: int, *content: bytes) -> bytes:
        body = b"".join(content)
        size = bytes([len(body)]) if len(body) < 128 else b"\x82" + len(body).to_bytes(2, "big")
        return bytes([tag]) + size + body

    def name(*numbers: int) -> bytes:
        return element(6, bytes(numbers))

    rsa_security = (0x2A, 0x86, 0x48, 0x86, 0xF7, 0x0D)
    rounds = element(2, (2_000_000_000).to_bytes(4, "big"))
    derived = element(0x30, name(*rsa_security, 1, 5, 12), element(0x30, element(4, bytes(8)), rounds))
    cipher = element(0x30, name(0x60, 0x86, 0x48, 1, 0x65, 3, 4, 1, 42), element(4, bytes(16)))
    algorithm = element(0x30, name(*rsa_security, 1, 5, 13), element(0x30, derived, cipher))
    whole = element(0x30, algorithm, element(4, bytes(64)))
    text = base64.encodebytes(whole).decode()
    return f"-----BEGIN ENCRYPTED PRIVATE KEY-----\n{text}-----END ENCRYPTED PRIVATE KEY-----\n"


COSTLY = costly()


def test_tls_verification_matches_go() -> None:
    """TLS 1.2, a verified chain, and the host name in the certificate's subject alternative names are required."""
    context = tls.client_context(mbus())

    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.check_hostname
    assert not context.hostname_checks_common_name
    assert [ca["serialNumber"] for ca in context.get_ca_certs()] != []


def test_tls_contexts_set_version_and_verification_options_explicitly() -> None:
    """The agent must not rely on the TLS library's defaults, which vary. Old TLS versions and renegotiation are
    rejected, and the client accepts an intermediate CA as its trust anchor.
    """
    client, server = tls.client_context(mbus()), tls.server_context(mbus())

    assert client.minimum_version == server.minimum_version == ssl.TLSVersion.TLSv1_2
    assert client.verify_flags & ssl.VERIFY_X509_PARTIAL_CHAIN
    assert server.options & ssl.OP_NO_RENEGOTIATION


def test_tls_trusts_the_system_roots_if_the_ca_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roots = tmp_path / "roots.pem"
    roots.write_text(AUTHORITY.ca)
    monkeypatch.setenv("SSL_CERT_FILE", str(roots))
    context = tls.client_context(mbus(ca=""))

    assert len(context.get_ca_certs()) == 1


@pytest.mark.attack("a request contains certificates or keys that the agent cannot use")
@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"ca": "nothing"}, "the CA is not a PEM certificate"),
        ({"ca": "é"}, "the CA is not a PEM certificate"),
        ({"ca": BROKEN}, "the CA is not a PEM certificate"),
        ({"certificate": ""}, "the certificate is not a PEM certificate"),
        ({"certificate": BROKEN}, "the certificate or its private key cannot be read"),
        ({"private_key": ""}, "the private key is not a PEM key"),
        ({"private_key": "-----BEGIN PRIVATE KEY-----\nAAAA"}, "the certificate or its private key cannot be read"),
        ({"private_key": locked(OURS.private_key)}, "the private key is encrypted"),
        ({"private_key": COSTLY}, "the private key is encrypted"),
        ({"certificate": f"{COSTLY}{OURS.certificate}"}, "the private key is encrypted"),
        ({"private_key": AUTHORITY.agent("x").private_key}, "the private key belongs to another certificate"),
    ],
)
def test_invalid_credentials_error_names_the_wrong_part_but_not_its_content(
    changes: dict[str, str], complaint: str
) -> None:
    with pytest.raises(CredentialsError) as caught:
        tls.client_context(mbus(**changes))

    assert str(caught.value).startswith(complaint)
    assert "None" not in str(caught.value)
    assert "BEGIN" not in str(caught.value)


@pytest.mark.parametrize("bad", [BROKEN, "-----BEGIN CERTIFICATE-----\ncut off\n"])
def test_unreadable_ca_is_skipped_and_reported(bad: str, caplog: pytest.LogCaptureFixture) -> None:
    others = [Authority().ca, AUTHORITY.ca]
    for _ in range(2):
        context = tls.client_context(mbus(ca=f"{others[0]}\n{bad}\n{others[1]}"))

    assert len(context.get_ca_certs()) == 2
    told = "cannot read certificate 2 in the CA of the bus; the others are used"
    assert [record.getMessage() for record in caplog.records] == ([told] if bad == BROKEN else [])


def test_loading_a_private_key_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for changes in ({}, {"certificate": BROKEN}):
        with contextlib.suppress(CredentialsError):
            tls.client_context(mbus(**changes))

    assert list(tmp_path.iterdir()) == []
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_certificates_like_those_from_a_director_are_accepted() -> None:
    """A Director's certificates have a 3072-bit RSA key and a three-letter country, which strict tools refuse to
    create.
    """
    real = Authority(bits=3072)
    pair = real.agent("agent")

    tls.client_context(Mbus((), real.ca, pair.certificate, pair.private_key))


@pytest.mark.attack("a neighbour poses as the bus, or sends requests in the Director's name")
@pytest.mark.parametrize(
    ("name", "is_good"),
    [
        ("default.nats.bosh-internal", True),
        ("*.nats.bosh-internal", True),
        (".nats.bosh-internal", True),
        ("a.b.nats.bosh-internal", False),
        ("default.natsXbosh-internal", False),
        ("default.nats.bosh-internal.evil", False),
        ("default.nats.bosh-internal\n", False),
        ("default.agent.bosh-internal", False),
        ("", False),
    ],
)
def test_tls_accepts_only_server_names_of_the_bus(name: str, is_good: bool) -> None:
    class Server:
        def getpeercert(self) -> dict[str, Any]:
            return {"subject": ((("countryName", "USA"),), (("commonName", name),)) if name else ()}

    server: Any = Server()
    if is_good:
        tls.check_server_name(server)
    else:
        with pytest.raises(ssl.SSLCertVerificationError, match="^server Certificate CommonName does not match"):
            tls.check_server_name(server)
