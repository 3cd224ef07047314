"""Fetches pages from an HTTP server."""

from __future__ import annotations

import urllib.error
import urllib.request


def page(url: str, timeout: float = 5) -> tuple[int, str]:
    """Return a page's status and body, even if the status is an error. This call blocks.

    Raises ``URLError`` if it cannot connect.
    """
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.read().decode()
