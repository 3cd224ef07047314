"""Provides requests that no Director sends: malformed requests, and valid requests with a few bytes changed."""

from __future__ import annotations

import json
import random

BAD: tuple[bytes, ...] = (
    b"",
    b"{",
    b"null",
    b"[]",
    b'"x"',
    b"\xff\xfe",
    b'{"method": 7}',
    b'{"method": "ping", "arguments": {}, "reply_to": "director.x.y.z"}',
    b'{"method": "ping", "reply_to": "director.x.y.z", "protocol": "x"}',
    b'{"method": "apply", "arguments": [null], "reply_to": "director.x.y.z", "protocol": 3}',
    b'{"method": "apply", "arguments": ["' + b"9" * 5000 + b'"], "reply_to": "director.x.y.z", "protocol": 3}',
    b'{"method": "get_task", "arguments": [' + b"9" * 100_000 + b'], "reply_to": "director.x.y.z", "protocol": 3}',
    b'{"a":' * 100_000,
    b"[" * 500_000,
    b'{"method": "ping", "arguments": [], "reply_to": "a\\r\\nPUB x 1", "protocol": 3}',
    b'{"method": "' + b"m" * 900_000 + b'", "arguments": [], "reply_to": "director.x.y.z", "protocol": 3}',
    b'{"method": "ping", "arguments": [NaN], "reply_to": "director.x.y.z", "protocol": 3}',
    b'{"method": "ssh", "arguments": ["cleanup", {"user_regex": "(a+)+$"}], "reply_to": "director.x.y.z"}',
    b'{"method": "\\ud800", "arguments": [], "reply_to": "director.x.y.z", "protocol": 3}',
)


_GOOD = [
    {"protocol": 3, "method": method, "arguments": arguments, "reply_to": "director.x.y.z"}
    for method, arguments in (
        ("ping", []),
        ("get_state", ["full"]),
        ("get_task", ["1"]),
        ("cancel_task", ["1"]),
        ("list_disk", []),
        ("info", []),
        ("sync_dns", ["a", "b", 1]),
        ("run_script", ["nothing", {}]),
    )
]


def mutated(chance: random.Random) -> bytes:
    """Return a valid request with a few bytes changed."""
    raw = bytearray(json.dumps(chance.choice(_GOOD)).encode())
    for _ in range(chance.randint(1, 8)):
        place = chance.randrange(len(raw))
        match chance.randrange(3):
            case 0:
                raw[place] = chance.randrange(256)
            case 1:
                del raw[place]
            case _:
                raw[place:place] = raw[: chance.randrange(20)]
    return bytes(raw)
