"""Replays a Director's disk requests, recorded with the Go agent, for a recreated VM and for a resize. This
agent must give the same replies.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent_shim.actions import disks  # noqa: F401 - importing registers the actions
from agent_shim.actions.dispatch import ACTIONS
from agent_shim.host import mounts
from tests.support.corpus import CORPUS
from tests.support.replay import RecordedRequest, steps
from tests.support.volumes import Asked, InstanceWithVolumes, alone, fill, fingerprint, mount_ext4

pytestmark = pytest.mark.root

FIRST = "disk-eb459bf16855"
SECOND = "disk-eff69e932e70"


def disk_steps() -> list[RecordedRequest]:
    recorded = [step for name in ("recreate-disk", "resize-disk") for step in steps(CORPUS / f"director/{name}.jsonl")]
    return [step for step in recorded if step.method.endswith("_disk")]


def attach(point: Path) -> None:
    if not mounts.is_mount_point(point):
        mount_ext4(point, point.with_suffix(".image"), size=32 << 20)


async def ask(instance: InstanceWithVolumes, step: RecordedRequest) -> Any:
    """Run a recorded request's action with the recorded arguments. Disk hints are replaced with this test's volumes."""
    volumes = instance.scratch / "volumes of others"
    arguments = json.loads(json.dumps(step.arguments).replace('"/dev/', f'"{volumes}/'))
    action = ACTIONS[step.method]
    return await action.run(agent=Asked(instance), **action.bind(arguments))


@alone
async def test_recorded_disk_requests_get_the_go_agents_answers(tmp_path: Path) -> None:
    recorded = disk_steps()
    machines = {agent_id: number for number, agent_id in enumerate(dict.fromkeys(step.agent_id for step in recorded))}
    assert len(machines) == 2
    instance = InstanceWithVolumes(tmp_path, bind=True)
    instance.attach(FIRST, attach)
    instance.attach(SECOND, attach)
    instance.persistent.clear()
    first = {"path": str(instance.volume(FIRST))}
    await instance.disks.add(FIRST, first)
    await instance.disks.mount(FIRST)
    fill(instance.paths.store / "data", as_root=True)
    wanted = fingerprint(instance.paths.store)
    at = 0

    for step in recorded:
        if machines[step.agent_id] != at:
            at = machines[step.agent_id]
            instance.remake_container()
        value = await ask(instance, step)

        assert step.reply is not None
        expected = step.reply["value"]
        if step.method == "unmount_disk":
            assert value["message"].startswith(expected["message"].partition(":")[0])
        else:
            assert value == expected, step
        if step.method == "list_disk":
            assert fingerprint(instance.paths.store) == wanted
    assert await instance.disks.list() == [SECOND]
