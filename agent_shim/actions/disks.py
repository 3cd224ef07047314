"""Actions for persistent and dynamic disks, with the same messages as in the Go agent (agent/action/*_disk.go)."""

from __future__ import annotations

from typing import Any

from agent_shim.actions.agent import Agent
from agent_shim.actions.dispatch import Mode, action
from agent_shim.core.errors import ShimError, errors_as


@action("list_disk", Mode.TASK, task_from_protocol=3)
async def list_disk(agent: Agent) -> list[str]:
    """Restore missing mounts, then list the disks that are mounted or linked. The Director expects the disk that is
    mounted at ``store`` to come first (bosh-director disk_manager.rb).
    """
    await _refresh(agent)
    return await agent.disks.list()


@action("mount_disk", Mode.TASK)
async def mount_disk(agent: Agent, cid: str) -> dict[str, str]:
    """Mount a disk at ``store`` or, if another disk is already mounted there, at the migration target."""
    await _refresh(agent)
    with errors_as("Reading persistent disk settings", ShimError, OSError):
        await agent.disks.find(cid)  # raises if the disk is unknown
    with errors_as("Mounting persistent disk", ShimError, OSError):
        await agent.disks.mount(cid)
    return {}


@action("unmount_disk", Mode.TASK)
async def unmount_disk(agent: Agent, cid: str) -> dict[str, str]:
    """Unmount a disk. It stays unmounted until the Director mounts it again."""
    with errors_as("Getting persistent disk settings", ShimError, OSError):
        await agent.disks.find(cid)  # raises if the disk is unknown
    with errors_as("Unmounting persistent disk", ShimError, OSError):
        return {"message": await agent.disks.unmount(cid)}


@action("migrate_disk", Mode.TASK)
async def migrate_disk(agent: Agent, old: Any = "", new: Any = "") -> dict[str, str]:
    """Copy the disk mounted at ``store`` to the disk mounted at the migration target, and then mount the latter at
    ``store``. The CLI passes no cids.

    The Go agent takes no arguments here, so an argument that is not a cid is ignored.
    """
    with errors_as("Migrating persistent disk", ShimError, OSError):
        await agent.disks.migrate(*(cid if isinstance(cid, str) else "" for cid in (old, new)))
    return {}


@action("add_persistent_disk", Mode.TASK)
async def add_persistent_disk(agent: Agent, cid: str, hint: Any) -> dict[str, str]:
    """Store the CPI's hint for a disk that it has attached."""
    await _refresh(agent)
    with errors_as("Saving persistent disk hints", ShimError, OSError):
        await agent.disks.add(cid, hint)
    return {}


@action("remove_persistent_disk", Mode.TASK)
async def remove_persistent_disk(agent: Agent, cid: str) -> dict[str, str]:
    """Delete the hint for a disk. If the disk is mounted, it stays mounted."""
    await _refresh(agent)
    with errors_as("Removing persistent disk hints", ShimError, OSError):
        await agent.disks.remove(cid)
    return {}


@action("add_dynamic_disk", Mode.TASK)
async def add_dynamic_disk(agent: Agent, cid: str, hint: Any) -> dict[str, str]:
    """Create a symbolic link, named after the disk's cid, through which jobs find the disk. The Director also sends
    this action for disks that already have a link.
    """
    await _refresh(agent)
    with errors_as("Setting up dynamic disk", ShimError, OSError):
        await agent.disks.add_dynamic(cid, hint)
    return {}


@action("remove_dynamic_disk", Mode.NOW)
async def remove_dynamic_disk(agent: Agent, cid: str) -> dict[str, str]:
    """Remove the link to a dynamic disk. As in the Go agent, the error messages are the same as those of
    ``add_dynamic_disk``.
    """
    with errors_as("Setting up dynamic disk", ShimError, OSError):
        await agent.disks.remove_dynamic(cid)
    return {}


async def _refresh(agent: Agent) -> None:
    """Reload the settings, because the CPI may just have added or removed a disk."""
    with errors_as("Refreshing the settings", ShimError, OSError):
        await agent.settings.refreshed()
