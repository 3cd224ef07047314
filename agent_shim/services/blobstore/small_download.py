"""Download of a small blob by one plain request, in a thread of the agent: faster than the start of a worker.

Proxies, redirects, chunks, other states than 200 and all failures are exceptions: a worker repeats the download, with
retries and the texts of the Go agent. It also reads the authorities of the system, a megabyte that would stay here.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

import httptools

from agent_shim.services.blobstore.routes import proxy_for, trusting

MAX_HEAD_BYTES: Final = 16 * 1024
"""Bytes of an answer beyond those of its body."""
RECEIVED_BYTES: Final = 64 * 1024


def download(
    url: str, headers: Mapping[str, str], *, room: int, until: float, ca: str, environment: Mapping[str, str]
) -> bytes:
    """Return the content of ``url``, at most ``room`` bytes, until the monotonic time ``until``.

    Raises ``OSError``, ``ValueError`` or ``BlobError``, also for everything unusual.
    """
    parts = urlsplit(url)
    target = f"{parts.path}?{parts.query}" if parts.query else parts.path
    host = parts.hostname or ""
    is_plain = parts.scheme in ("http", "https") and target.startswith("/") and "@" not in parts.netloc
    # Not normalized: another spelling would need another signature.
    if not is_plain or url != f"{parts.scheme}://{parts.netloc}{target}":
        raise ValueError("the URL is unusual")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if proxy_for(parts.scheme, host, port, environment) or (parts.scheme == "https" and not ca):
        raise ValueError("a proxy or the authorities of the system are needed")
    fields = {"Host": parts.netloc, "Accept": "*/*", "Accept-Encoding": "identity", "Connection": "close"}
    merged = {name.lower(): value for name, value in [*fields.items(), *headers.items()]}
    lines = [f"GET {target} HTTP/1.1", *(f"{name}: {value}" for name, value in merged.items())]
    if target.count(" ") or not all(line.isascii() and line.isprintable() for line in lines):
        raise ValueError("the URL or a header is unusual")
    with socket.create_connection((host, port), _left(until)) as plain:
        if parts.scheme == "http":
            return _exchanged(plain, lines, room, until)
        with trusting(ca).wrap_socket(plain, server_hostname=host) as connection:
            return _exchanged(connection, lines, room, until)


def _exchanged(connection: socket.socket, lines: list[str], room: int, until: float) -> bytes:
    connection.sendall("\r\n".join([*lines, "", ""]).encode("ascii"))
    answer = Answer(room)
    while not answer.is_complete:
        answer.read(_received(connection, until))
    return bytes(answer.body)


class Answer:
    """Parser events of an answer whose body has at most ``room`` bytes; ``body`` is all of it once ``is_complete``."""

    def __init__(self, room: int) -> None:
        self.body = bytearray()
        self.is_complete = False
        self._room = room
        self._left = room + MAX_HEAD_BYTES
        self._parser = httptools.HttpResponseParser(self)

    def read(self, data: bytes) -> None:
        """Feed the parser; raises ``ValueError`` for an answer that is too long or not a plain one with status 200."""
        self._left -= len(data)
        if self._left < 0:
            raise ValueError("the answer is too long")
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            raise ValueError(f"the answer is unusual: {exc.__context__ or exc}") from exc

    def on_message_begin(self) -> None:
        if self.is_complete:
            raise ValueError("a second answer follows")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-encoding", b"transfer-encoding"):
            raise ValueError("its body is coded")
        if name.lower() == b"content-length" and int(value) > self._room:
            raise ValueError("the blob is too large")

    def on_headers_complete(self) -> None:
        if self._parser.get_status_code() != HTTPStatus.OK:
            raise ValueError("another status than 200")

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.is_complete = True


def _received(connection: socket.socket, until: float) -> bytes:
    connection.settimeout(_left(until))
    if not (piece := connection.recv(RECEIVED_BYTES)):
        raise ConnectionError("the connection ended too early")
    return piece


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("it takes too long")
    return left
