"""Replays a Director's recorded requests. The replies must have the recorded shape, and the effects on the machine must
be correct.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from agent_shim.demo.director import RpcRemoteError
from tests.support.corpus import CORPUS
from tests.support.effects import Effects
from tests.support.fleet import Fleet
from tests.support.replay import VOLUMES, RecordedRequest, Replay, steps

pytestmark = pytest.mark.root

DISKS = ("disk-eb459bf16855", "disk-eff69e932e70")

ALIKE = ("configuration_hash", "id", "index", "networks", "persistent_disk")
"""Keys by which two states of an instance are compared. If their values are equal, the states belong to the same
deployment.
"""

LEAVE_NOTHING = frozenset({"ping", "info", "get_state", "delete_arp_entries", "list_disk"})


@dataclass
class ReplayedMachines:
    """The machines in a chapter, which consists of one or more recordings.

    The machines are created and deleted as in the recordings.

    ``history`` contains the recorded steps from all chapters, in order.
    """

    fleet: Fleet
    history: list[RecordedRequest]
    chapter: list[RecordedRequest]
    replays: dict[str, Replay] = field(default_factory=dict)
    effects: dict[str, Effects] = field(default_factory=dict)

    async def play(self, number: int) -> None:
        step = self.chapter[number]
        agent_id = step.agent_id
        if agent_id not in self.replays:
            await self._add(agent_id)
        await self._catch_up(step)
        arguments, value = await self.replays[agent_id].play(step)
        if step.reply is not None:
            assert self.effects[agent_id].check(step.method, arguments, value) or step.method in LEAVE_NOTHING
        if not any(later.agent_id == agent_id for later in self.chapter[number + 1 :]):
            await self._deploy_again(agent_id)
            self.fleet.remove(agent_id)

    async def _add(self, agent_id: str) -> None:
        """Add a machine with the given agent ID, in the state that it had when the chapter began."""
        first = self.history.index(next(step for step in self.chapter if step.agent_id == agent_id))
        before = [step for step in self.history[:first] if step.agent_id == agent_id]
        recorded = before + [step for step in self.history[first:] if step.agent_id == agent_id]
        states = [step.reply["value"] for step in recorded if step.method == "get_state" and step.reply]
        networks = next((step.arguments[0] for step in recorded if step.method == "apply"), states[0])["networks"]
        volumes = {}
        if any(state["persistent_disk"] for state in states):
            volumes = {f"{VOLUMES}/{cid}": self.fleet.scratch / cid for cid in DISKS}
        for path in volumes.values():
            path.mkdir(exist_ok=True)
        machine = await self.fleet.add(agent_id, networks, volumes=volumes, vm={"name": states[0]["vm"]["name"]})
        (machine.root / "var/log/syslog").write_text("of the machine\n")
        self.effects[agent_id] = Effects(agent_id, machine, self.fleet.blobs(agent_id))
        mbus = {"cert": self.fleet.credentials(agent_id)}
        self.replays[agent_id] = Replay(self.fleet.director, self.fleet.blobs(agent_id), mbus)
        if before:
            await self._deploy(states[len([step for step in before if step.method == "get_state"]) - 1])

    async def _catch_up(self, step: RecordedRequest) -> None:
        """Deploy what the step's recorded state contains, if no replayed step has deployed it. This is necessary where
        the recording has gaps.
        """
        if step.method != "get_state" or step.reply is None or not step.reply["value"]["configuration_hash"]:
            return
        state = step.reply["value"]
        if any(self.replays[step.agent_id].final_spec.get(name) != state[name] for name in ALIKE):
            await self._deploy(state)

    async def _deploy(self, state: dict[str, Any]) -> None:
        """Bring the instance into a recorded state by replaying the earlier steps that led to it, even if they were
        recorded on another machine.
        """

        def first(method: str, fits: Callable[[list[Any]], bool] = bool) -> RecordedRequest:
            found = next(step for step in self.history if step.method == method and fits(step.arguments))
            return RecordedRequest(state["agent_id"], method, found.arguments, found.reply)

        apply = first("apply", lambda arguments: all(arguments[0].get(name) == state[name] for name in ALIKE))
        archive = apply.arguments[0]["rendered_templates_archive"]["blobstore_id"]
        disk = [first("add_persistent_disk"), first("mount_disk")] if state["persistent_disk"] else []
        upload = first("upload_blob", lambda arguments: arguments[0]["blob_id"] == archive)
        start = RecordedRequest(state["agent_id"], "start", [], {"value": "started"})
        for step in [*disk, upload, apply, start]:
            await self.replays[state["agent_id"]].play(step)

    async def _deploy_again(self, agent_id: str) -> None:
        """Apply the final spec again. The apply must neither change the values that the Director compares nor restart a
        process.
        """
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


CHAPTERS = (
    ("deploy",),
    ("logs", "logs-agent", "logs-filter", "logs-system", "ssh", "scp"),
    ("errand",),
    ("errand-colocated", "errand-fail"),
    ("stop", "start"),
    ("restart",),
    ("recreate-disk", "redeploy-noop"),
    ("redeploy-change",),
    ("resize-disk",),
    ("delete-deployment",),
)


def test_every_recording_belongs_to_a_replayed_chapter() -> None:
    names = [name for chapter in CHAPTERS for name in chapter]

    assert sorted(names) == sorted(path.stem for path in (CORPUS / "director").glob("*.jsonl"))


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter[0])
async def test_replayed_deployment_gets_the_same_replies_as_from_the_go_agent(
    fleet: Fleet, chapter: tuple[str, ...]
) -> None:
    history = list(steps(*sorted((CORPUS / "director").glob("*.jsonl"))))
    played = ReplayedMachines(fleet, history, [step for step in history if step.recording in chapter])
    (fleet.scratch / DISKS[0]).mkdir()
    (fleet.scratch / DISKS[0] / "precious").write_text("data")

    for number, step in enumerate(played.chapter):
        try:
            await played.play(number)
        except (AssertionError, RpcRemoteError) as exc:
            told = json.dumps(step.arguments)[:300]
            raise AssertionError(f"step {number}: {step.method} {told} of {step.agent_id}: {exc}") from exc

    migrated = any(step.method == "migrate_disk" for step in played.chapter)
    assert (fleet.scratch / DISKS[migrated] / "precious").read_text() == "data"
