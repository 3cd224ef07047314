"""Send the examples in ``docs/protocol.md`` through the real dispatch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent_shim.demo.release import archive
from agent_shim.host import volumes
from tests.support import jobs, protocol
from tests.support.http import http_server
from tests.support.protocol import Example
from tests.support.waiting import TIMEOUT_S
from tests.support.world import LocalAgent

EXAMPLES = [example for section in protocol.sections() for example in section.examples]

SCRIPTS = {
    "bin/run": "#!/bin/sh\necho done\nexit 3\n",
    "bin/drain": "#!/bin/sh\necho 0\n",
    "bin/post-deploy": "#!/bin/sh\n[ $NAME = value ]\n",
    "bin/pre-start": "#!/bin/sh\n",
    "bin/broken": "#!/bin/sh\nexit 1\n",
}


@pytest.fixture
async def known(world: LocalAgent, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[dict[str, Any]]:
    """Create the blobs, volumes and spec that the examples use, and yield the values of the examples' placeholders."""
    store = Path(world.agent.settings.current.blobstore.options["blobstore_path"])
    monkeypatch.setattr(volumes, "can_bind", lambda _: False)
    contents = {
        "source": archive(
            {"packaging": "mkdir $BOSH_INSTALL_TARGET/bin; cp src $BOSH_INSTALL_TARGET/bin/", "src": "s"}
        ),
        "records": json.dumps({"version": 4, "records": [["10.0.0.9", "a.b.bosh"]]}).encode(),
        "tool": archive({"bin/tool": "x"}),
    }
    names: dict[str, Any] = {}
    for name, content in contents.items():
        made = jobs.blob(store, content, f"{name}-blob")
        names |= {name: made["blobstore_id"], f"{name}_sha1": made["sha1"]}
    for name in ("volume", "volume_b"):
        path = world.paths.base.parent / name
        path.mkdir()
        names[name] = str(path)
    spec = jobs.spec(store, {"web": jobs.sleeper(world.paths, "web") | SCRIPTS})
    spec["packages"]["tool"] = {
        "name": "tool",
        "version": "1",
        "sha1": names["tool_sha1"],
        "blobstore_id": names["tool"],
    }
    templates = spec["rendered_templates_archive"]
    names |= {"spec": spec, "templates": templates["blobstore_id"], "templates_sha1": templates["sha1"]}
    async with http_server() as server:
        server.blobs = {f"/{name}": content for name, content in contents.items()}
        yield names | {"url": server.url}


@pytest.mark.parametrize("example", [each for each in EXAMPLES if each.kind != "root"], ids=str)
async def test_protocol_example_is_answered_as_documented(
    example: Example, world: LocalAgent, known: dict[str, Any]
) -> None:
    if example.kind == "deployed":
        assert await world.value("apply", known["spec"]) == "applied"
        assert await world.value("start") == "started"
        async with asyncio.timeout(TIMEOUT_S):
            while (await world.value("get_state"))["job_state"] != "running":
                await asyncio.sleep(0.01)

    async with asyncio.timeout(TIMEOUT_S):
        await example.play(world.raw, known)


@pytest.mark.parametrize(
    ("told", "value"),
    [
        ('{"a": 1}', {"a": 2}),
        ('{"a": 1}', {"a": 1, "b": 2}),
        ('{"a": 1, "…": "…"}', {"b": 2}),
        ('{"a": [1]}', {"a": [1, 2]}),
        ('{"a": "x…z"}', {"a": "xyzq"}),
        ('{"a": "$same", "b": "$same"}', {"a": "1", "b": "2"}),
        ('{"a": 0}', {"a": False}),
    ],
)
async def test_wrong_protocol_example_is_detected(told: str, value: Any) -> None:
    async def call(_: dict[str, Any]) -> dict[str, Any]:
        return {"value": value}

    example = Example("ping", 1, "", f'> {{"method": "ping"}}\n< {{"value": {told}}}\n')
    with pytest.raises(AssertionError, match="is not what is told"):
        await example.play(call, {})
