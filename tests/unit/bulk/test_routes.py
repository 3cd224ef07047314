"""Tests that proxies are chosen according to Go's rules. ``integration/test_transfer.py`` tests the trusted CAs."""

from __future__ import annotations

import pytest

from agent_shim.bulk.routes import proxy_for

ENVIRONMENT = {
    "HTTP_PROXY": "proxy:3128",
    "https_proxy": "http://secure:1",
    "NO_PROXY": "10.0.0.0/8, .internal,example.com:8080,*.star.net, 192.168.1.1 ,[fd00::1]:25,fd01::/16",
}


@pytest.mark.parametrize(
    ("url", "proxy"),
    [
        (("http", "blobs.org", 80), "http://proxy:3128"),
        (("https", "blobs.org", 443), "http://secure:1"),
        (("http", "localhost", 80), None),
        (("http", "127.0.0.8", 80), None),
        (("http", "::1", 80), None),
        (("http", "10.1.2.3", 80), None),
        (("http", "11.1.2.3", 80), "http://proxy:3128"),
        (("http", "192.168.1.1", 80), None),
        (("http", "a.internal", 80), None),
        (("http", "A.INTERNAL", 80), None),
        (("http", "notinternal", 80), "http://proxy:3128"),
        (("http", "example.com", 8080), None),
        (("http", "a.example.com", 8080), None),
        (("http", "example.com", 80), "http://proxy:3128"),
        (("http", "a.star.net", 80), None),
        (("http", "fd00::1", 25), None),
        (("http", "fd00::1", 26), "http://proxy:3128"),
        (("http", "fd01::5", 80), None),
    ],
)
def test_hosts_networks_and_ports_in_no_proxy_are_reached_without_a_proxy(
    url: tuple[str, str, int], proxy: str | None
) -> None:
    """Container platforms put networks into ``NO_PROXY``, which Python's own rules do not support."""
    assert proxy_for(*url, ENVIRONMENT) == proxy


def test_star_in_no_proxy_disables_all_proxies() -> None:
    assert proxy_for("http", "h", 80, {"http_proxy": "p", "no_proxy": "*"}) is None
    assert proxy_for("http", "h", 80, {}) is None
