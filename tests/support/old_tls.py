"""Enables outdated TLS versions so that tests can check that the agent rejects them."""

from __future__ import annotations

import ssl
import warnings


def lenient(context: ssl.SSLContext) -> ssl.SSLContext:
    """Lift OpenSSL's restrictions on ciphers and TLS versions so that only the agent's own settings can reject them."""
    context.set_ciphers("ALL:@SECLEVEL=0")
    return context


def outdated(context: ssl.SSLContext) -> ssl.SSLContext:
    """Return a context that supports no version newer than TLS 1.1."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    return lenient(context)
