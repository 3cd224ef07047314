"""Builds TLS contexts for the bus from the PEM data in the settings, without leaving a file behind.

The rules match the Go agent (``mbus/nats_handler.go``, nats.go), and TLS 1.2 or newer is required. To a NATS server,
the agent always presents a client certificate. The server is verified by its certificate chain and its subject
alternative names. Its common name must have the right form but need not match the host.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import ssl
from typing import Any, Final

from agent_shim.core import x509
from agent_shim.core.errors import CredentialsError
from agent_shim.core.settings import Mbus

logger = logging.getLogger(__name__)

SIGNATURE_FAILURE: Final = 7
"""X509_V_ERR_CERT_SIGNATURE_FAILURE: the certificate was not signed by the CA that OpenSSL chose."""
SERVER_NAME: Final = re.compile(r"[a-zA-Z0-9*\-]*\.nats\.bosh-internal")
"""Pattern for the common name in a server's certificate."""


def client_context(mbus: Mbus) -> ssl.SSLContext:
    """Build the client context. Raises a ``CredentialsError`` that names the faulty PEM data."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.hostname_checks_common_name = False
    # As in Go, the CA in the settings is trusted even if it is an intermediate CA.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if mbus.ca:
        context.load_verify_locations(cadata="".join(authorities(mbus.ca)))
    else:
        context.load_default_certs()
    load_pair(context, mbus.certificate, mbus.private_key)
    return context


@functools.lru_cache(maxsize=8)
def authorities(ca: str) -> tuple[str, ...]:
    """Return the readable certificates in ``ca``, and log unreadable ones once. Raises ``CredentialsError`` if there is
    no readable certificate.
    """
    good, bad = x509.readable(ca)
    if not good:
        raise CredentialsError("the CA is not a PEM certificate")
    for number in bad:
        logger.error("cannot read certificate %d in the CA of the bus; the others are used", number)
    return tuple(good)


def server_context(mbus: Mbus) -> ssl.SSLContext:
    """Build the server context for the bosh CLI. Raises ``CredentialsError``.

    For TLS 1.2, the same two cipher suites are allowed as in the Go agent (``mbus/https_dispatcher.go``). No client
    certificate is requested.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("ECDHE-RSA-AES256-GCM-SHA384:ECDHE-RSA-AES128-GCM-SHA256")
    context.set_alpn_protocols(["http/1.1"])
    context.options |= ssl.OP_NO_RENEGOTIATION
    load_pair(context, mbus.certificate, mbus.private_key)
    return context


def load_pair(context: ssl.SSLContext, certificate: str, private_key: str) -> None:
    """Load the certificate (chain) and key into a context. Raises ``CredentialsError``.

    OpenSSL can only read files, so the pair is passed in an anonymous file in memory.
    """
    if "-----BEGIN CERTIFICATE-----" not in certificate:
        raise CredentialsError("the certificate is not a PEM certificate")
    if "PRIVATE KEY-----" not in private_key:
        raise CredentialsError("the private key is not a PEM key")
    if "ENCRYPTED" in certificate + private_key:  # decrypting a maliciously crafted key may take hours
        raise CredentialsError("the private key is encrypted, and the settings hold no password for it")
    with open(os.memfd_create("bus"), "w") as file:
        file.write(f"{certificate}\n{private_key}\n")
        file.flush()
        try:
            # Without a password, OpenSSL would prompt for one on the terminal, so pass a wrong one.
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}", password="")
        except ssl.SSLError as exc:
            if exc.reason == "KEY_VALUES_MISMATCH":
                raise CredentialsError("the private key belongs to another certificate") from exc
            raise CredentialsError(f"the certificate or its private key cannot be read ({_reason(exc)})") from exc


def check_server_name(server: ssl.SSLObject) -> None:
    """Raise ``ssl.SSLCertVerificationError`` if a server's certificate is valid but is not a bus certificate."""
    subject: Any = (server.getpeercert() or {}).get("subject", ())
    names = [value for part in subject for name, value in part if name == "commonName"]  # as in Go, the last one counts
    if not names or not SERVER_NAME.fullmatch(names[-1]):
        # Pass an error number as the first argument. Without one, the exception shows a different message.
        reason = "server Certificate CommonName does not match *.nats.bosh-internal"
        raise ssl.SSLCertVerificationError(ssl.SSL_ERROR_SSL, reason)


def _reason(exc: ssl.SSLError) -> str:
    """Return OpenSSL's reason without its source location."""
    return (exc.reason or re.sub(r"\[.*?]|\(.*?\)", "", str(exc))).replace("_", " ").strip().lower()
