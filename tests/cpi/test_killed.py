"""If the CPI is killed after any of its requests and is called again, the result is the same as without the kill.

A killed call does not clean up or send any more requests.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kubernetes_cpi.methods import LOCAL, METHODS
from tests.cpi.calls import DYNAMIC, ENV, STEMCELL, CpiCalls, Killed, killed_after
from tests.cpi.fake_api import FakeApiServer, FakeCluster, waiting
from tests.support.source import ROOT

MAX_REQUESTS = 60
SERVICES = [{"name": "zk", "ports": [{"port": 2181}]}]
VIP = {"type": "vip", "ip": "10.0.0.9", "cloud_properties": {"ports": [{"port": 80}]}}

Call = tuple[str, list[Any]]


@dataclass(frozen=True)
class KillCase:
    """A test case. ``prepare`` sets up a cluster and returns the method and the arguments of the call to kill."""

    name: str
    prepare: Callable[[CpiCalls], Call]

    def __str__(self) -> str:
        return self.name


def _create_vm(**properties: Any) -> Callable[[CpiCalls], Call]:
    def prepare(cpi: CpiCalls) -> Call:
        return "create_vm", ["agent-1", STEMCELL, properties, {**DYNAMIC, "public": VIP}, [], ENV]

    return prepare


def _create_vm_with_disk(cpi: CpiCalls) -> Call:
    disk = cpi("create_disk", 64, {}, None)
    return "create_vm", ["agent-1", STEMCELL, {}, DYNAMIC, [disk], ENV]


def _create_vm_that_fails(cpi: CpiCalls) -> Call:
    cpi.cluster.pod_status = lambda _: waiting("ErrImagePull", "not found")
    return _create_vm(persistent_disk={"size": 64}, services=SERVICES)(cpi)


def _create_vm_with_other_properties(cpi: CpiCalls) -> Call:
    cpi.create_vm(memory=64)
    return "create_vm", ["agent-1", STEMCELL, {"memory": 128}, DYNAMIC, [], ENV]


def _delete_vm(**properties: Any) -> Callable[[CpiCalls], Call]:
    def prepare(cpi: CpiCalls) -> Call:
        vm = cpi("create_vm", "agent-1", STEMCELL, properties, {**DYNAMIC, "public": VIP}, [], ENV)[0]
        disk = cpi("create_disk", 64, {}, None)
        cpi("attach_disk", vm, disk)
        return "delete_vm", [vm]

    return prepare


def _vm_and_disk(method: str, *, is_attached: bool, **properties: Any) -> Callable[[CpiCalls], Call]:
    def prepare(cpi: CpiCalls) -> Call:
        vm, disk = cpi.create_vm(**properties), cpi("create_disk", 64, {}, None)
        if is_attached:
            cpi("attach_disk", vm, disk)
        return method, [vm, disk]

    return prepare


def _attach_lingering(cpi: CpiCalls) -> Call:
    old, disk = cpi.create_vm("agent-0"), cpi("create_disk", 64, {}, None)
    cpi("attach_disk", old, disk)
    new = cpi.create_vm("agent-1")
    cpi("detach_disk", old, disk)
    return "attach_disk", [new, disk]


def _on_disk(method: str, *arguments: Any) -> Callable[[CpiCalls], Call]:
    def prepare(cpi: CpiCalls) -> Call:
        vm, disk = cpi.create_vm(), cpi("create_disk", 64, {}, None)
        cpi("attach_disk", vm, disk)
        if method == "delete_disk":
            cpi("detach_disk", vm, disk)
        return method, [disk, *arguments]

    return prepare


def _create_reserved_disk(cpi: CpiCalls) -> Call:
    vm = cpi.create_vm(persistent_disk={"size": 64})
    return "create_disk", [128, {}, vm]


def _delete_snapshot(cpi: CpiCalls) -> Call:
    disk = cpi("create_disk", 64, {}, None)
    return "delete_snapshot", [cpi("snapshot_disk", disk, {})]


LIVE = {"attach": "live", "tier": "privileged"}
CASES = [
    KillCase("create_vm", _create_vm(services=SERVICES, persistent_disk={"size": 64})),
    KillCase("create_vm with live attach", _create_vm(**LIVE)),
    KillCase("create_vm that chooses how to attach disks", _create_vm(attach="auto")),
    KillCase("create_vm that limits its space on the node", _create_vm(attach="live", tier="userns")),
    KillCase("create_vm with a disk", _create_vm_with_disk),
    KillCase("create_vm that fails", _create_vm_that_fails),
    KillCase("create_vm with other properties", _create_vm_with_other_properties),
    KillCase("delete_vm", _delete_vm(services=SERVICES, persistent_disk={"size": 64})),
    KillCase("delete_vm with a live disk", _delete_vm(**LIVE)),
    KillCase("has_vm", lambda cpi: ("has_vm", [cpi.create_vm()])),
    KillCase("current_vm_id", lambda _: ("current_vm_id", [])),
    KillCase("reboot_vm", lambda cpi: ("reboot_vm", [cpi.create_vm()])),
    KillCase("reboot_vm with live attach", lambda cpi: ("reboot_vm", [cpi.create_vm(**LIVE)])),
    KillCase("set_vm_metadata", lambda cpi: ("set_vm_metadata", [cpi.create_vm(), {"name": "a/1", "index": "0"}])),
    KillCase("create_disk", lambda cpi: ("create_disk", [64, {}, cpi.create_vm()])),
    KillCase("create_disk that returns a reserved disk", _create_reserved_disk),
    KillCase("delete_disk", _on_disk("delete_disk")),
    KillCase("has_disk", _on_disk("has_disk")),
    KillCase("attach_disk by recreation", _vm_and_disk("attach_disk", is_attached=False)),
    KillCase("attach_disk live", _vm_and_disk("attach_disk", is_attached=False, **LIVE)),
    KillCase("attach_disk for a disk that another pod still mounts", _attach_lingering),
    KillCase("detach_disk", _vm_and_disk("detach_disk", is_attached=True)),
    KillCase("detach_disk live", _vm_and_disk("detach_disk", is_attached=True, **LIVE)),
    KillCase("get_disks", lambda cpi: ("get_disks", _vm_and_disk("", is_attached=True)(cpi)[1][:1])),
    KillCase("set_disk_metadata", _on_disk("set_disk_metadata", {"deployment": "dep"})),
    KillCase("resize_disk", _on_disk("resize_disk", 128)),
    KillCase("update_disk", _on_disk("update_disk", 128, {"volume_attributes_class": "gold"})),
    KillCase("snapshot_disk", _on_disk("snapshot_disk", {"index": 0})),
    KillCase("delete_snapshot", _delete_snapshot),
]


def test_kill_cases_cover_every_cpi_method() -> None:
    assert {case.name.partition(" ")[0] for case in CASES} == METHODS.keys() - LOCAL


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cpi_killed_after_any_request_gives_the_same_result_when_called_again(case: KillCase, tmp_path: Path) -> None:
    wanted: Any = None
    for count in range(MAX_REQUESTS):
        server = FakeApiServer(FakeCluster())
        try:
            outcome, is_through = _outcome(case, server, tmp_path, count)
        finally:
            server.close()
        assert server.cluster.violations == [], f"killed after {count} requests"
        if count == 0:
            wanted = outcome
        assert outcome == wanted, f"killed after {count} requests"
        if is_through:
            return
    pytest.fail(f"{case} makes more than {MAX_REQUESTS} requests")


def _outcome(case: KillCase, server: FakeApiServer, directory: Path, count: int) -> tuple[Any, bool]:
    """Call the CPI, kill it after ``count`` requests (0: do not kill it), and make the same call again.

    Return two values. The first contains the final response and all objects. The second is True if the first call was
    never killed because it needed fewer than ``count`` requests.
    """
    cpi = CpiCalls(server, directory, timeouts={"retry": 2, "unmount": 2, "delete_vm": 2, "create_vm": 5, "resize": 2})
    method, arguments = case.prepare(cpi)
    server.cluster.settle()
    request = cpi.request(method, arguments, request_id="cpi-654321")
    is_through = True
    if count:
        with killed_after(count) as made:
            try:
                cpi.answer(request)
            except Killed:
                is_through = len(made) < count
    response = cpi.answer(request)
    server.cluster.settle()
    return ({key: response[key] for key in ("result", "error")}, server.cluster.snapshot()), count > 0 and is_through


def test_create_vm_killed_between_secret_and_pod_can_be_retried(
    server: FakeApiServer, cpi: CpiCalls, cluster: FakeCluster
) -> None:
    """Unlike ``killed_after``, this test sends SIGKILL to a real process."""
    request = cpi.request("create_vm", ["agent-1", STEMCELL, {}, DYNAMIC, [], ENV], request_id="cpi-654321")
    command = [sys.executable, "-m", "kubernetes_cpi", "--config", str(cpi.file)]
    process: list[subprocess.Popen[bytes]] = []
    server.fail("POST pods", cut="before", on=lambda: os.kill(process[0].pid, signal.SIGKILL))
    process.append(
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    )
    out, _ = process[0].communicate(request)

    assert (out, process[0].returncode) == (b"", -signal.SIGKILL)
    assert len(cluster.of("secrets")) == 1
    response, _ = cpi.run(request)
    assert list(cluster.of("pods")) == [response["result"][0]] == list(cluster.of("secrets"))
