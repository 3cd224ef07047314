"""The private parts of nats-py that the bus replaces or calls are those it was written against."""

from __future__ import annotations

import ast
import hashlib
import inspect
from asyncio import sslproto
from collections.abc import Mapping
from importlib.metadata import version

from nats.aio.client import Client
from nats.aio.transport import TcpTransport
from nats.protocol.parser import Parser

from tests.structure.source import modules

READ = "2.16.0"
"""The version whose methods were read."""
REPLACED: Mapping[str, str] = {
    "_Link._connect_command": "1999c01f55c9",
    "_Link._process_err": "ceb70f44e38f",
    "_Link._process_info": "ecca7bb93130",
    "_Link._process_msg": "6cff75947e97",
    "_Link._process_op_err": "d4257cb1203c",
    "_Link._process_pong": "ee4c4d01a16d",
    "_Link._select_next_server": "c278559f8a14",
    "_Parser.parse": "7d6165f1766c",
    "_Transport.connect": "96c97f9bad05",
    "_Transport.connect_tls": "6688ffffefa2",
    "_Transport.readline": "1aa4937b2ac3",
}
"""Methods of nats-py that ``edges.bus.nats`` overrides, with the digest of their text."""
CALLED: Mapping[str, str] = {
    "_Link._connect_to_server": "1356d992325f",
}
"""Private methods that it calls."""
ATTRIBUTES = frozenset(
    {"_current_server", "_flusher_task", "_ping_interval_task", "_reading_task", "_server_pool", "_transport"}
    | {"_ps", "_bare_io_reader", "_bare_io_writer", "_io_reader", "_io_writer"}
)
"""Private attributes that it reads or sets."""
BASES: Mapping[str, type] = {"_Link": Client, "_Parser": Parser, "_Transport": TcpTransport}


def digest(name: str) -> str:
    owner, _, method = name.partition(".")
    return hashlib.sha256(inspect.getsource(getattr(BASES[owner], method)).encode()).hexdigest()[:12]


def test_what_is_replaced_or_called_is_what_was_read() -> None:
    """After an upgrade: read the methods named here, adapt ``edges.bus.nats``, then renew the digests."""
    known = {**REPLACED, **CALLED}

    assert {name: digest(name) for name in known} == known, f"nats-py is {version('nats-py')}, read was {READ}"


def test_attributes_are_those_of_a_client() -> None:
    text = inspect.getsource(inspect.getmodule(Client)) + inspect.getsource(inspect.getmodule(TcpTransport))  # type: ignore[arg-type]

    assert [name for name in ATTRIBUTES if f"self.{name}" not in text] == []


def test_asyncio_sizes_its_buffer_of_tls_by_the_attribute_that_is_set() -> None:
    assert "bytearray(self.max_size)" in inspect.getsource(sslproto.SSLProtocol.__init__)


def test_nothing_else_of_nats_py_is_private_to_it_and_used() -> None:
    tree = modules()["edges.bus.nats"].tree
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in BASES}
    assert set(classes) == set(BASES)
    own = {"_wire", "_parts", "_ended", "_asked", "_heard", "_ponged", "_on_message", "_on_denied"}
    own |= {"_commands", "_commands_bytes"}
    used = set()
    for name, node in classes.items():
        methods = {part.name for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)}
        reached = {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}
        used |= {f"{name}.{part}" for part in methods if hasattr(BASES[name], part)}
        private = {part for part in reached - methods - own if part.startswith("_") and not part.startswith("__")}
        used |= {f"{name}.{part}" if hasattr(BASES[name], part) else part for part in private}

    public = {"_Link.__init__", "_Transport.__bool__", "_Transport.close", "_Transport.wait_closed"}
    assert used - public == {*REPLACED, *CALLED, *ATTRIBUTES}
