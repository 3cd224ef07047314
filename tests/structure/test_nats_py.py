"""The bus uses nats-py by its public names, with one exception."""

from __future__ import annotations

import ast
import asyncio
from urllib.parse import ParseResult

import pytest
from nats.aio.client import Client
from nats.aio.transport import Transport

from tests.structure.source import modules

PRIVATE = {"_transport": "a client has no parameter for its transport, and its own one waits 30 s for a dead server"}
"""Private names of nats-py that ``edges.bus`` uses, with the reason."""
OF_NATS_PY = frozenset({"_client", "_subscription"})
"""Attributes of ours that hold objects of nats-py."""


def private_names(text: str) -> set[str]:
    """Private attributes of objects of nats-py that a module reads or sets."""
    reached = {
        each.attr
        for each in ast.walk(ast.parse(text))
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Attribute) and each.value.attr in OF_NATS_PY
    }
    return {name for name in reached if name.startswith("_")}


def test_private_names_of_nats_py_in_use_are_listed() -> None:
    module = modules()["edges.bus.link"]

    assert private_names(module.text) == set(PRIVATE)
    assert private_names("self._client._pending\nself._subscription._jsi\nself._client.flush") == {"_pending", "_jsi"}


def test_only_transports_of_nats_py_are_subclassed() -> None:
    """A subclass of the client could override methods unnoticed."""
    tree = modules()["edges.bus.link"].tree
    bases = {ast.unparse(base) for each in ast.walk(tree) if isinstance(each, ast.ClassDef) for base in each.bases}

    assert bases == {"Transport", "asyncio.StreamReaderProtocol"}


async def test_nats_client_connects_with_the_given_transport() -> None:
    """``./dev test-dependencies`` runs this with the lowest and the newest version of the range."""
    asked: list[str] = []

    class Ours(Transport):
        async def connect(self, uri: ParseResult, *_: int, **__: int) -> None:
            asked.append(uri.netloc)

        async def readline(self) -> bytes:
            raise ConnectionResetError

        def __bool__(self) -> bool:
            return True

        connect_tls = read = drain = wait_closed = write = writelines = close = at_eof = None  # type: ignore[assignment]

    async def ignore(_: Exception) -> None:
        await asyncio.sleep(0)

    client = Client()
    client._transport = Ours()
    with pytest.raises(ConnectionResetError):
        await client.connect(["nats://192.0.2.1:1"], allow_reconnect=False, error_cb=ignore)

    assert asked == ["192.0.2.1:1"]
