"""Determines how a blobstore is reached over HTTP: trusted CAs, proxies and timeouts."""

from __future__ import annotations

import ssl
from collections.abc import Mapping

import msgspec

from agent_shim.core.errors import BlobError


class TransferTiming(msgspec.Struct, frozen=True):
    """Timeouts and limits of transfers, in seconds and bytes."""

    connect: float = 10.0
    stall: float = 30.0
    """An attempt fails if fewer than ``least`` bytes are transferred in this time."""
    least: int = 30 * 1024
    answer: float = 120.0
    """How long a server may take to respond after it has received the last byte."""
    hesitate: float = 1.0
    """How long to wait for "100 Continue", which some servers never send."""
    pause: float = 5.0
    """Pause between two attempts with a signed URL (blobstore_delegator.go)."""


def trusting(ca: str) -> ssl.SSLContext:
    """Return a context for TLS 1.2 or newer that trusts ``ca`` (PEM) if given, otherwise the system's CAs."""
    try:
        context = ssl.create_default_context(cadata=ca or None)
    except (ssl.SSLError, TypeError, ValueError) as exc:
        raise BlobError("cannot use the CA of the blobstore: it is not a PEM certificate") from exc
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # As in Go, every CA in the settings is trusted, and certificates need not have all extensions that RFC 5280
    # requires. BOSH creates such certificates, but newer versions of Python reject them by default.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def proxy_for(scheme: str, host: str, port: int | None, environment: Mapping[str, str]) -> str | None:
    """Return the proxy for a host, or None if the host is reached directly. Follows Go's rules
    (golang.org/x/net/http/httpproxy).
    """

    def value(name: str) -> str:
        return environment.get(name.upper()) or environment.get(name) or ""

    proxy = value(f"{scheme}_proxy")
    if not proxy or host == "localhost" or is_excepted(host, port, value("no_proxy")):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def is_excepted(host: str, port: int | None, exceptions: str) -> bool:
    """Return True if the host is a loopback address or is listed in ``exceptions``, which is the value of ``no_proxy``.

    The value lists names (which include their subdomains), addresses and networks, each with an optional port, or
    ``*`` for all hosts.
    """
    import ipaddress  # imported late, because it uses 0.2 MB and is needed only with a proxy

    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        address = None
    if address is not None and address.is_loopback:
        return True
    for entry in filter(None, map(str.strip, exceptions.lower().split(","))):
        if entry == "*":
            return True
        name, colon, number = entry.rpartition(":")  # in an IPv6 address, the colon does not precede a port
        if colon and number.isdigit() and not _is_network(entry):
            if int(number) != port:
                continue
            entry = name.strip("[]")  # noqa: PLW2901 - from here on, without the port
        if address is not None:
            if _is_network(entry) and address in ipaddress.ip_network(entry, strict=False):
                return True
        elif host.lower() == entry or host.lower().endswith("." + entry.removeprefix("*").removeprefix(".")):
            return True
    return False


def _is_network(entry: str) -> bool:
    import ipaddress  # imported late, as in ``is_excepted``

    try:
        ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return False
    return True
