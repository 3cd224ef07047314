"""Tests the ``doctor`` and ``leftovers`` operator commands."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from kubernetes_cpi import commands, doctor
from kubernetes_cpi.records import UNFINISHED
from tests.cpi import bosh_cli
from tests.cpi.calls import DIRECTOR, CpiCalls
from tests.cpi.fake_api import FakeApiServer, FakeCluster, Object, RefusalError
from tests.support.source import ROOT


def command(cpi: CpiCalls, *arguments: str, env: Mapping[str, str] | None = None) -> tuple[str, int]:
    """Run an operator command in a new process. Return its output and its exit code.

    The output is the standard output, or the standard error if the standard output is empty.
    """
    line = [sys.executable, "-m", "kubernetes_cpi", arguments[0], "--config", str(cpi.file), *arguments[1:]]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, env=env)
    return done.stdout or done.stderr, done.returncode


# --- doctor -----------------------------------------------------------------------------------------------------------


def test_cpi_doctor_checks_every_permission_in_the_role() -> None:
    role = next(yaml.safe_load_all((ROOT / "deploy/cpi/base/role.yaml").read_text()))
    groups = {
        resource + (f".{group}" if group else ""): " ".join(sorted(rule["verbs"]))
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }

    assert groups == doctor.PERMISSIONS


def test_cpi_doctor_reports_no_problem_in_a_suitable_cluster(
    cpi: CpiCalls, cluster: FakeCluster, server: FakeApiServer
) -> None:
    cluster.create(("nodes", "", "node-1"), {"metadata": {"name": "node-1"}})
    before = cluster.snapshot()

    out, code = command(cpi, "doctor")

    assert (code, cluster.snapshot()) == (0, before)
    assert [line for line in out.splitlines() if not line.startswith("ok ")] == []
    assert server.token not in out


def test_cpi_doctor_suggests_a_change_for_each_problem(
    cpi: CpiCalls, cluster: FakeCluster, server: FakeApiServer
) -> None:
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


def test_cpi_doctor_reports_nothing_else_if_the_token_is_rejected(cpi: CpiCalls, server: FakeApiServer) -> None:
    server.token = "another"

    out, code = command(cpi, "doctor")

    assert code == 1
    assert out.startswith("WRONG    cluster              cannot GET pods/doctor: 401")
    assert len(out.splitlines()) == 2


# --- leftovers --------------------------------------------------------------------------------------------------------


class DirectorCli:
    """Installs a stand-in for the bosh CLI in PATH. The stand-in reports what the Director's database contains.

    Each command runs the CLI about ten times, and a shell starts much faster than a Python interpreter. The stand-in is
    therefore a shell script that gets its answers from a thread of this process.
    """

    def __init__(self, directory: Path) -> None:
        self._asked, self._answered = directory / "asked", directory / "answered"
        self.script = f"""
            printf '%s\\0' "$PWD" "$BOSH_DEPLOYMENT" "$@" >{self._asked}
            {{ read code; cat; }} <{self._answered}
            exit "$code"
        """
        self._state: dict[str, Any] = {}
        self.bin = directory / "bin"
        self.bin.mkdir()
        self.replace_with(self.script)
        self.set_records()
        for pipe in (self._asked, self._answered):
            os.mkfifo(pipe)
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        while asked := self._asked.read_text():
            directory, deployment, *argv = asked.split("\0")[:-1]
            code, output = bosh_cli.answer(argv, self._state, Path(directory), deployment)
            self._answered.write_text(f"{code}\n{output}")

    def close(self) -> None:
        """Stop the thread. If a killed script has left the thread waiting, the thread keeps running until this process
        exits.
        """
        with contextlib.suppress(OSError):
            os.close(os.open(self._asked, os.O_WRONLY | os.O_NONBLOCK))

    def replace_with(self, script: str) -> None:
        """Replace the stand-in with another shell script."""
        (self.bin / "bosh").write_text(f"#!/bin/sh\n{script}\n")
        (self.bin / "bosh").chmod(0o755)

    def set_records(self, **state: Any) -> None:
        self._state = {"info": {"uuid": DIRECTOR}, "deployments": {}, **state}

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}"}


@pytest.fixture
def director(tmp_path: Path) -> Iterator[DirectorCli]:
    made = DirectorCli(tmp_path)
    yield made
    made.close()


def leftovers(cpi: CpiCalls, director: DirectorCli, *arguments: str) -> tuple[str, int]:
    """Run ``leftovers`` in this process and return its output and exit code, like ``command``."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, director.environment),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = commands.run(["leftovers", "--config", str(cpi.file), *arguments])
    return out.getvalue() or err.getvalue(), code


def test_leftovers_unknown_to_the_director_are_listed_and_deleted(
    cpi: CpiCalls, cluster: FakeCluster, director: DirectorCli
) -> None:
    known, lost = cpi.create_vm("agent-1"), cpi.create_vm("agent-2", attach="live", tier="privileged")
    disk, stray = (cpi("create_disk", 64, {}, None) for _ in range(2))
    cpi("attach_disk", known, disk)
    cpi("attach_disk", lost, stray)
    director.set_records(deployments={"db": {"instances": [[known, [disk]]], "vms": [{"cid": known}]}})
    before = cluster.snapshot()

    out, code = command(cpi, "leftovers", env=director.environment)
    assert (code, cluster.snapshot()) == (1, before)
    assert f"{lost}: pods/{lost}, pods/attach-" in out
    assert f"{stray}: persistentvolumeclaims/{stray}" in out
    assert known not in out

    out, code = command(cpi, "leftovers", "--delete", env=director.environment)
    assert code == 0
    assert f"{lost}: deleted" in out
    assert f"`kubectl -n bosh delete persistentvolumeclaim {stray}` deletes its data" in out
    assert list(cluster.of("pods")) == [known] == list(cluster.of("secrets"))
    assert set(cluster.of("persistentvolumeclaims")) == {f"data-{known}", disk, stray}


def test_leftovers_exclude_objects_in_the_directors_records(cpi: CpiCalls, director: DirectorCli) -> None:
    active, inactive, orphaned = (cpi.create_vm(f"agent-{n}") for n in range(3))
    attached, left_by_migration, dynamic, disk = (cpi("create_disk", 64, {}, None) for _ in range(4))
    cpi("attach_disk", active, left_by_migration)
    snapshot, of_orphaned_disk = cpi("snapshot_disk", attached, {}), cpi("snapshot_disk", disk, {})
    vms = [{"cid": active}, {"cid": inactive}]
    db = {"instances": [[active, [attached]], ["", []]], "vms": vms, "snapshots": [{"snapshot_cid": snapshot}]}
    records = {
        "deployments": {"db": db, "empty": {}},
        "orphaned_vms": [{"cid": orphaned}],
        "disks": [{"disk_cid": disk}],
        "dynamic_disks": [{"disk_cid": dynamic, "name": "d"}],
    }
    director.set_records(**records)
    assert leftovers(cpi, director) == ("", 0)

    director.set_records(**records | {"disks": []})
    out, _ = leftovers(cpi, director)
    assert sorted(line.partition(":")[0] for line in out.splitlines()) == sorted([disk, of_orphaned_disk])


@pytest.mark.parametrize(
    "refused",
    [
        "/info",
        "/deployments",
        "/deployments/db/vms",
        "/deployments/db/snapshots",
        "instances",
        "/disks",
        "/orphaned_vms",
        "/dynamic_disks",
        UNFINISHED,
    ],
)
def test_leftovers_are_kept_unless_the_director_answers_every_query(
    cpi: CpiCalls, cluster: FakeCluster, director: DirectorCli, refused: str
) -> None:
    cpi.create_vm()
    director.set_records(deployments={"db": {}}, failing={refused: 401})
    before = cluster.snapshot()

    out, code = leftovers(cpi, director, "--delete")

    assert (code, cluster.snapshot()) == (1, before)
    assert "401" in out
    director.set_records(deployments={"db": {}})
    assert "deleted" in leftovers(cpi, director, "--delete")[0]


@pytest.mark.parametrize(
    ("path", "script"),
    [
        ("/info", "exit 0"),
        ("/tasks", "echo '{}'"),
        ("/deployments", """echo '{"Tables": null, "Blocks": ["[]"], "Lines": null}'"""),
        ("/deployments/db/vms", """echo '{"Tables": null, "Blocks": ["[{}]"], "Lines": ["Succeeded"]}'"""),
        ("/orphaned_vms", """echo '{"Tables": null, "Blocks": null, "Lines": ["Succeeded"]}'"""),
        ("/disks", """echo '{"Tables": null, "Blocks": ["[]"], "Lines": ["Succeeded"]}'; exit 1"""),
        ("/dynamic_disks", """echo '{"Tables": null, "Blocks": ["[]"], "Lines": ["Succeeded"'"""),
    ],
)
def test_leftovers_are_kept_after_an_invalid_director_answer(
    cpi: CpiCalls, cluster: FakeCluster, director: DirectorCli, path: str, script: str
) -> None:
    cpi.create_vm()
    director.set_records(deployments={"db": {}})
    before = cluster.snapshot()
    director.replace_with(f'[ "${{2%%[?]*}}" != "{path}" ] || {{ {script}; exit 0; }}\n{director.script}')

    out, code = leftovers(cpi, director, "--delete")

    assert (code, cluster.snapshot()) == (1, before)
    assert out.startswith(f"cannot query the Director: `bosh curl {path}"), out


@pytest.mark.parametrize(
    "table",
    [
        "[]",
        "null",
        '[{"Content": "instances", "Header": {"instance": "Instance"}, "Rows": []}]',
        '[{"Content": "instances", "Header": {"vm_cid": "VM CID", "disk_cids": "Disk CIDs"}, "Rows": [{}]}]',
    ],
)
def test_leftovers_are_kept_if_the_instances_table_is_missing_or_incomplete(
    cpi: CpiCalls, cluster: FakeCluster, director: DirectorCli, table: str
) -> None:
    cpi.create_vm()
    director.set_records(deployments={"db": {}})
    before = cluster.snapshot()
    answer = f'{{"Tables": {table}, "Blocks": null, "Lines": ["Succeeded"]}}'
    director.replace_with(f"""[ "$1" != instances ] || {{ echo '{answer}'; exit; }}\n{director.script}""")

    out, code = leftovers(cpi, director, "--delete")

    assert (code, cluster.snapshot()) == (1, before)
    assert "`bosh instances --details --deployment=db` failed: it printed " in out


def test_leftovers_are_kept_while_a_director_task_runs(
    cpi: CpiCalls, cluster: FakeCluster, director: DirectorCli
) -> None:
    vm = cpi.create_vm()
    before = cluster.snapshot()
    task = {"id": 7, "state": "processing", "description": "create deployment"}

    director.set_records(tasks=[task])
    out, code = leftovers(cpi, director, "--delete")
    assert (code, cluster.snapshot()) == (1, before)
    assert "cannot delete anything while the Director works: task 7, create deployment, is not finished" in out

    director.set_records(tasks=[task | {"state": "done"}])
    assert f"{vm}: deleted" in leftovers(cpi, director, "--delete")[0]


def test_leftover_disks_are_kept_if_dynamic_disks_cannot_be_listed(cpi: CpiCalls, director: DirectorCli) -> None:
    disk = cpi("create_disk", 64, {}, None)
    director.set_records(failing={"/dynamic_disks": 404})

    out, code = leftovers(cpi, director, "--delete")

    assert code == 0
    assert f"{disk}: kept; it may be a dynamic disk" in out
    assert "kubectl" not in out


def test_leftovers_exclude_another_directors_objects(
    cpi: CpiCalls, cluster: FakeCluster, director: DirectorCli
) -> None:
    vm = cpi.create_vm()
    before = cluster.snapshot()
    director.set_records(info={"uuid": "another"})

    assert leftovers(cpi, director, "--delete") == ("", 0), vm
    assert cluster.snapshot() == before
