"""Each method is killed after each of its requests and called again. The result must be the same as without the kill.

A killed call makes no cleanup and no further requests.
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
from tests.cpi.calls import DYNAMIC, ENV, STEMCELL, Cpi, Killed, killed_after
from tests.cpi.fake_api import Cluster, Server, waiting
from tests.support.source import ROOT

MAX_REQUESTS = 60
SERVICES = [{"name": "zk", "ports": [{"port": 2181}]}]
VIP = {"type": "vip", "ip": "10.0.0.9", "cloud_properties": {"ports": [{"port": 80}]}}

Call = tuple[str, list[Any]]


@dataclass(frozen=True)
class Case:
    """A test case. ``prepare`` sets up a cluster and returns the method and arguments of the call to be killed."""

    name: str
    prepare: Callable[[Cpi], Call]

    def __str__(self) -> str:
        return self.name


def _create_vm(**properties: Any) -> Callable[[Cpi], Call]:
    def prepare(cpi: Cpi) -> Call:
        return "create_vm", ["agent-1", STEMCELL, properties, {**DYNAMIC, "public": VIP}, [], ENV]

    return prepare


def _create_vm_with_disk(cpi: Cpi) -> Call:
    disk = cpi("create_disk", 64, {}, None)
    return "create_vm", ["agent-1", STEMCELL, {}, DYNAMIC, [disk], ENV]


def _create_vm_that_fails(cpi: Cpi) -> Call:
    cpi.cluster.pod_status = lambda _: waiting("ErrImagePull", "not found")
    return _create_vm(persistent_disk={"size": 64}, services=SERVICES)(cpi)


def _create_vm_with_other_properties(cpi: Cpi) -> Call:
    cpi.create_vm(memory=64)
    return "create_vm", ["agent-1", STEMCELL, {"memory": 128}, DYNAMIC, [], ENV]


def _delete_vm(**properties: Any) -> Callable[[Cpi], Call]:
    def prepare(cpi: Cpi) -> Call:
        vm = cpi("create_vm", "agent-1", STEMCELL, properties, {**DYNAMIC, "public": VIP}, [], ENV)[0]
        disk = cpi("create_disk", 64, {}, None)
        cpi("attach_disk", vm, disk)
        return "delete_vm", [vm]

    return prepare


def _vm_and_disk(method: str, *, is_attached: bool, **properties: Any) -> Callable[[Cpi], Call]:
    def prepare(cpi: Cpi) -> Call:
        vm, disk = cpi.create_vm(**properties), cpi("create_disk", 64, {}, None)
        if is_attached:
            cpi("attach_disk", vm, disk)
        return method, [vm, disk]

    return prepare


def _attach_lingering(cpi: Cpi) -> Call:
    old, disk = cpi.create_vm("agent-0"), cpi("create_disk", 64, {}, None)
    cpi("attach_disk", old, disk)
    new = cpi.create_vm("agent-1")
    cpi("detach_disk", old, disk)
    return "attach_disk", [new, disk]


def _on_disk(method: str, *arguments: Any) -> Callable[[Cpi], Call]:
    def prepare(cpi: Cpi) -> Call:
        vm, disk = cpi.create_vm(), cpi("create_disk", 64, {}, None)
        cpi("attach_disk", vm, disk)
        if method == "delete_disk":
            cpi("detach_disk", vm, disk)
        return method, [disk, *arguments]

    return prepare


def _create_reserved_disk(cpi: Cpi) -> Call:
    vm = cpi.create_vm(persistent_disk={"size": 64})
    return "create_disk", [128, {}, vm]


def _delete_snapshot(cpi: Cpi) -> Call:
    disk = cpi("create_disk", 64, {}, None)
    return "delete_snapshot", [cpi("snapshot_disk", disk, {})]


LIVE = {"attach": "live", "tier": "privileged"}
CASES = [
    Case("create_vm", _create_vm(services=SERVICES, persistent_disk={"size": 64})),
    Case("create_vm that takes live disks", _create_vm(**LIVE)),
    Case("create_vm that asks for the way of disks", _create_vm(attach="auto")),
    Case("create_vm that bounds the room on the node", _create_vm(attach="live", tier="userns")),
    Case("create_vm with a disk", _create_vm_with_disk),
    Case("create_vm that fails", _create_vm_that_fails),
    Case("create_vm with other properties", _create_vm_with_other_properties),
    Case("delete_vm", _delete_vm(services=SERVICES, persistent_disk={"size": 64})),
    Case("delete_vm with a live disk", _delete_vm(**LIVE)),
    Case("has_vm", lambda cpi: ("has_vm", [cpi.create_vm()])),
    Case("current_vm_id", lambda _: ("current_vm_id", [])),
    Case("reboot_vm", lambda cpi: ("reboot_vm", [cpi.create_vm()])),
    Case("reboot_vm that takes live disks", lambda cpi: ("reboot_vm", [cpi.create_vm(**LIVE)])),
    Case("set_vm_metadata", lambda cpi: ("set_vm_metadata", [cpi.create_vm(), {"name": "a/1", "index": "0"}])),
    Case("create_disk", lambda cpi: ("create_disk", [64, {}, cpi.create_vm()])),
    Case("create_disk that was reserved", _create_reserved_disk),
    Case("delete_disk", _on_disk("delete_disk")),
    Case("has_disk", _on_disk("has_disk")),
    Case("attach_disk by recreation", _vm_and_disk("attach_disk", is_attached=False)),
    Case("attach_disk live", _vm_and_disk("attach_disk", is_attached=False, **LIVE)),
    Case("attach_disk that lingers elsewhere", _attach_lingering),
    Case("detach_disk", _vm_and_disk("detach_disk", is_attached=True)),
    Case("detach_disk live", _vm_and_disk("detach_disk", is_attached=True, **LIVE)),
    Case("get_disks", lambda cpi: ("get_disks", _vm_and_disk("", is_attached=True)(cpi)[1][:1])),
    Case("set_disk_metadata", _on_disk("set_disk_metadata", {"deployment": "dep"})),
    Case("resize_disk", _on_disk("resize_disk", 128)),
    Case("update_disk", _on_disk("update_disk", 128, {"volume_attributes_class": "gold"})),
    Case("snapshot_disk", _on_disk("snapshot_disk", {"index": 0})),
    Case("delete_snapshot", _delete_snapshot),
]


def test_kill_test_covers_every_cpi_method() -> None:
    assert {case.name.partition(" ")[0] for case in CASES} == METHODS.keys() - LOCAL


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cpi_killed_after_any_request_succeeds_when_called_again(case: Case, tmp_path: Path) -> None:
    wanted: Any = None
    for count in range(MAX_REQUESTS):
        server = Server(Cluster())
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


def _outcome(case: Case, server: Server, directory: Path, count: int) -> tuple[Any, bool]:
    """Make a call, kill it after ``count`` requests (0 means never), and repeat it.

    Return the final response and all objects, and whether the call had completed before the kill.
    """
    cpi = Cpi(server, directory, timeouts={"retry": 2, "unmount": 2, "delete_vm": 2, "create_vm": 5, "resize": 2})
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


def test_create_vm_killed_between_secret_and_pod_can_be_repeated(server: Server, cpi: Cpi, cluster: Cluster) -> None:
    """This test uses a real process and a real signal."""
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
