"""TLS contexts of the bus: from PEM texts in settings, never by way of a file that stays.

Rules of the Go agent (``mbus/nats_handler.go``, nats.go): TLS 1.2 or newer, a client certificate always, the server
verified by its chain, by its subject alternative names (not by its common name) and by a name of its own kind.
"""

from __future__ import annotations

import os
import re
import ssl
from typing import Any, Final

from agent_shim.core.errors import CredentialsError
from agent_shim.core.settings import Mbus

SERVER_NAME: Final = re.compile(r"[a-zA-Z0-9*\-]*\.nats\.bosh-internal")
"""What the common name of the server's certificate must be."""


def client_context(mbus: Mbus) -> ssl.SSLContext:
    """The context of a client of this bus; raises ``CredentialsError`` saying which of the three PEM texts is wrong."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.hostname_checks_common_name = False
    # As in Go, whatever the settings call CA is trusted, also when another authority signed it.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if mbus.ca:
        _load_ca(context, mbus.ca)
    else:
        context.load_default_certs()
    load_pair(context, mbus.certificate, mbus.private_key)
    return context


def server_context(mbus: Mbus) -> ssl.SSLContext:
    """The context of a server that the bosh CLI calls; raises ``CredentialsError``.

    The two suites of TLS 1.2 are those of the Go agent (``mbus/https_dispatcher.go``); nobody is asked for a
    certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("ECDHE-RSA-AES256-GCM-SHA384:ECDHE-RSA-AES128-GCM-SHA256")
    context.set_alpn_protocols(["http/1.1"])
    context.options |= ssl.OP_NO_RENEGOTIATION
    load_pair(context, mbus.certificate, mbus.private_key)
    return context


def load_pair(context: ssl.SSLContext, certificate: str, private_key: str) -> None:
    """Give a context its own certificate (chain) and key; raises ``CredentialsError``.

    OpenSSL reads them from files only: this one lives in memory and has no name.
    """
    if "-----BEGIN CERTIFICATE-----" not in certificate:
        raise CredentialsError("the certificate is no PEM certificate")
    if "PRIVATE KEY-----" not in private_key:
        raise CredentialsError("the private key is no PEM key")
    if "ENCRYPTED" in certificate + private_key:  # how long one takes to decrypt, its own text says: hours, if it likes
        raise CredentialsError("the private key is encrypted: there is no password for it")
    file = os.memfd_create("bus")
    try:
        with open(file, "w", closefd=False) as out:
            out.write(f"{certificate}\n{private_key}\n")
        # A password that is wrong keeps OpenSSL from asking for one on the terminal.
        context.load_cert_chain(f"/proc/self/fd/{file}", password="")
    except ssl.SSLError as exc:
        if exc.reason == "KEY_VALUES_MISMATCH":
            raise CredentialsError("the private key belongs to another certificate") from exc
        raise CredentialsError(f"the certificate or its private key cannot be read ({_reason(exc)})") from exc
    finally:
        os.close(file)


def check_server_name(server: ssl.SSLObject) -> None:
    """Refuse a server whose certificate is good but not that of a bus; raises ``ssl.SSLCertVerificationError``."""
    subject: Any = (server.getpeercert() or {}).get("subject", ())
    names = [value for part in subject for name, value in part if name == "commonName"]
    if not names or not SERVER_NAME.fullmatch(names[-1]):
        raise ssl.SSLCertVerificationError("server Certificate CommonName does not match *.nats.bosh-internal")


def _load_ca(context: ssl.SSLContext, ca: str) -> None:
    try:
        context.load_verify_locations(cadata=ca)
    except ssl.SSLError as exc:
        raise CredentialsError(f"the CA is no PEM certificate ({_reason(exc)})") from exc
    except (TypeError, ValueError) as exc:
        raise CredentialsError("the CA is no PEM certificate") from exc


def _reason(exc: ssl.SSLError) -> str:
    """OpenSSL's words without the place in its source."""
    return (exc.reason or re.sub(r"\[.*?]|\(.*?\)", "", str(exc))).replace("_", " ").strip().lower()
