"""Verdicts of the doctor on facts, and their presentation."""

from __future__ import annotations

import ast
import errno
import re
from collections.abc import Mapping
from typing import get_args

import pytest

from agent_shim.cli import ansi, doctor
from agent_shim.cli.doctor import verdicts
from agent_shim.cli.doctor.finding import (
    GOOD,
    LIMITED,
    ON_HOST,
    WRONG,
    Finding,
    Report,
    Runtime,
    table,
)
from agent_shim.core.settings import Effective, UpdateSettings, parse
from agent_shim.host import mounts
from agent_shim.host.capabilities import NAMES, Privileges
from tests.structure.source import ROOT

FEW = frozenset({*verdicts.NEEDED, *verdicts.USEFUL})


@pytest.mark.parametrize(
    ("is_root", "mounts", "tier"),
    [(True, True, "privileged"), (True, False, "root with few capabilities"), (False, False, "restricted: no root")],
)
def test_the_tier_follows_from_root_and_mounts(is_root: bool, mounts: bool, tier: str) -> None:
    assert verdicts.tier(is_root=is_root, mounts=mounts) == tier


def test_a_missing_capability_that_jobs_need_is_wrong_and_named_as_the_manifest_wants_it() -> None:
    finding = verdicts.capabilities(Privileges(effective=FEW - {"SETUID", "KILL"}), is_root=True)

    assert finding.verdict == WRONG
    assert finding.change == "securityContext.capabilities.add: [SETUID, KILL]"
    assert "processes of vcap cannot be stopped" in finding.follows


def test_a_missing_capability_for_ssh_alone_is_a_limit() -> None:
    finding = verdicts.capabilities(Privileges(effective=FEW - {"AUDIT_WRITE"}), is_root=True)

    assert (finding.verdict, finding.change) == (LIMITED, "securityContext.capabilities.add: [AUDIT_WRITE]")


def test_the_capabilities_of_the_manifests_are_enough_and_what_they_lack_is_told() -> None:
    few = verdicts.capabilities(Privileges(effective=FEW), is_root=True)
    all_of_them = verdicts.capabilities(Privileges(effective=frozenset(NAMES)), is_root=True)

    assert few.verdict == LIMITED
    assert "SYS_ADMIN" in few.found
    assert all_of_them.verdict == GOOD


@pytest.mark.parametrize(
    ("refused", "options", "is_own_volume", "verdict", "word"),
    [
        (0, (), True, GOOD, "writable"),
        (0, (), False, LIMITED, "root file system"),
        (0, ("noexec",), True, WRONG, "noexec"),
        (errno.EROFS, (), True, WRONG, "read-only"),
        (errno.EACCES, (), True, WRONG, "Permission denied"),
    ],
)
def test_a_volume_must_be_writable_and_execute(
    refused: int, options: tuple[str, ...], is_own_volume: bool, verdict: str, word: str
) -> None:
    finding = verdicts.directory("/var/vcap/data", refused, options, is_own_volume=is_own_volume, needs="packages")

    assert finding.verdict == verdict
    assert word in finding.found


@pytest.mark.parametrize(
    ("reached", "verdict"),
    [
        ({"10.0.0.6:4222": ""}, GOOD),
        ({"10.0.0.6:4222": "Connection refused", "10.0.0.7:4222": ""}, GOOD),
        ({"10.0.0.6:4222": "Connection refused"}, WRONG),
    ],
)
def test_one_address_of_the_bus_that_answers_is_enough(reached: Mapping[str, str], verdict: str) -> None:
    finding = verdicts.bus(reached)

    assert finding is not None
    assert finding.verdict == verdict


def test_without_settings_nothing_is_said_of_the_bus() -> None:
    assert verdicts.bus({}) is None


@pytest.mark.parametrize(("days", "verdict"), [(-1, WRONG), (1, LIMITED), (29, LIMITED), (31, GOOD)])
def test_a_certificate_near_its_end_is_told_in_time(days: float, verdict: str) -> None:
    assert verdicts.certificate(days * 86400, -1).verdict == verdict
    door = verdicts.certificate(days * 86400, -1, is_door=True)
    assert door.verdict == verdict
    assert "bus" not in str(door)


def test_every_limit_says_what_follows_and_what_to_change() -> None:
    """Facts of a container that allows nothing at all."""
    refused = errno.EPERM
    findings = [
        verdicts.user(1000, is_mapped=True, change_user_error=0, change_owner_error=0),
        verdicts.user(0, is_mapped=False, change_user_error=refused, change_owner_error=refused),
        verdicts.capabilities(Privileges(), is_root=False),
        verdicts.capabilities(Privileges(), is_root=True),
        verdicts.privileges(Privileges(no_new_privs=True, seccomp=True)),
        verdicts.mounts(refused, refused),
        verdicts.isolation(3, 0, {"mounts": refused}),
        *verdicts.cgroups(0, delegates=False, memory=None, cpus=None),
        *verdicts.cgroups(2, delegates=False, memory=None, cpus=None)[1:],
        verdicts.open_files(1024, -1),
        verdicts.directory("/var/vcap/data", refused, (), is_own_volume=False, needs="packages"),
        verdicts.plain_directory("/etc", refused, "no users"),
        verdicts.space("/", 0, 1 << 40, 0, 0),
        verdicts.shared_memory(64 << 20),
        verdicts.users(vcap=None, programs=(), is_root=True),
        verdicts.users(vcap=1000, programs=("sshd",), is_root=True),
        verdicts.port("metrics", 9190, errno.EADDRINUSE, is_ours=False),
        verdicts.low_ports(refused),
        verdicts.clock(year=1970, drift=0, is_synchronized=None),
        verdicts.clock(year=2026, drift=0, is_synchronized=False),
        verdicts.own_names({"localhost": "", "web-0": "Name or service not known"}),
        verdicts.name_servers((), 0, {}),
        verdicts.name_servers(("10.0.0.2",), 0, {"bus.example": "Name or service not known"}),
        verdicts.addresses("", {}),
        verdicts.addresses("10.0.0.3", {"10.0.0.9": "network default of the settings"}),
        verdicts.firewall("nft is not installed"),
        verdicts.watches(errno.EMFILE, 128, 8192),
        verdicts.kernel("4.4", {"pidfd": "ends are noticed late"}),
        verdicts.first_process("sleep", is_init=False),
    ]

    for finding in findings:
        assert finding.verdict != GOOD, finding
        assert finding.follows, finding
        assert finding.change, finding


REPORT = Report(
    "privileged",
    [Finding("user", GOOD, "root"), Finding("mounts", LIMITED, "refused", "links " * 40, "privileged: true")],
)


def test_the_table_fits_a_wide_terminal_and_wraps_below_itself() -> None:
    text = table(REPORT)

    assert max(map(len, text.splitlines())) <= 120
    assert "\x1b" not in text
    assert "ok       user    root" in text
    assert text.endswith("1 ok, 1 limited, 0 wrong")


def test_the_table_gives_no_orders_to_a_terminal_and_forges_no_line() -> None:
    hostile = "\x1b]0;title\x07\x9b2J\r\nok       bus      can be reached\u202e\ud800\u2028end"

    text = table(Report("privileged", [Finding("bus", WRONG, hostile, hostile, hostile)]))

    assert [each for each in text if not each.isprintable() and each != "\n"] == []
    assert [line for line in text.splitlines() if line.startswith("ok")] == []
    assert text.count("\\u001b]0;title\\u0007\\u009b2J") == 3


def test_colours_change_nothing_but_colours() -> None:
    import re

    assert re.sub(r"\x1b\[[0-9;]*m", "", table(REPORT, ansi.coloured)) == table(REPORT)


@pytest.mark.parametrize(
    ("finding", "pod", "cpi", "engine"),
    [
        (verdicts.shared_memory(64 << 20), "medium: Memory", "ShmSize", "--shm-size"),
        (verdicts.open_files(1024, 1024), "LimitNOFILE", "Ulimits", "--ulimit=nofile"),
        (verdicts.cgroups(2, delegates=True, memory=None, cpus=None)[-1], "resources.limits", "Memory", "--memory"),
        (verdicts.name_servers((), 0, {}), "dnsPolicy", "cloud-config", "--dns"),
        (verdicts.low_ports(errno.EACCES), "securityContext", "an engine that runs as root", "--cap-add=NET_BIND"),
    ],
)
def test_advice_is_in_the_words_of_the_runtime(finding: Finding, pod: str, cpi: str, engine: str) -> None:
    said = {runtime: finding.for_runtime(runtime).change for runtime in get_args(Runtime)}

    assert pod in said["pod"]
    assert cpi in said["cpi"]
    assert engine in said["engine"]
    assert said["warden"] == (ON_HOST if said["cpi"].startswith("cloud_properties") else said["cpi"])
    assert len({said["pod"], said["cpi"], said["engine"]}) == 3


def test_no_advice_for_a_cpi_or_an_engine_names_a_field_of_a_pod() -> None:
    """Each place where advice is written has words for all three."""
    source = (ROOT / "agent_shim/cli/doctor/verdicts.py").read_text()
    changes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and _name(node) == "Change"]
    others = [ast.unparse(word.value) for node in changes for word in node.keywords]

    assert len(changes) > 15
    assert [
        text for text in others if re.search("securityContext|_SECURITY|emptyDir|dnsPolicy|NetworkPolicy", text)
    ] == []
    given = [ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    plain = [text for text in given if text.startswith("Finding(") and "Change(" not in text]
    assert [
        text for text in plain if re.search("securityContext|_SECURITY|emptyDir|dnsPolicy|NetworkPolicy", text)
    ] == []


def test_no_advice_for_a_cpi_names_a_key_without_effect_there() -> None:
    """The Docker CPI itself sets privileges and bind mounts of a container; other keys are not its own."""
    source = (ROOT / "agent_shim/cli/doctor/verdicts.py").read_text()
    changes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and _name(node) == "Change"]
    advice = [ast.unparse(word.value) for node in changes for word in node.keywords if word.arg == "cpi"]

    assert len(advice) > 15
    assert [text for text in advice if re.search(r"\b(Privileged|CapAdd|Binds|User|Cmd|Entrypoint)\b", text)] == []


def _name(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else ""


@pytest.mark.parametrize(
    ("root", "place", "settings", "runtime"),
    [
        ("/var/lib/kubelet/pods/0f2f6a53-5b8e-4f0e-8a53-37a3f1a3b1c2/etc-hosts", "/etc/hosts", True, "pod"),
        ("/pods/0f2f6a53-5b8e-4f0e-8a53-37a3f1a3b1c2/containers/bosh/1a2b", "/etc/hosts", False, "pod"),
        ("/containers/0f2f/hosts", "/etc/hosts", True, "cpi"),
        ("/warden_cpi/persistent_bind_mounts_dir/0f2f", "/warden-cpi-dev", True, "warden"),
        ("/volumes/disk-1", "/warden-cpi-dev/disk-1", True, "cpi"),
        ("/", "/etc/hosts", False, "engine"),
    ],
)
def test_the_runtime_is_told_by_mounts_and_settings(
    monkeypatch: pytest.MonkeyPatch, root: str, place: str, settings: bool, runtime: str
) -> None:
    table = f"36 35 98:0 {root} {place} rw - ext4 /dev/vda rw\n".encode()
    monkeypatch.setattr(mounts, "mounts", lambda: mounts.parse(table))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    document = b'{"agent_id": "a", "mbus": "nats://192.0.2.1:4222"}'
    known = Effective(parse(document, origin="x"), UpdateSettings()) if settings else None

    assert doctor.runtime(known) == runtime
