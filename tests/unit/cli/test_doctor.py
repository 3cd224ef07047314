"""Tests the findings of ``agent-shim doctor``, its table of limits, and its output."""

from __future__ import annotations

import errno
import json
import os
import re
from datetime import timedelta
from pathlib import Path
from typing import get_args

import pytest

from agent_shim.cli import ansi, doctor
from agent_shim.cli.doctor.finding import GOOD, LIMITED, ON_HOST, WRONG, Finding, Report, Runtime, table
from agent_shim.cli.doctor.limits import LIMITS, NEEDED, USEFUL
from agent_shim.core.paths import Paths
from agent_shim.core.settings import AgentConfig, Effective, UpdateSettings, parse
from agent_shim.demo import pki
from agent_shim.host import capabilities, cgroups, host_stats, mounts, user_namespace
from agent_shim.host.capabilities import NAMES, Privileges

FEW = frozenset({*NEEDED, *USEFUL})


def finding_of(topic: str, base: Path, settings: dict[str, object] | None = None, *, index: int = 0) -> Finding:
    """Run the doctor's probe for ``topic`` on a directory tree with ``settings``. Return the finding at ``index``."""
    document = json.dumps({"agent_id": "a", **(settings or {})}).encode()
    known = Effective(parse(document, origin="x"), UpdateSettings())
    place = doctor.runtime(known, Paths(base))
    view = doctor.ContainerView(Paths(base), base, AgentConfig(), known, {}, place)
    return list(doctor.PROBES[topic](view))[index]


@pytest.mark.parametrize(
    ("effective", "verdict", "word"),
    [
        (FEW - {"SETUID", "KILL"}, WRONG, "processes of vcap cannot be stopped"),
        (FEW - {"AUDIT_WRITE"}, LIMITED, "bosh ssh may not work"),
        (FEW, LIMITED, "no mounts: see mounts"),
        (NAMES, GOOD, ""),
    ],
)
def test_doctor_states_the_consequence_of_a_missing_capability(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, effective: frozenset[str], verdict: str, word: str
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(capabilities, "privileges", lambda: Privileges(effective=frozenset(effective)))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "192.0.2.1")

    finding = finding_of("capabilities", tmp_path)

    assert finding.verdict == verdict
    assert word in finding.follows
    if missing := [name for name in FEW if name not in effective]:
        listed = finding.change.removeprefix("securityContext.capabilities.add: ").strip("[]").split(", ")
        assert sorted(listed) == sorted(missing)


@pytest.mark.parametrize(
    ("mount", "verdict", "word"),
    [
        ("data rw", GOOD, "writable"),
        ("other rw", LIMITED, "root file system"),
        ("data rw,noexec", WRONG, "noexec"),
        (" rw", GOOD, "writable"),
    ],
)
def test_doctor_expects_the_data_directory_on_a_volume_without_noexec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mount: str, verdict: str, word: str
) -> None:
    place, options = mount.split(" ")
    (tmp_path / "data").mkdir()
    rows = f"1 0 8:0 / / rw - ext4 /dev/vda rw\n2 1 8:1 / {tmp_path / place} {options} - ext4 /dev/vdb rw\n"
    monkeypatch.setattr(mounts, "mounts", lambda: mounts.parse(rows.encode()))

    finding = finding_of("directories", tmp_path)

    assert (finding.topic, finding.verdict) == (str(tmp_path / "data"), verdict)
    assert word in finding.found


@pytest.mark.parametrize(
    ("days", "verdict"),
    [((-2, -1), WRONG), ((-1, 1), LIMITED), ((-1, 29), LIMITED), ((-1, 31), GOOD), ((1, 40), WRONG)],
)
@pytest.mark.parametrize("url", ["nats://192.0.2.1:4222", "https://0.0.0.0:6868"])
def test_doctor_reports_an_expiring_certificate(tmp_path: Path, days: tuple[int, int], verdict: str, url: str) -> None:
    begins, ends = (timedelta(days=day, hours=1).total_seconds() for day in days)
    pair = pki.Authority().client("a", valid=(begins, ends))
    cert = {"ca": "x", "certificate": pair.certificate, "private_key": ""}

    finding = finding_of("clock", tmp_path, {"mbus": url, "env": {"bosh": {"mbus": {"cert": cert}}}}, index=-1)

    assert "certificate" in finding.topic
    assert finding.verdict == verdict
    assert ("bus" in str(finding)) == (url.startswith("nats"))


@pytest.mark.parametrize("name", LIMITS)
def test_doctor_explains_every_limit_and_how_to_change_it_in_each_runtime(name: str) -> None:
    limit = LIMITS[name]

    assert limit.follows
    assert limit.verdict == GOOD or limit.pod
    for runtime in get_args(Runtime):
        said = limit.change(runtime)
        if runtime == "lxd":  # LXD does not support Docker's HostConfig keys
            assert not re.search(r"HostConfig|Ulimits|ShmSize|Memory: BYTES|ReadonlyRootfs|SecurityOpt|PidMode", said)
        if runtime != "pod" and limit.cpi:
            assert not re.search("securityContext|emptyDir|dnsPolicy|NetworkPolicy", said)
    # The Docker CPI sets privileges and bind mounts itself, so the advice must not name the keys for them.
    assert not re.search(r"\b(Privileged|CapAdd|Binds|User|Cmd|Entrypoint)\b", limit.cpi)
    assert not re.search("securityContext|emptyDir|dnsPolicy|NetworkPolicy", "" if limit.cpi else limit.pod)


@pytest.mark.parametrize(
    ("name", "pod", "cpi", "engine", "lxd"),
    [
        ("little shared memory", "medium: Memory", "ShmSize", "--shm-size", "raw.lxc"),
        ("few open files", "LimitNOFILE", "Ulimits", "--ulimit=nofile", "limits.kernel.nofile"),
        ("no memory limit", "resources.limits", "Memory", "--memory", "limits.memory"),
        ("no name server", "dnsPolicy", "cloud-config", "--dns", "cloud-config"),
        ("no low ports", "securityContext", "an engine that runs as root", "--cap-add=NET_BIND", "security.privileged"),
        ("address missing", "bosh recreate", "bosh recreate", "--ip", "list-leases"),
    ],
)
def test_doctor_advice_uses_the_terms_of_the_container_runtime(
    name: str, pod: str, cpi: str, engine: str, lxd: str
) -> None:
    said = {runtime: LIMITS[name].change(runtime) for runtime in get_args(Runtime)}

    assert pod in said["pod"]
    assert cpi in said["cpi"]
    assert engine in said["engine"]
    assert lxd in said["lxd"]
    assert said["warden"] == (ON_HOST if said["cpi"].startswith("cloud_properties") else said["cpi"])


@pytest.mark.parametrize(
    ("is_inside", "mount_error", "tier"),
    [
        (False, 0, "privileged"),
        (False, errno.EPERM, "root with few capabilities"),
        (True, 0, "unprivileged: root of a user namespace that may mount"),
        (True, errno.EPERM, "unprivileged: root of a user namespace"),
    ],
)
def test_doctor_privilege_level_depends_on_user_namespace_and_mount_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_inside: bool, mount_error: int, tier: str
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(user_namespace, "is_inside", lambda: is_inside)
    monkeypatch.setattr(doctor, "PROBES", {})
    monkeypatch.setattr(doctor, "error_of", lambda *_: mount_error)

    assert doctor.examine(Paths(tmp_path), None).tier == tier


@pytest.mark.parametrize(("place", "says"), [("/proc/meminfo", False), ("/proc/other", True)])
def test_doctor_does_not_mention_host_memory_under_lxcfs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, says: bool
) -> None:
    monkeypatch.setattr(cgroups, "find", cgroups.Cgroup)
    table = f"36 35 98:0 / {place} rw - fuse.lxcfs lxcfs rw\n".encode()
    monkeypatch.setattr(mounts, "mounts", lambda: mounts.parse(table))

    finding = finding_of("cgroups", tmp_path)

    assert finding.verdict == LIMITED
    assert ("the host's" in finding.follows) == says


@pytest.mark.parametrize(("place", "limit", "is_limited"), [("meminfo", "512 MiB", True), ("other", "none", False)])
def test_doctor_reports_a_memory_limit_that_lxcfs_shows_in_meminfo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, limit: str, is_limited: bool
) -> None:
    """lxcfs shows the limit as the machine's memory in ``/proc/meminfo``, so no cgroup seems to have a
    lower limit.
    """
    hierarchy = cgroups.Hierarchy(2, (tmp_path,))
    monkeypatch.setattr(cgroups, "find", lambda: cgroups.Cgroup(memory=hierarchy))
    monkeypatch.setattr(host_stats, "memory", lambda: host_stats.Memory(512 << 20, 0, 0, 0))
    table = f"36 35 98:0 / /proc/{place} rw - fuse.lxcfs lxcfs rw\n".encode()
    monkeypatch.setattr(mounts, "mounts", lambda: mounts.parse(table))

    finding = finding_of("cgroups", tmp_path, index=1)

    assert finding.verdict == (GOOD if is_limited else LIMITED)
    assert f"memory {limit}" in finding.found if is_limited else finding.found == limit


REPORT = Report(
    "privileged",
    [Finding("user", GOOD, "root"), Finding("mounts", LIMITED, "refused", "links " * 40, "privileged: true")],
)


def test_doctor_table_fits_the_terminal_and_wraps() -> None:
    text = table(REPORT)

    assert max(map(len, text.splitlines())) <= 120
    assert "\x1b" not in text
    assert "ok       user    root" in text
    assert text.endswith("1 ok, 1 limited, 0 wrong")


def test_doctor_table_fits_a_narrow_terminal() -> None:
    long = Finding("HTTPS certificate and its CA", WRONG, "found " * 30, "so " * 60, "change " * 40)

    text = table(Report("privileged", [long]), columns=80)

    assert max(map(len, text.splitlines())) <= 80
    assert text.count("found") == 30


@pytest.mark.attack("text from a job sends control sequences to an operator's terminal")
def test_doctor_table_escapes_control_characters() -> None:
    hostile = "\x1b]0;title\x07\x9b2J\r\nok       bus      can be reached\u202e\ud800\u2028end"

    text = table(Report("privileged", [Finding("bus", WRONG, hostile, hostile, hostile)]))

    assert [each for each in text if not each.isprintable() and each != "\n"] == []
    assert [line for line in text.splitlines() if line.startswith("ok")] == []
    assert text.count("\\u001b]0;title\\u0007\\u009b2J") == 3


def test_colours_do_not_change_the_doctor_table() -> None:
    assert re.sub(r"\x1b\[[0-9;]*m", "", table(REPORT, ansi.coloured)) == table(REPORT)


@pytest.mark.parametrize(
    ("root", "place", "settings", "runtime"),
    [
        ("/var/lib/kubelet/pods/0f2f6a53-5b8e-4f0e-8a53-37a3f1a3b1c2/etc-hosts", "/etc/hosts", True, "pod"),
        ("/pods/0f2f6a53-5b8e-4f0e-8a53-37a3f1a3b1c2/containers/bosh/1a2b", "/etc/hosts", False, "pod"),
        ("/containers/0f2f/hosts", "/etc/hosts", True, "cpi"),
        ("/warden_cpi/persistent_bind_mounts_dir/0f2f", "/warden-cpi-dev", True, "warden"),
        ("/volumes/disk-1", "/warden-cpi-dev/disk-1", True, "cpi"),
        ("/", "/dev/.lxd-mounts", True, "lxd"),
        ("/", "/dev/incus", False, "lxd"),
        ("/", "/etc/hosts", False, "engine"),
    ],
)
def test_doctor_infers_the_container_runtime_from_mounts_and_settings(
    monkeypatch: pytest.MonkeyPatch, root: str, place: str, settings: bool, runtime: str
) -> None:
    table = f"36 35 98:0 {root} {place} rw - ext4 /dev/vda rw\n".encode()
    monkeypatch.setattr(mounts, "mounts", lambda: mounts.parse(table))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    document = b'{"agent_id": "a", "mbus": "nats://192.0.2.1:4222"}'
    known = Effective(parse(document, origin="x"), UpdateSettings()) if settings else None

    assert doctor.runtime(known, Paths(Path("/var/vcap"))) == runtime
    if runtime == "cpi":  # an agent outside /var/vcap, such as the demo, has no CPI
        assert doctor.runtime(known, Paths(Path("/opt/vcap"))) == "engine"


@pytest.mark.parametrize("is_volume", [True, False])
def test_doctor_does_not_suggest_a_volume_that_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_volume: bool
) -> None:
    point = tmp_path / "store" if is_volume else Path("/")
    monkeypatch.setattr(mounts, "mounts", lambda: mounts.parse(f"1 0 8:0 / {point} rw - ext4 /dev/vda rw\n".encode()))
    monkeypatch.setattr(doctor, "error_of", lambda *_: errno.EPERM)

    finding = finding_of("mounts", tmp_path)

    assert finding.verdict == LIMITED
    assert ("--volume" not in finding.change) == is_volume
    assert ("reachable through a link" not in finding.follows) == is_volume


@pytest.mark.parametrize(
    ("total_mib", "free_mib", "verdict"),
    [(1024, 40, WRONG), (1024, 55, LIMITED), (1024, 200, GOOD), (10_240, 60, WRONG), (10_240, 600, LIMITED)],
)
def test_doctor_reports_a_disk_as_full_when_downloads_would_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total_mib: int, free_mib: int, verdict: str
) -> None:
    """On a small volume, downloads leave less space free than on a large one."""
    size = 1 << 20
    status = os.statvfs_result((size, size, total_mib, free_mib, free_mib, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: status)

    assert finding_of("disk space", tmp_path).verdict == verdict
