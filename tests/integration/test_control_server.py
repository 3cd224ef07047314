"""Tests the agent's control socket."""

from __future__ import annotations

import asyncio
import json
import socket
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from agent_shim.core.errors import ConfigError, NoAgentError
from agent_shim.edges import control_client, control_server


async def echo(request: dict[str, Any], line: bytes, _: control_server.Peer) -> bytes:
    return json.dumps({"request": request, "size": len(line)}).encode()


@pytest.mark.attack("a job connects to the control socket")
async def test_control_socket_answers_requests_and_is_private(tmp_path: Path) -> None:
    sent = {"text": 'a"\\\n\x1b\u00e9', "list": ["x", ()], "numbers": [1, -2, 0.5], "rest": [None, True, False, {}]}
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    async with control_server.listening(path, echo):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        reply = await asyncio.to_thread(control_client.ask, path, sent)

    assert reply["request"] == json.loads(json.dumps(sent))
    assert not path.exists()


@pytest.mark.parametrize("reply", [b"", b"nonsense", b'{"value": "no end'])
def test_invalid_control_reply_is_reported(tmp_path: Path, reply: bytes) -> None:
    """An agent that is killed while it replies may send an empty or partial reply."""
    path = tmp_path / "control.sock"

    def answer() -> None:
        connection, _ = listening.accept()
        connection.recv(100)
        connection.sendall(reply)
        connection.close()

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        answering = threading.Thread(target=answer)
        answering.start()
        with pytest.raises(NoAgentError, match="cannot ask the agent at .*control"):
            control_client.ask(path, {})
        answering.join()


async def test_overlong_control_socket_path_is_reported(tmp_path: Path) -> None:
    """The kernel limits socket paths to 107 bytes."""
    with pytest.raises(ConfigError, match=r"cannot listen on .*: AF_UNIX path too long; with -b choose"):
        async with control_server.listening(tmp_path / ("x" * 120), echo):
            pass


@pytest.mark.parametrize("sent", [b"", b"{\n", b"[]\n", b"\xff\n", b"no newline"])
async def test_invalid_control_request_does_not_affect_other_connections(tmp_path: Path, sent: bytes) -> None:
    path = tmp_path / "control.sock"
    async with control_server.listening(path, echo):
        _, writer = await asyncio.open_unix_connection(path)
        writer.write(sent)
        writer.close()

        assert await asyncio.to_thread(control_client.ask, path, {"command": "status"})


def test_command_error_without_an_agent_names_the_control_socket(tmp_path: Path) -> None:
    with pytest.raises(NoAgentError, match=r"cannot ask the agent at .*control\.sock.*is it running"):
        control_client.ask(tmp_path / "control.sock", {})
