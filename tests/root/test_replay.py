"""A real Director's requests get replies of the same shape from our agent, and leave the same on its machine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agent_shim.demo.director import RpcRemoteError
from tests.support.corpus import CORPUS
from tests.support.effects import Effects
from tests.support.fleet import Fleet
from tests.support.fleet import fleet as made
from tests.support.replay import VOLUMES, Replay, Step, steps

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpus of recorded requests is not here"),
]

DISKS = ("disk-eb459bf16855", "disk-eff69e932e70")

ALIKE = ("configuration_hash", "id", "index", "networks", "persistent_disk")
"""What tells two states of an instance apart."""

LEAVE_NOTHING = frozenset({"ping", "info", "get_state", "delete_arp_entries", "list_disk"})


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with made(tmp_path) as one:
        yield one


@dataclass
class Played:
    """The machines of the recordings as they come and go; ``history`` is everything that is played, in its order."""

    fleet: Fleet
    history: list[Step]
    replays: dict[str, Replay] = field(default_factory=dict)
    effects: dict[str, Effects] = field(default_factory=dict)

    async def play(self, number: int) -> None:
        step = self.history[number]
        agent_id = step.agent_id
        if agent_id not in self.replays:
            await self._add(number)
        await self._catch_up(step)
        arguments, value = await self.replays[agent_id].play(step)
        if step.reply is not None:
            assert self.effects[agent_id].check(step.method, arguments, value) or step.method in LEAVE_NOTHING
        if not any(later.agent_id == agent_id for later in self.history[number + 1 :]):
            await self._deploy_again(agent_id)
            self.fleet.remove(agent_id)

    async def _add(self, number: int) -> None:
        """A machine with the agent that these steps were recorded of."""
        agent_id = self.history[number].agent_id
        recorded = [step for step in self.history[number:] if step.agent_id == agent_id]
        states = [step.reply["value"] for step in recorded if step.method == "get_state" and step.reply]
        networks = next((step.arguments[0] for step in recorded if step.method == "apply"), states[0])["networks"]
        volumes = {}
        if any(step.method == "mount_disk" for step in recorded):
            volumes = {f"{VOLUMES}/{cid}": self.fleet.scratch / cid for cid in DISKS}
        for path in volumes.values():
            path.mkdir(exist_ok=True)
        machine = await self.fleet.add(agent_id, networks, volumes=volumes, vm={"name": states[0]["vm"]["name"]})
        (machine.root / "var/log/syslog").write_text("of the machine\n")
        self.effects[agent_id] = Effects(agent_id, machine, self.fleet.blobs(agent_id))
        mbus = {"cert": self.fleet.credentials(agent_id)}
        self.replays[agent_id] = Replay(self.fleet.director, self.fleet.blobs(agent_id), mbus)

    async def _catch_up(self, step: Step) -> None:
        """Deploy what a state names that no step so far has deployed there: not all was recorded."""
        if step.method != "get_state" or step.reply is None or not step.reply["value"]["configuration_hash"]:
            return
        state, replay = step.reply["value"], self.replays[step.agent_id]
        if any(replay.final_spec.get(name) != state[name] for name in ALIKE):
            for each in self._deployment(state):
                await replay.play(each)

    def _deployment(self, state: dict[str, Any]) -> list[Step]:
        """The recorded steps that have led to the same state, on the same machine or another."""
        apply = next(
            step
            for step in self.history
            if step.method == "apply" and all(step.arguments[0].get(name) == state[name] for name in ALIKE)
        )
        archive = apply.arguments[0]["rendered_templates_archive"]["blobstore_id"]
        upload = next(
            step for step in self.history if step.method == "upload_blob" and step.arguments[0]["blob_id"] == archive
        )
        asked = [(upload.method, upload.arguments, upload.reply), (apply.method, apply.arguments, apply.reply)]
        asked.append(("start", [], {"value": "started"}))
        return [Step(state["agent_id"], *one) for one in asked]

    async def _deploy_again(self, agent_id: str) -> None:
        """The final spec a second time: nothing that the Director compares may differ, no process may be restarted."""
        director, spec = self.fleet.director, self.replays[agent_id].final_spec
        before = await director.run(agent_id, "get_state")
        if not spec or before["job_state"] != "running":
            return
        pidfiles = {path: path.read_text() for path in self.effects[agent_id].paths.run.glob("*/*.pid")}

        assert await director.run(agent_id, "prepare", spec) == "prepared"
        assert await director.run(agent_id, "apply", spec) == "applied"
        assert await director.run(agent_id, "start") == "started"

        while (after := await director.run(agent_id, "get_state"))["job_state"] != before["job_state"]:
            pass
        for name in ("networks", "job", "packages", "configuration_hash", "rendered_templates_archive"):
            assert after[name] == before[name]
        assert {path: path.read_text() for path in pidfiles} == pidfiles


async def test_a_deployment_lives_as_it_did_with_the_go_agent(fleet: Fleet) -> None:
    """Everything that was recorded, request by request: three instances and their errands, from deploy to delete."""
    recordings = sorted((CORPUS / "director").glob("*.jsonl"))
    history = list(steps(*recordings))
    played = Played(fleet, history)

    for number, step in enumerate(history):
        try:
            await played.play(number)
        except (AssertionError, RpcRemoteError) as exc:
            told = json.dumps(step.arguments)[:300]
            raise AssertionError(f"step {number}: {step.method} {told} of {step.agent_id}: {exc}") from exc

    data = (fleet.scratch / DISKS[1] / "keeper/log").read_text()
    assert data.count("pre-start ran") == 3, "on two machines, and after its migration from the first disk"
    assert set(played.replays) == {step.agent_id for step in history}
