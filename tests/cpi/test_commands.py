"""The commands for operators, as processes: a table of what the cluster allows, and what the Director does not know."""

from __future__ import annotations

import json
import subprocess
import sys

import yaml

from kubernetes_cpi import doctor
from tests.cpi.calls import DIRECTOR, Cpi
from tests.cpi.fake_api import Cluster, Object, RefusalError, Server
from tests.structure.source import ROOT


def command(cpi: Cpi, *arguments: str, given: str = "") -> tuple[str, int]:
    """Output and exit code. Standard error is no part of the output."""
    line = [sys.executable, "-m", "kubernetes_cpi", arguments[0], "--config", str(cpi.file), *arguments[1:]]
    done = subprocess.run(line, input=given, capture_output=True, text=True, cwd=ROOT)
    return done.stdout or done.stderr, done.returncode


# --- doctor ---------------------------------------------------------------------------------------------------------


def test_doctor_asks_for_the_permissions_of_the_role() -> None:
    role = next(yaml.safe_load_all((ROOT / "deploy/cpi/base/role.yaml").read_text()))
    groups = {
        resource + (f".{group}" if group else ""): " ".join(sorted(rule["verbs"]))
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }

    assert groups == doctor.PERMISSIONS


def test_good_cluster_needs_no_change(cpi: Cpi, cluster: Cluster, server: Server) -> None:
    cluster.create(("nodes", "", "node-1"), {"metadata": {"name": "node-1"}})
    before = cluster.snapshot()

    out, code = command(cpi, "doctor")

    assert (code, cluster.snapshot()) == (0, before)
    assert [line for line in out.splitlines() if not line.startswith("ok ")] == []
    assert server.token not in out


def test_each_obstacle_has_its_change(cpi: Cpi, cluster: Cluster, server: Server) -> None:
    def refuse(plural: str, body: Object) -> None:
        if plural == "pods" and ("hostPath" in str(body["spec"]) or "'privileged': True" in str(body["spec"])):
            raise RefusalError(403, "Forbidden", 'violates PodSecurity "baseline:latest"')

    cluster.admission.append(refuse)
    cluster.denied = {"list events", "get pods/log"}
    cluster.forbidden.add("nodes")
    cpi.write(server.config(disks={"attach": "live", "storage_class": "fast"}) | {"agent": {}})

    out, code = command(cpi, "doctor")

    assert code == 1
    for line in (
        "WRONG    account              may not list events, get pods/log",
        "limited  account              may list Secrets",
        "WRONG    agent.mbus           cannot create the VM: `agent.mbus` of the CPI is empty",
        "ok       tier base            admitted",
        "limited  tier privileged      cannot POST pods/",
        "WRONG    disks.attach         live; no live disks",
        "WRONG    disks.storage_class  no StorageClass is named 'fast'",
        "limited  nodes                delete_vm cannot distinguish",
        "change: kubectl apply -k deploy/cpi/LEVEL",
    ):
        assert line in out

    cpi.write(server.config(disks={"attach": "recreate"}))
    assert "ok       disks.attach         recreate; no live disks" in command(cpi, "doctor")[0]


def test_cluster_that_refuses_the_token_is_the_only_finding(cpi: Cpi, server: Server) -> None:
    server.token = "another"

    out, code = command(cpi, "doctor")

    assert code == 1
    assert out.startswith("WRONG    cluster              cannot GET pods/doctor: 401")
    assert len(out.splitlines()) == 2


# --- leftovers ------------------------------------------------------------------------------------------------------


def test_objects_that_the_director_does_not_know_are_listed_and_deleted(cpi: Cpi, cluster: Cluster) -> None:
    known, lost = cpi.create_vm("agent-1"), cpi.create_vm("agent-2", attach="live", tier="privileged")
    disk, stray = (cpi("create_disk", 64, {}, None) for _ in range(2))
    cpi("attach_disk", known, disk)
    cpi("attach_disk", lost, stray)
    text = json.dumps({"Tables": [{"Rows": [{"vm_cid": known, "disk_cids": disk}]}]})
    before = cluster.snapshot()

    out, code = command(cpi, "leftovers", "--director", DIRECTOR, given=text)
    assert (code, cluster.snapshot()) == (1, before)
    assert f"{lost}: pods/{lost}, pods/attach-" in out
    assert f"{stray}: persistentvolumeclaims/{stray}" in out
    assert known not in out

    out, code = command(cpi, "leftovers", "--director", DIRECTOR, "--delete", given=text)
    assert code == 0
    assert f"{lost}: deleted" in out
    assert f"{stray}: kept; `kubectl delete persistentvolumeclaims/{stray}` deletes its data" in out
    assert list(cluster.of("pods")) == [known] == list(cluster.of("secrets"))
    assert set(cluster.of("persistentvolumeclaims")) == {f"data-{known}", disk, stray}


def test_nothing_is_left_over_without_a_word_of_the_director(cpi: Cpi, cluster: Cluster) -> None:
    """An empty input is a command that failed, not a Director without VMs."""
    cpi.create_vm()
    before = cluster.snapshot()

    out, code = command(cpi, "leftovers", "--director", DIRECTOR, "--delete", given="{}")

    assert (code, cluster.snapshot()) == (1, before)
    assert "names no VM or disk" in out


def test_objects_of_another_director_are_no_leftovers(cpi: Cpi, cluster: Cluster) -> None:
    vm = cpi.create_vm()
    before = cluster.snapshot()

    out, code = command(cpi, "leftovers", "--director", "another", "--delete", given=f"vm-bosh-{'0' * 16}")

    assert (out, code, cluster.snapshot()) == ("", 0, before), vm
