"""Tests the strategic merge patch that applies the doctor's proposals to a pod."""

from __future__ import annotations

import copy
import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from agent_shim.cli import doctor
from agent_shim.cli.commands import main
from agent_shim.cli.doctor import limits, patch
from agent_shim.cli.doctor.finding import GOOD, LIMITED, WRONG, Finding, Report, filled
from agent_shim.core.paths import Paths
from agent_shim.host import capabilities, mounts
from agent_shim.host.capabilities import Privileges

ROOT_ONLY = {"container": {"securityContext": {"readOnlyRootFilesystem": False}}}
NO_CHANGE = Report("privileged", [Finding("user", GOOD, "root")])


def patched(*findings: Finding, held: frozenset[str] = frozenset(), target: patch.Target = "pod") -> Any:
    """Return the parsed patch, as kubectl would receive it."""
    return yaml.safe_load(patch.patch(Report("few", findings), "web", held, target))


def limited(limit: str | Any, **words: str) -> Finding:
    row = limits.LIMITS[limit] if isinstance(limit, str) else limit
    return Finding("a topic", LIMITED, "found", row.follows, row.change("pod"), filled(row.patch, words))


def test_patch_mounts_an_empty_directory_where_a_writable_one_is_missing() -> None:
    places = [limited("top directory not writable", needs="", path=f"/{name}", name=name) for name in ("tmp", "run")]

    assert patched(*places) == {
        "spec": {
            "containers": [
                {
                    "name": "web",
                    "volumeMounts": [
                        {"mountPath": "/tmp", "name": "agent-shim-tmp"},
                        {"mountPath": "/run", "name": "agent-shim-run"},
                    ],
                }
            ],
            "volumes": [{"name": "agent-shim-tmp", "emptyDir": {}}, {"name": "agent-shim-run", "emptyDir": {}}],
        }
    }


def test_patch_lists_all_capabilities_including_present_ones() -> None:
    """The patch replaces the list, so a capability that is not in it would be lost. ``drop: [ALL]`` is part of the
    patch, because another entry in an existing ``drop`` would take precedence.
    """
    no_user, no_kill = (
        limits.capabilities(*names, follows="", verdict=WRONG) for names in (("CHOWN", "SETUID"), ("KILL",))
    )

    found = patched(limited(no_user), limited(no_kill), held=frozenset({"NET_RAW", "CHOWN", "41"}))

    context = found["spec"]["containers"][0]["securityContext"]
    assert context == {"capabilities": {"add": ["CHOWN", "SETUID", "KILL", "NET_RAW"], "drop": ["ALL"]}}


def test_patch_for_a_pod_template_is_nested() -> None:
    found = patched(limited("directory not writable"), target="template")

    container = {"name": "web", "securityContext": {"readOnlyRootFilesystem": False}}
    assert found == {"spec": {"template": {"spec": {"containers": [container]}}}}


@pytest.mark.parametrize("target", get_args(patch.Target))
def test_patch_without_changes_is_empty_except_for_a_comment(target: patch.Target) -> None:
    text = patch.patch(NO_CHANGE, "web", (), target)

    assert text.startswith("# agent-shim doctor: nothing to change.\n")
    assert yaml.safe_load(text) == {}


@pytest.mark.parametrize("limit", ["no mounts", "few capabilities", "one user", "no memory limit", "no firewall"])
def test_patch_contains_risky_and_incomplete_changes_only_as_comments(limit: str) -> None:
    finding = limited(limit)

    text = patch.patch(Report("few", [finding]), "web", (), "pod")

    assert yaml.safe_load(text) == {}
    assert " ".join(finding.change.split()) in " ".join(text.replace("\n#  ", "").split())
    assert all(line.startswith("#") for line in text.splitlines()[:-1])


@pytest.mark.attack("text from a job adds a container to the patch that an operator applies")
def test_doctor_finding_cannot_break_out_of_a_patch_comment() -> None:
    hostile = "x\nspec: {hostPID: true}\r\u2028spec: {}"

    text = patch.patch(Report("few", [Finding(hostile, WRONG, hostile, hostile, hostile)]), "web", (), "pod")

    assert yaml.safe_load(text) == {}


def test_creating_a_patch_does_not_change_the_predefined_patches() -> None:
    before = copy.deepcopy(limits.PATCHES)

    patched(*(limited(name, path="/x", name="x", needs="", lost="") for name in limits.PATCHES), held=frozenset({"A"}))

    assert before == limits.PATCHES


@pytest.mark.parametrize("name", limits.LIMITS)
def test_patches_change_only_harmless_pod_fields(name: str) -> None:
    found: Mapping[str, Any] = limits.LIMITS[name].patch
    container = found.get("container", {})

    assert found.keys() <= {"container", "volumes"}
    assert container.keys() <= {"securityContext", "volumeMounts"}
    context = container.get("securityContext", {})
    assert context.keys() <= {"readOnlyRootFilesystem", "capabilities"}
    assert not {*context.get("capabilities", {}).get("add", ())} & limits.STRONG.keys()


@pytest.mark.parametrize(
    ("words", "container"),
    [((), "hello-world"), (("--container", "other"), "other")],
)
def test_doctor_patch_names_the_current_container_unless_another_is_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], container: str
) -> None:
    where = "/var/lib/kubelet/pods/0f2f6a53-5b8e-4f0e-8a53-37a3f1a3b1c2"
    rows = [f"{where}/etc-hosts /etc/hosts", f"{where}/containers/hello-world/1a2b /dev/termination-log"]
    table = "".join(f"3{number} 35 98:0 {row} rw - ext4 /dev/vda rw\n" for number, row in enumerate(rows))
    monkeypatch.setattr(mounts, "mounts", lambda: mounts.parse(table.encode()))
    monkeypatch.setattr(doctor, "PROBES", {"a": lambda _: [Finding("a", WRONG, "b", "c", "d", ROOT_ONLY)]})
    monkeypatch.setattr(capabilities, "privileges", Privileges)

    assert main(["doctor", "--patch", "pod", *words]) == 0

    assert yaml.safe_load(capsys.readouterr().out)["spec"]["containers"][0]["name"] == container


def test_doctor_patch_uses_a_placeholder_container_name_outside_kubernetes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mounts, "mounts", lambda: ())
    monkeypatch.setattr(doctor, "PROBES", {"a": lambda _: [Finding("a", WRONG, "b", "c", "d", ROOT_ONLY)]})

    assert main(["doctor", "--patch"]) == 0

    template = yaml.safe_load(capsys.readouterr().out)["spec"]["template"]
    assert template["spec"]["containers"][0]["name"] == "CONTAINER"


@pytest.mark.parametrize(("error", "change"), [(errno.EROFS, True), (errno.EACCES, False)])
def test_patch_makes_the_root_file_system_writable_only_if_it_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, change: bool
) -> None:
    (tmp_path / "bosh").mkdir()
    monkeypatch.setattr(doctor, "error_of", lambda *_: error)
    paths = Paths(tmp_path)

    found = next(one for one in doctor.examine(paths, None, "pod").findings if one.topic == str(paths.bosh))

    assert found.patch == (ROOT_ONLY if change else {})
    assert ("readOnlyRootFilesystem" in found.change) == change


@pytest.mark.parametrize("is_volume", [True, False])
@pytest.mark.parametrize("error", [0, errno.EROFS])
def test_patch_adds_a_missing_data_volume_but_does_not_change_a_read_only_volume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_volume: bool, error: int
) -> None:
    """A volume may be read-only for a reason that the doctor does not know."""
    (tmp_path / "data").mkdir()
    point = tmp_path / "data" if is_volume else Path("/")
    monkeypatch.setattr(mounts, "mounts", lambda: mounts.parse(f"1 0 8:0 / {point} rw - ext4 /dev/vda rw\n".encode()))
    monkeypatch.setattr(doctor, "error_of", lambda *_: error)

    found = next(one for one in doctor.examine(Paths(tmp_path), None).findings if one.topic == str(tmp_path / "data"))

    mounted = [mount["mountPath"] for mount in found.patch.get("container", {}).get("volumeMounts", [])]
    assert mounted == ([] if is_volume else [str(tmp_path / "data")])
    assert found.verdict == (WRONG if error else GOOD if is_volume else LIMITED)
