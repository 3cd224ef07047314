"""Old versions of TLS, for attacks that use a version which must be refused."""

from __future__ import annotations

import ssl
import warnings


def lenient(context: ssl.SSLContext) -> ssl.SSLContext:
    """Allow every version in OpenSSL, so that each refusal comes from this project."""
    context.set_ciphers("ALL:@SECLEVEL=0")
    return context


def outdated(context: ssl.SSLContext) -> ssl.SSLContext:
    """Return a context that speaks TLS 1.1 and nothing newer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    return lenient(context)
