"""TLS as it was: for attacks with a version that nobody should speak any more."""

from __future__ import annotations

import ssl
import warnings


def lenient(context: ssl.SSLContext) -> ssl.SSLContext:
    """As on a machine whose OpenSSL was told to allow everything: what is refused now, we refuse."""
    context.set_ciphers("ALL:@SECLEVEL=0")
    return context


def outdated(context: ssl.SSLContext) -> ssl.SSLContext:
    """Speaks TLS 1.1, and nothing newer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    return lenient(context)
