"""The log shown by `bosh task N --cpi`: one line per call to the cluster, on standard error, without secrets."""

from __future__ import annotations

import base64
import contextlib
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

MIN_SECRET_CHARS: Final = 6
"""Minimum length of a secret. Shorter strings are not redacted, because they would match too much of the log."""
HIDDEN: Final = "<redacted>"
NOT_SECRET: Final = frozenset({"group", "groups", "tags"})
"""Keys of `env.bosh` whose values are not redacted. The Director's own log shows them too (clouds/external_cpi.rb)."""

_USERINFO: Final = re.compile(r"://([^/@\s]+)@")

_secrets: set[str] = set()
_calls: list[float] = []


def reset() -> None:
    """Forget the secrets and calls of the previous request. Only tests serve several requests in one process."""
    _secrets.clear()
    _calls.clear()


def say(text: str) -> None:
    """Write a message to the log. It may have several lines."""
    with contextlib.suppress(OSError):  # A call must not fail because nobody reads its log any more.
        sys.stderr.write(redacted(text.rstrip("\n")) + "\n")
        sys.stderr.flush()


def call(what: str, outcome: str, seconds: float) -> None:
    """Log a call to the cluster with its outcome and duration, and count it for ``summary``."""
    _calls.append(seconds)
    say(f"{what}: {outcome} ({seconds * 1000:.0f} ms)")


def summary(name: str, seconds: float) -> str:
    """Return a one-line summary of the whole request, for the `log` member of the response."""
    calls = f"{len(_calls)} call{'' if len(_calls) == 1 else 's'} to the cluster, {sum(_calls):.2f} s"
    return redacted(f"{name}: {seconds:.2f} s ({calls})\n")


def hide(document: Any) -> None:
    """Redact all strings in ``document`` from now on, except the values of the keys in ``NOT_SECRET``."""
    _secrets.update(text for text in _texts(document) if len(text) >= MIN_SECRET_CHARS)


def redacted(text: str) -> str:
    """Redact the secrets in ``text``, whether they are in plain text, in base64, or escaped as in Python or JSON."""
    # Replace long secrets first, because they may contain shorter ones.
    for secret in sorted(_secrets, key=len, reverse=True):
        coded, quoted = base64.b64encode(secret.encode()).decode(), msgspec.json.encode(secret).decode()
        for form in (secret, coded, quoted[1:-1], repr(secret)[1:-1]):
            text = text.replace(form, HIDDEN)
    return text


def _texts(document: Any) -> Iterable[str]:
    """Return the strings in a document that must be hidden in the log: each string, its lines, and the passwords in
    URLs.

    The first and last lines of PEM blocks are not secret and are left out.
    """
    if isinstance(document, str):
        yield document
        for userinfo in _USERINFO.findall(document):
            yield userinfo.partition(":")[2]
        yield from (line.strip() for line in document.splitlines() if not line.startswith("-----"))
    elif isinstance(document, Mapping):
        for key, value in document.items():
            if key not in NOT_SECRET:
                yield from _texts(value)
    elif isinstance(document, list):
        for value in document:
            yield from _texts(value)
