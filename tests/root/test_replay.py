"""A real Director's requests get replies of the same shape from our agent, and leave the same state."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_shim.demo.director import RpcRemoteError
from tests.support.corpus import CORPUS
from tests.support.fleet import Fleet
from tests.support.fleet import fleet as made
from tests.support.replay import Replay, Step, steps

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpus of recorded requests is not here"),
]

RECORDINGS = ("deploy", "errand", "stop", "start", "restart")
LATER = frozenset({"fetch_logs", "list_disk", "mount_disk", "add_persistent_disk", "remove_persistent_disk"})


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with made(tmp_path) as one:
        yield one


async def add(fleet: Fleet, recorded: list[Step]) -> Replay:
    """A machine with the agent that these steps were recorded of."""
    agent_id = recorded[0].agent_id
    applied = [step.arguments[0] for step in recorded if step.method == "apply"]
    states = [step.reply["value"] for step in recorded if step.method == "get_state" and step.reply]
    networks = applied[0]["networks"] if applied else {"default": {"type": "manual", "ip": "10.245.0.9"}}
    await fleet.add(agent_id, networks, vm={"name": states[0]["vm"]["name"] if states else "vm-1"})
    return Replay(fleet.director, fleet.blobs(agent_id), LATER, {"cert": fleet.credentials(agent_id)})


async def test_a_deployment_lives_as_it_did_with_the_go_agent(fleet: Fleet) -> None:
    """Deploy, errand, stop, start, restart of three instances and an errand VM, request by request."""
    recorded = [step for name in RECORDINGS for step in steps(CORPUS / "director" / f"{name}.jsonl")]
    replays = {
        agent_id: await add(fleet, [step for step in recorded if step.agent_id == agent_id])
        for agent_id in dict.fromkeys(step.agent_id for step in recorded)
    }

    for step in recorded:
        try:
            await replays[step.agent_id].play(step)
        except (AssertionError, RpcRemoteError) as exc:
            raise AssertionError(f"{step.method} {json.dumps(step.arguments)[:300]} of {step.agent_id}: {exc}") from exc

    await _deploy_again(fleet, replays)


async def _deploy_again(fleet: Fleet, replays: dict[str, Replay]) -> None:
    """The final spec a second time: nothing that the Director compares may differ, no process may be restarted."""
    for agent_id, replay in replays.items():
        if not replay.final_spec:
            continue
        before = await fleet.director.run(agent_id, "get_state")
        pidfiles = {path: path.read_text() for path in fleet.machines[agent_id].vcap.glob("data/sys/run/*/*.pid")}

        assert await fleet.director.run(agent_id, "prepare", replay.final_spec) == "prepared"
        assert await fleet.director.run(agent_id, "apply", replay.final_spec) == "applied"
        assert await fleet.director.run(agent_id, "start") == "started"

        while (after := await fleet.director.run(agent_id, "get_state"))["job_state"] != before["job_state"]:
            pass
        for name in ("networks", "job", "packages", "configuration_hash", "rendered_templates_archive"):
            assert after[name] == before[name]
        assert {path: path.read_text() for path in pidfiles} == pidfiles
