"""The plain requests that the agent itself makes: what it takes for plain."""

from __future__ import annotations

import time

import pytest

from agent_shim.services.blobstore.small_download import Answer, download


def test_a_plain_answer_is_read_in_any_pieces() -> None:
    text = b"HTTP/1.1 200 OK\r\nServer: x\r\ncontent-length:  5 \r\n\r\nhello"
    whole, bytewise = Answer(5), Answer(5)

    whole.read(text)
    for number in range(len(text)):
        assert not bytewise.is_complete
        bytewise.read(text[number : number + 1])

    for answer in (whole, bytewise):
        assert answer.is_complete
        assert answer.body == b"hello"


@pytest.mark.parametrize(
    "text",
    [
        b"\0",
        b"HTTP/1.1 206 Partial\r\nContent-Length: 1\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\nContent-Length: 1\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 20_000,
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: ²\r\n\r\n".encode(),
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"1" * 5000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"1" * 20_000,
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx" * 2,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Encoding: gzip\r\n\r\nx",
    ],
)
def test_no_other_answer_is_read(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"^the answer"):
        Answer(5).read(text)


@pytest.mark.parametrize(
    ("url", "headers"),
    [
        ("ftp://127.0.0.1:1/x", {}),
        ("http://user:secret@127.0.0.1:1/x", {}),
        ("http://127.0.0.1:1", {}),
        ("http://127.0.0.1:1/x#part", {}),
        ("http://127.0.0.1:1/a b", {}),
        ("http://127.0.0.1:1/a\r\nX: y", {}),
        ("http://127.0.0.1:1/ä", {}),
        ("http://127.0.0.1:port/x", {}),
        ("http://127.0.0.1:1/x", {"a": "b\r\nc: d"}),
        ("http://127.0.0.1:1/x", {"a\nb": "c"}),
        ("https://127.0.0.1:1/x", {}),
        ("http://blobs.example/x", {}),
    ],
)
def test_no_other_request_is_made(url: str, headers: dict[str, str]) -> None:
    """The last one needs a proxy, the one before the authorities of the system."""
    proxies = {"http_proxy": "http://127.0.0.1:1"}
    with pytest.raises(ValueError):  # noqa: PT011 - the worker gives the text
        download(url, headers, room=1, until=time.monotonic() + 5, ca="", environment=proxies)
