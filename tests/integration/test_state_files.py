"""If a file that the agent reads at startup is damaged or malicious, the agent either starts anyway or exits with a
one-line error message.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from agent_shim.core.errors import BootError, HostError
from agent_shim.core.paths import Paths
from agent_shim.services.state_backup import StateBackup, backup_files
from tests.support.instance import AGENT, RunningAgent

MAX_MB = 130
"""The highest allowed peak memory of the agent in MB, three times as much as an idle agent needs."""

GATES = ("bosh/agent_shim.json", "data/bosh/agent_shim.json", "bosh/agent_shim.lock")
"""Files that are tested one at a time. The agent reads them first, and might not get to any other file if one of them
is damaged.
"""
OTHERS = (
    *("bosh/settings.json", "bosh/update_settings.json", "bosh/former_mbus.json", "bosh/spec.json", "bosh/tasks.json"),
    *("bosh/persistent_disk_hints.json", "bosh/managed_disk_settings.json", "bosh/shut_down"),
    *("bosh/log/current", "bosh/log/lock", "bosh/etc/operating_system", "bosh/etc/stemcell_version"),
    *("monit/stopped", "monit/monit.user", "instance/dns/records.json", "instance/id", "instance/health.json"),
    *("data/bosh/supervisor.json", "etc/hosts"),
)
COPIES = tuple(f"data/bosh/{file.path.name}" for file in backup_files(Paths(Path("/"))))
"""Backup copies, which the agent reads on a new root file system. It exits at the first copy that is not a regular
file.
"""


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _flood(path: Path) -> None:
    path.touch()
    os.truncate(path, 200_000_000)


def _deep(path: Path) -> None:
    path.write_bytes(b'{"agent_id":' * 1000 + b"[" * 100_000)


def _wrong_types(path: Path) -> None:
    path.write_bytes(b'{"agent_id":[],"schema":"x","files":0,"services":[{}],"records":7,"version":{},"job":[1],"a":1}')


def _no_text(path: Path) -> None:
    path.write_bytes(b'{"\xff":"\xc3(", "agent_id":"\xff", "version": 1, "records": [["\xff","\xff"]]}')


KINDS: Mapping[str, Callable[[Path], None]] = {
    "a FIFO": _fifo,
    "a link to a device": _device,
    "200 MB": _flood,
    "deep JSON": _deep,
    "wrong types": _wrong_types,
    "no UTF-8": _no_text,
}


GROUPS: Mapping[str, tuple[str, ...]] = {
    **{gate: (gate,) for gate in GATES},
    "copies": COPIES,
    "others": OTHERS,
    "lease": ("data/bosh/lease.json",),
}
CASES = [
    pytest.param(
        names,
        kind,
        id=f"{group}: {kind}",
        # The daily tests apply every kind of damage to the files in OTHERS, and two kinds to each of the other groups.
        # They leave the lease alone, because the agent would wait for a damaged lease to expire. The slow tests do the
        # rest.
        marks=() if group == "others" or ((number - place) % 3 == 0 and group != "lease") else pytest.mark.slow,
    )
    for place, (group, names) in enumerate(GROUPS.items())
    for number, kind in enumerate(KINDS)
]


@pytest.mark.attack("root in a container damages files that the agent reads at boot")
@pytest.mark.parametrize(("names", "kind"), CASES)
async def test_hostile_state_files_do_not_block_the_start_or_fill_the_memory(
    instance: RunningAgent, names: tuple[str, ...], kind: str
) -> None:
    for name in names:
        path = instance.base / name
        path.parent.mkdir(parents=True, exist_ok=True)
        KINDS[kind](path)
    if names == COPIES:
        stamp = {"schema": 1, "agent_id": AGENT, "lineage": "former"}
        (instance.base / "data/bosh/agent_shim.json").write_text(json.dumps(stamp))

    try:
        await instance.start_agent()
    except HostError as exc:
        assert "it has exited: agent-shim: cannot " in str(exc)
    else:
        peak = int(re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{instance.pid}/status").read_text())[0]) / 1024
        assert peak < MAX_MB
        await instance.stop_agent()
    assert "Traceback" not in instance.log_text()


@pytest.mark.attack("root in a container damages files that the agent reads at boot")
@pytest.mark.parametrize("name", COPIES)
async def test_fifo_in_place_of_a_state_copy_fails_the_boot(tmp_path: Path, name: str) -> None:
    paths = Paths(tmp_path)
    paths.mirror.mkdir(parents=True)
    paths.bosh.mkdir()
    stamp = {"schema": 1, "agent_id": AGENT, "lineage": "former"}
    (paths.mirror / "agent_shim.json").write_text(json.dumps(stamp))
    os.mkfifo(tmp_path / name)

    with pytest.raises(BootError, match="cannot restore the state of this agent: .* it is not a regular file"):
        await StateBackup(paths).recover(AGENT)
