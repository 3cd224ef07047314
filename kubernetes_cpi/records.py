"""Ask the bosh CLI which VMs, disks and snapshots a Director knows.

A command that deletes VMs relies on this data. Therefore, every answer is decoded into types and must be complete: the
exit code is 0, the last line is `Succeeded`, and no required member is missing. Otherwise the command stops.

The queries need an admin login, because only admins see every deployment. With a team's login, `GET /orphaned_vms`
fails.
"""

from __future__ import annotations

import shutil
import subprocess
import urllib.parse
from typing import Final, TypeVar

import msgspec

from kubernetes_cpi.errors import InputError

T = TypeVar("T")

UNFINISHED: Final = "/tasks?state=processing,cancelling,queued&verbose=2"
INSTANCE_COLUMNS: Final = frozenset({"vm_cid", "disk_cids"})
NOT_FOUND: Final = "non-successful status code '404'"


class Records(msgspec.Struct, frozen=True):
    """The cids that the Director knows, by kind."""

    vms: frozenset[str]
    disks: frozenset[str]
    orphaned_disks: frozenset[str]
    """The members of ``disks`` that are orphaned. The Director does not list their snapshots."""
    snapshots: frozenset[str]
    lists_dynamic_disks: bool
    """False if the Director does not support `GET /dynamic_disks`. In that case, any unknown disk may be a dynamic
    disk.
    """


class _Table(msgspec.Struct):
    Content: str
    Header: dict[str, str]
    Rows: list[dict[str, str]]


class _Answer(msgspec.Struct):
    """The output of the CLI with `--json`. The CLI writes null instead of an empty list."""

    Tables: list[_Table] | None
    Blocks: list[str] | None
    Lines: list[str] | None


class _Info(msgspec.Struct):
    uuid: str


class _Deployment(msgspec.Struct):
    name: str


class _VmRow(msgspec.Struct):
    cid: str


class _DiskRow(msgspec.Struct):
    disk_cid: str


class _Snapshot(msgspec.Struct):
    snapshot_cid: str


class _TaskRow(msgspec.Struct):
    id: int
    description: str


class _RefusedError(InputError):
    """A CLI command failed. ``output`` is its output."""

    def __init__(self, command: str, output: str) -> None:
        super().__init__(f"cannot query the Director: `{command}` failed: {output}")
        self.output = output


def director() -> str:
    """Return the UUID of the Director that the CLI's environment variables select.

    It is the same UUID that the Director passes to its CPI.
    """
    uuid = _get("/info", _Info).uuid
    if not uuid:
        raise InputError("cannot query the Director: `bosh curl /info` returned no UUID")
    return uuid


def check_idle() -> None:
    """Raise ``InputError`` while the Director has unfinished tasks. A task records a VM only after it has created the
    VM, so the records may be incomplete.
    """
    for task in _get(UNFINISHED, list[_TaskRow]):
        raise InputError(
            f"cannot delete anything while the Director works: task {task.id}, {task.description}, is not finished"
        )


def read() -> Records:
    """Query all records. Orphaned VMs are queried last, because a VM may move from its deployment to the orphaned VMs
    at any time.
    """
    vms: set[str] = set()
    disks: set[str] = set()
    snapshots: set[str] = set()
    for deployment in _get("/deployments", list[_Deployment]):
        path = f"/deployments/{urllib.parse.quote(deployment.name, safe='')}"
        # This includes the inactive VMs of an interrupted create-swap-delete update.
        vms |= {vm.cid for vm in _get(f"{path}/vms", list[_VmRow])}
        snapshots |= {one.snapshot_cid for one in _get(f"{path}/snapshots", list[_Snapshot])}
        for row in _instances(deployment.name):
            vms |= {row["vm_cid"]} if row["vm_cid"] else set()
            disks |= set(row["disk_cids"].split())
    orphaned = frozenset(disk.disk_cid for disk in _get("/disks", list[_DiskRow]))
    vms |= {vm.cid for vm in _get("/orphaned_vms", list[_VmRow])}
    try:
        dynamic = _get("/dynamic_disks", list[_DiskRow])
    except _RefusedError as exc:
        if NOT_FOUND not in exc.output:
            raise
        dynamic = None  # This Director cannot list dynamic disks, so any unknown disk may be one.
    disks |= orphaned | {disk.disk_cid for disk in dynamic or ()}
    return Records(frozenset(vms), frozenset(disks), orphaned, frozenset(snapshots), dynamic is not None)


def _instances(deployment: str) -> list[dict[str, str]]:
    """Return a deployment's instance table. Each row contains the cids of a VM and its disks."""
    command = ["instances", "--details", f"--deployment={deployment}"]
    tables = _ask(command).Tables or []
    if len(tables) != 1 or tables[0].Content != "instances" or not tables[0].Header.keys() >= INSTANCE_COLUMNS:
        raise _RefusedError(_shown(command), "it printed no table of instances with VM CID and Disk CIDs")
    for row in tables[0].Rows:
        if not row.keys() >= INSTANCE_COLUMNS:
            raise _RefusedError(_shown(command), f"it printed a row without VM CID or Disk CIDs: {row}")
    return tables[0].Rows


def _get(path: str, kind: type[T]) -> T:
    """Return the Director's response to a GET request."""
    command = ["curl", path]
    blocks = _ask(command).Blocks or []
    try:
        return msgspec.json.decode("".join(blocks), type=kind)
    except msgspec.DecodeError as exc:
        raise _RefusedError(_shown(command), f"the response is not of the expected form: {exc}") from None


def _ask(arguments: list[str]) -> _Answer:
    """Run the bosh CLI and return its output. Raises ``_RefusedError`` if it fails or the output is not as expected."""
    program = shutil.which("bosh")
    if program is None:
        raise InputError("cannot query the Director: the bosh CLI is not installed")
    command = [program, *arguments, "--json", "--non-interactive"]
    done = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True)
    try:
        answer = msgspec.json.decode(done.stdout, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError):
        output = done.stderr.decode(errors="replace").strip()
        raise _RefusedError(
            _shown(arguments), output or f"it ended with {done.returncode} and printed no JSON"
        ) from None
    lines = answer.Lines or []
    if done.returncode != 0 or lines[-1:] != ["Succeeded"]:
        output = "; ".join(line.strip() for line in lines if not line.startswith("Using environment "))
        raise _RefusedError(_shown(arguments), output or f"it ended with {done.returncode}")
    return answer


def _shown(arguments: list[str]) -> str:
    return " ".join(["bosh", *arguments])
