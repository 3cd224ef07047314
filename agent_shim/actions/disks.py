"""Persistent and dynamic disks: what the Director and the CLI ask, in the Go agent's words (agent/action/*_disk.go)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from agent_shim.actions.agent import Agent
from agent_shim.actions.dispatch import Mode, action
from agent_shim.core.errors import ActionError, ShimError


@action("list_disk", Mode.TASK, task_from_protocol=3)
async def list_disk(agent: Agent) -> list[str]:
    """The mounted disks; the Director takes the first for the one on the store (bosh-director disk_manager.rb)."""
    await _refresh(agent)
    return await agent.disks.list()


@action("mount_disk", Mode.TASK)
async def mount_disk(agent: Agent, cid: str) -> dict[str, str]:
    """Bring a disk to the store, or to the migration target while another is on the store."""
    await _refresh(agent)
    with _telling("Reading persistent disk settings"):
        await agent.disks.find(cid)
    with _telling("Mounting persistent disk"):
        await agent.disks.mount(cid)
    return {}


@action("unmount_disk", Mode.TASK)
async def unmount_disk(agent: Agent, cid: str) -> dict[str, str]:
    """Take a disk down; it stays down until the Director has it mounted again."""
    with _telling("Getting persistent disk settings"):
        await agent.disks.find(cid)
    with _telling("Unmounting persistent disk"):
        return {"message": await agent.disks.unmount(cid)}


@action("migrate_disk", Mode.TASK)
async def migrate_disk(agent: Agent, old: Any = "", new: Any = "") -> dict[str, str]:
    """Copy the disk on the store to the one on the migration target and swap them; the CLI names neither.

    The Go agent takes no arguments here: what is no cid counts as absent.
    """
    with _telling("Migrating persistent disk"):
        await agent.disks.migrate(*(cid if isinstance(cid, str) else "" for cid in (old, new)))
    return {}


@action("add_persistent_disk", Mode.TASK)
async def add_persistent_disk(agent: Agent, cid: str, hint: Any) -> dict[str, str]:
    """Keep what the CPI says of a disk that it has attached."""
    await _refresh(agent)
    with _telling("Saving persistent disk hints"):
        await agent.disks.add(cid, hint)
    return {}


@action("remove_persistent_disk", Mode.TASK)
async def remove_persistent_disk(agent: Agent, cid: str) -> dict[str, str]:
    """Forget that; a disk that is mounted stays mounted."""
    await _refresh(agent)
    with _telling("Removing persistent disk hints"):
        await agent.disks.remove(cid)
    return {}


@action("add_dynamic_disk", Mode.TASK)
async def add_dynamic_disk(agent: Agent, cid: str, hint: Any) -> dict[str, str]:
    """Link a disk that jobs find by its cid; the Director sends this again for one that is attached already."""
    await _refresh(agent)
    with _telling("Setting up dynamic disk"):
        await agent.disks.add_dynamic(cid, hint)
    return {}


@action("remove_dynamic_disk", Mode.NOW)
async def remove_dynamic_disk(agent: Agent, cid: str) -> dict[str, str]:
    """Remove that link; the text of an error is that of adding, as in the Go agent."""
    with _telling("Setting up dynamic disk"):
        await agent.disks.remove_dynamic(cid)
    return {}


async def _refresh(agent: Agent) -> None:
    with _telling("Refreshing the settings"):
        await agent.settings.refreshed()


@contextmanager
def _telling(what: str) -> Iterator[None]:
    """Errors inside say what was being done."""
    try:
        yield
    except (ShimError, OSError) as exc:
        raise ActionError(f"{what}: {exc}") from exc
