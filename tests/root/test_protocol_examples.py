"""Tests the examples in ``docs/protocol.md`` that need root, by sending them over the bus to an agent on its own
machine.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from agent_shim.demo.director import RpcRemoteError
from tests.support import protocol
from tests.support.fleet import fleet
from tests.support.protocol import Example

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("sshd", path="/usr/sbin") is None, reason="needs openssh-server"),
]

AGENT = "agent-1"
EXAMPLES = [each for section in protocol.sections() for each in section.examples if each.kind == "root"]


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
async def test_protocol_example_is_answered_as_documented(example: Example, tmp_path: Path) -> None:
    async with fleet(tmp_path) as machines:
        await machines.add(AGENT, {"default": {"type": "manual", "ip": "10.0.0.5", "netmask": "255.255.255.0"}})

        async def call(request: dict[str, Any]) -> dict[str, Any]:
            try:
                return {"value": await machines.director.value(AGENT, request["method"], *request["arguments"])}
            except RpcRemoteError as exc:
                return {"exception": {"message": str(exc)}}

        await example.play(call, {})
