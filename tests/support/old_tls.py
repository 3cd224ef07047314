"""Old versions of TLS, for attacks with a version that must be refused."""

from __future__ import annotations

import ssl
import warnings


def lenient(context: ssl.SSLContext) -> ssl.SSLContext:
    """Allow everything in OpenSSL: every refusal then comes from this project."""
    context.set_ciphers("ALL:@SECLEVEL=0")
    return context


def outdated(context: ssl.SSLContext) -> ssl.SSLContext:
    """Speaks TLS 1.1, and nothing newer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    return lenient(context)
