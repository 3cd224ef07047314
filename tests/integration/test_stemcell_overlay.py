"""Tests the overlay, applied to scratch root file systems: an empty one, some that resemble a Debian image or a
stemcell, and hostile ones.
"""

from __future__ import annotations

import configparser
import os
import runpy
import shutil
import stat
import struct
import subprocess
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest

from tests.support.source import ROOT

OVERLAY = ROOT / "stemcell_overlay"
CAPABILITIES = "security.capability"
MANIFEST: dict[str, Any] = tomllib.loads((OVERLAY / "manifest.toml").read_text())


def apply(root: Path, *arguments: str, program: Path = OVERLAY / "apply") -> subprocess.CompletedProcess[str]:
    """Apply the overlay to the root file system ``root``."""
    return subprocess.run([sys.executable, program, root, *arguments], capture_output=True, text=True)


def apply_successfully(root: Path, *arguments: str, program: Path = OVERLAY / "apply") -> list[str]:
    """Apply the overlay, check that it succeeds, and return its output lines."""
    result = apply(root, *arguments, program=program)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.splitlines()


def snapshot(root: Path) -> dict[str, tuple[int, int, float]]:
    """Return the inode, mode and change time of every file and directory under ``root``.

    A change of owner also updates the change time.
    """
    found = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        found[str(path.relative_to(root))] = (status.st_ino, status.st_mode, status.st_ctime)
    return found


def write_file(root: Path, path: str, text: str, mode: int = 0o644) -> Path:
    """Write a file under ``root``. Return its path."""
    place = root / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)
    place.chmod(mode)
    return place


@pytest.fixture
def debian(tmp_path: Path) -> Path:
    """Create the Debian system files that the overlay reads or changes."""
    write_file(tmp_path, "etc/passwd", "root:x:0:0:root:/root:/bin/bash\n")
    write_file(tmp_path, "etc/shadow", "root:*:1:0:99999:7:::\n", 0o640)
    write_file(tmp_path, "etc/group", "root:x:0:\nadm:x:4:\naudio:x:29:pulse\n")
    write_file(tmp_path, "etc/gshadow", "root:*::\nadm:*::\naudio:*::pulse\n", 0o640)
    (tmp_path / "usr/sbin").mkdir(parents=True)
    (tmp_path / "sbin").symlink_to("usr/sbin")
    write_file(tmp_path, "etc/skel/.bashrc", "PS1=x\n")
    write_file(tmp_path, "opt/agent_shim/bin/agent-shim", "#!/opt/agent_shim/bin/python3", 0o755)
    return tmp_path


def test_overlay_contains_everything_in_its_manifest(debian: Path) -> None:
    write_file(debian, "var/lib/dpkg/status", "Package: sysv\nVersion: 300\n\nPackage: systemd\nVersion: 254.1-3\n\n")
    apply_successfully(debian)

    for row in MANIFEST["directory"]:
        assert stat.S_IMODE((debian / row["path"][1:]).stat().st_mode) == int(row["mode"], 8), row["path"]
    for row in MANIFEST["file"]:
        place = debian / row["path"][1:]
        assert place.read_bytes() == (OVERLAY / row.get("source", f"rootfs{row['path']}")).read_bytes()
        assert stat.S_IMODE(place.stat().st_mode) == int(row["mode"], 8), row["path"]
    for row in MANIFEST["link"]:
        assert str((debian / row["path"][1:]).readlink()) == row["target"]
    if os.geteuid() == 0:  # only root can change owners
        assert ((debian / "home/vcap").stat().st_uid, (debian / "home/vcap").stat().st_gid) == (1000, 1000)
        assert (debian / "opt/agent_shim/launch").stat().st_uid == 0
    # If this program failed, scripts in pxc and other releases would try other methods, which do not exist here.
    done = subprocess.run([debian / "var/vcap/bosh/etc/bosh-enable-monit-access", "1000"], capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")

    before = snapshot(debian)
    assert apply_successfully(debian) == []
    assert snapshot(debian) == before
    write_file(debian, "opt/agent_shim/launch", "old")
    assert apply_successfully(debian) == ["write /opt/agent_shim/launch"]


@pytest.mark.root
def test_overlay_gives_ping_the_net_raw_capability_only_if_ping_has_no_privileges(debian: Path) -> None:
    """The capability must not be effective. Otherwise, ping would not start in a container that lacks the capability,
    even though ping could use ICMP sockets there.
    """
    permitted = struct.pack("<5I", 0x02000000, 1 << 13, 0, 0, 0)
    effective = struct.pack("<5I", 0x02000001, 1 << 13, 0, 0, 0)
    ping = write_file(debian, "usr/bin/ping", "elf", 0o755)
    assert "permit capability 13 to /usr/bin/ping" in apply_successfully(debian)

    assert os.getxattr(ping, CAPABILITIES) == permitted
    assert apply_successfully(debian) == []
    os.setxattr(ping, CAPABILITIES, effective)
    assert apply_successfully(debian) == []
    os.removexattr(ping, CAPABILITIES)
    ping.chmod(0o4755)
    assert apply_successfully(debian) == []
    ping.rename(debian / "usr/bin/busybox").chmod(0o755)
    ping.symlink_to("busybox")
    assert apply_successfully(debian) == []


def test_overlay_adds_users_and_groups(debian: Path) -> None:
    """The ``ubuntu`` user in Ubuntu's images has the same uid as vcap, so it must be removed from all files."""
    write_file(debian, "etc/passwd", "root:x:0:0:root:/root:/bin/bash\nubuntu:x:1000:1000::/nowhere:/bin/bash\n")
    write_file(debian, "etc/group", "root:x:0:\nadm:x:4:syslog,ubuntu\naudio:x:29:pulse\nubuntu:x:1000:\n")
    apply_successfully(debian)
    groups = {line.split(":")[0]: line for line in (debian / "etc/group").read_text().splitlines()}

    assert "vcap:x:1000:1000:vcap:/home/vcap:/bin/bash" in (debian / "etc/passwd").read_text().splitlines()
    assert "\nvcap:*:" in (debian / "etc/shadow").read_text()
    assert groups["vcap"] == "vcap:x:1000:syslog"
    assert groups["adm"] == "adm:x:4:syslog,vcap"
    assert groups["audio"] == "audio:x:29:pulse,vcap"
    assert {"admin", "bosh_sudoers", "bosh_sshers"} <= set(groups)
    assert "audio:*::pulse,vcap" in (debian / "etc/gshadow").read_text().splitlines()
    assert stat.S_IMODE((debian / "etc/shadow").stat().st_mode) == 0o640
    assert "ubuntu" not in (debian / "etc/passwd").read_text() + (debian / "etc/group").read_text()


@pytest.mark.parametrize(("version", "knows"), [("252.39-1~deb12u1", False), ("1:257.9-1", True), (None, False)])
def test_overlay_omits_unit_keys_unknown_to_older_systemd(debian: Path, version: str | None, knows: bool) -> None:
    package = f"systemd\nVersion: {version}" if version else "dpkg\nVersion: 300"
    write_file(debian, "var/lib/dpkg/status", f"Package: {package}\n\n")
    apply_successfully(debian)

    units = debian / "etc/systemd/system"
    assert (units / "agent-shim.service.d/subgroup.conf").exists() is knows
    assert (units / "agent-shim.service").exists()


def test_overlay_removes_replaced_services_cron_deny_and_build_traces(debian: Path) -> None:
    """mmdebstrap copies the build machine's resolver configuration and host name. A link such as machine-id
    belongs to the distribution and must be kept.
    """
    write_file(debian, "etc/service/agent/run", "#!/bin/sh")
    (debian / "etc/service/monit").symlink_to("/etc/sv/monit")
    write_file(debian, "etc/service/ssh/run", "#!/bin/sh")
    write_file(debian, "etc/cron.deny", "")
    for path in ("etc/resolv.conf", "etc/hostname", "etc/hosts", "var/log/apt/history.log", "var/log/dpkg.log"):
        write_file(debian, path, "builder-7")
    write_file(debian, "var/log/postgresql/dpkg.log", "kept")
    (debian / "etc/machine-id").symlink_to("/run/machine-id")
    apply_successfully(debian)

    assert [path.name for path in (debian / "etc/service").iterdir()] == ["ssh"]
    assert not (debian / "etc/cron.deny").exists()
    assert [(debian / "etc" / name).read_bytes() for name in ("resolv.conf", "hostname")] == [b"", b""]
    assert (debian / "etc/hosts").read_text().splitlines()[0] == "127.0.0.1 localhost"
    assert (debian / "etc/machine-id").is_symlink()
    assert [path.name for path in (debian / "var/log").rglob("*") if path.is_file()] == ["dpkg.log"]
    assert apply_successfully(debian) == []


def test_overlay_manifest_matches_its_rootfs() -> None:
    listed = [row["path"] for row in MANIFEST["file"] if "source" not in row]
    present = [f"/{path.relative_to(OVERLAY / 'rootfs')}" for path in (OVERLAY / "rootfs").rglob("*") if path.is_file()]

    assert sorted(listed) == sorted(present)


def test_overlay_reuses_a_directory_created_concurrently(debian: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPI may write the settings into the container while the overlay is being applied."""
    program: Any = types.SimpleNamespace(**runpy.run_path(str(OVERLAY / "apply")))
    settings = debian / "var/vcap/bosh/warden-cpi-agent-env.json"
    say = program.Root.changes

    def changes(root: Any, line: str) -> bool:
        if line == "make /var/vcap/bosh":
            write_file(debian, str(settings.relative_to(debian)), "{}")
        return bool(say(root, line))

    monkeypatch.setattr(program.Root, "changes", changes)
    program.overlay(program.Root(debian, dry=False), MANIFEST)

    assert settings.read_text() == "{}"
    assert apply_successfully(debian) == []


def test_overlay_dry_run_changes_nothing(debian: Path) -> None:
    before = snapshot(debian)
    said = apply_successfully(debian, "--dry-run")

    assert snapshot(debian) == before
    assert {line for line in apply_successfully(debian) if not line.startswith("owner")} <= set(said)


def test_overlay_does_not_clear_files_through_links(debian: Path, tmp_path: Path) -> None:
    """``resolv.conf`` is often a link, which may point to a file outside the unpacked image."""
    outside = write_file(tmp_path, "outside", "nameserver 10.0.0.2")
    link = debian / "etc/resolv.conf"
    link.unlink(missing_ok=True)
    link.symlink_to(outside)

    apply_successfully(debian)

    assert outside.read_text() == "nameserver 10.0.0.2"


def test_overlay_applies_to_an_empty_root(tmp_path: Path, built: Path) -> None:
    apply_successfully(tmp_path, program=built / "apply")

    assert (tmp_path / "sbin/init").is_symlink()
    assert apply_successfully(tmp_path, program=built / "apply") == []


@pytest.mark.parametrize("arguments", [(), ("--dry-run",)])
def test_overlay_without_the_agent_program_is_refused(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """Without the program, the image would contain links to files that do not exist."""
    result = apply(tmp_path, *arguments)

    assert result.returncode == 1
    assert "there is no program" in result.stderr
    assert "docker build --target overlay" in result.stderr
    assert list(tmp_path.iterdir()) == []


PATH = 'PATH="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/var/vcap/bosh/bin"'
STEMCELL_PATH = 'PATH="/usr/bin:/usr/games:/var/vcap/bosh/bin"'


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", [PATH]),
        ('PATH="/usr/bin:/snap/bin"\nTZ=UTC\n', ["TZ=UTC", PATH]),
        (f"{STEMCELL_PATH}\nA=b\n", [STEMCELL_PATH, "A=b"]),
    ],
)
def test_overlay_adds_the_agent_commands_to_path_in_etc_environment(
    debian: Path, before: str, after: list[str]
) -> None:
    """Ubuntu's image has a PATH in /etc/environment, Debian's has none, and a stemcell's PATH already contains the
    directory.
    """
    write_file(debian, "etc/environment", before)
    apply_successfully(debian)

    assert (debian / "etc/environment").read_text().splitlines() == after


def test_home_directories_get_skeleton_files_and_keep_existing_ones(debian: Path) -> None:
    line = "[ ! -r /etc/profile.d/bosh.sh ] || . /etc/profile.d/bosh.sh"
    write_file(debian, "etc/skel/.profile", "skeleton\n")
    write_file(debian, "home/vcap/.profile", "own\n")
    write_file(debian, "root/.bashrc", "PS1=y\nsource /etc/profile.d/00-bosh-ps1\n")
    apply_successfully(debian)

    assert (debian / "etc/skel/.bashrc").read_text() == f"PS1=x\n{line}\n"
    assert (debian / "home/vcap/.bashrc").read_text() == f"PS1=x\n{line}\n"
    assert (debian / "home/vcap/.profile").read_text() == "own\n"
    assert line not in (debian / "root/.bashrc").read_text()


def test_overlay_lists_development_tools_and_static_libraries(debian: Path) -> None:
    for path in ("usr/bin/gcc-12", "usr/lib/gcc/libgcc.a", "usr/lib/libz.a", "usr/lib/libgcc_s.so.1"):
        write_file(debian, path, "")
    (debian / "usr/bin/gcc").symlink_to("gcc-12")
    write_file(debian, "var/lib/dpkg/info/gcc.list", "/.\n/usr\n/usr/bin/gcc\n/usr/share/gone\n")
    write_file(debian, "var/lib/dpkg/info/gcc-12.list", "/usr/bin\n/usr/bin/gcc-12\n/usr/lib/gcc/libgcc.a\n")
    write_file(debian, "var/lib/dpkg/info/libgcc-s1:amd64.list", "/usr/lib/libgcc_s.so.1\n")
    write_file(debian, "var/lib/dpkg/info/zlib1g-dev:amd64.list", "/usr/lib/libz.a\n")
    apply_successfully(debian)
    etc = debian / "var/vcap/bosh/etc"

    assert (etc / "dev_tools_file_list").read_text().splitlines() == [
        "/usr/bin/gcc",
        "/usr/bin/gcc-12",
        "/usr/lib/gcc/libgcc.a",
    ]
    assert (etc / "static_libraries_list").read_text().splitlines() == ["/usr/lib/gcc/libgcc.a", "/usr/lib/libz.a"]


def test_overlay_keeps_stemcell_settings_and_diverts_replaced_programs(debian: Path) -> None:
    kept = {
        "var/vcap/bosh/agent.json": '{"Platform": {}}',
        "var/vcap/bosh/etc/stemcell_version": "1.25",
        "var/vcap/bosh/etc/dev_tools_file_list": "/usr/bin/cc1\n",
        "usr/bin/chpst": "the real one",
        "usr/sbin/resolvconf": "the real one",
    }
    replaced = {
        "var/vcap/bosh/bin/bosh-agent": "the Go agent",
        "var/vcap/bosh/bin/monit": "monit",
        "usr/sbin/runsvdir-start": "runit",
        "usr/bin/systemctl": "systemd's",
    }
    for path, text in (kept | replaced).items():
        write_file(debian, path, text, 0o755)
    write_file(debian, "var/lib/dpkg/status", "")
    write_file(debian, "var/lib/dpkg/diversions", "/usr/sbin/service\n/usr/sbin/service.real\n:\n")
    (debian / "usr/sbin/init").symlink_to("../lib/systemd/systemd")
    (debian / "etc/service").mkdir()
    (debian / "etc/service/monit").symlink_to("/etc/sv/monit")
    apply_successfully(debian)

    assert {path: (debian / path).read_text() for path in kept} == kept
    assert {path: (debian / f"{path}.distrib").read_text() for path in replaced} == replaced
    assert str((debian / "usr/sbin/init.distrib").readlink()) == "../lib/systemd/systemd"
    assert str((debian / "usr/sbin/init").readlink()) == "/opt/agent_shim/launch"
    told = (debian / "var/lib/dpkg/diversions").read_text().splitlines()
    wanted = [path for row in MANIFEST["link"] for path in row.get("divert", [])]
    assert told[:3] == ["/usr/sbin/service", "/usr/sbin/service.real", ":"]
    assert {path: told[told.index(path) + 1] for path in wanted} == {
        path: f"{path}.distrib" for path in wanted if path != "/usr/sbin/service"
    } | {"/usr/sbin/service": "/usr/sbin/service.real"}
    assert not (debian / "etc/service/monit").is_symlink()
    assert apply_successfully(debian) == []


@pytest.fixture
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an overlay that contains the agent program, as ``docker build --target overlay`` creates it."""
    made = tmp_path_factory.mktemp("built")
    shutil.copytree(OVERLAY, made / "stemcell_overlay")
    shutil.copytree(ROOT / "systemd", made / "systemd")
    program = made / "stemcell_overlay/program"
    write_file(program, "lib/module.py", "new")
    write_file(program, "bin/agent-shim", "#!/opt/agent_shim/bin/python3", 0o755)
    (program / "bin/python3").symlink_to("/opt/agent_shim/python/bin/python3")
    return made / "stemcell_overlay"


def test_built_overlay_installs_the_agent_program(debian: Path, built: Path) -> None:
    write_file(debian, "opt/agent_shim/lib/module.py", "old")
    write_file(debian, "opt/agent_shim/lib/gone.py", "old")
    for arguments in (("--dry-run",), ()):
        assert (debian / "opt/agent_shim/lib/gone.py").exists()
        assert "copy the program to /opt/agent_shim" in apply_successfully(debian, *arguments, program=built / "apply")

    assert (debian / "opt/agent_shim/lib/module.py").read_text() == "new"
    assert not (debian / "opt/agent_shim/lib/gone.py").exists()
    assert os.access(debian / "opt/agent_shim/bin/agent-shim", os.X_OK)
    assert str((debian / "opt/agent_shim/bin/python3").readlink()) == "/opt/agent_shim/python/bin/python3"
    assert (debian / "opt/agent_shim/launch").is_file()
    assert apply_successfully(debian, program=built / "apply") == []


def test_overlay_leaves_the_agent_program_in_a_volume_unchanged(debian: Path) -> None:
    (debian / "opt/agent_shim").chmod(0o555)
    before = snapshot(debian / "opt")
    apply_successfully(debian, "--without-program")

    assert snapshot(debian / "opt") == before
    assert stat.S_IMODE((debian / "opt/agent_shim").stat().st_mode) == 0o555
    assert str((debian / "usr/sbin/runsvdir-start").readlink()) == "/opt/agent_shim/launch"
    assert apply_successfully(debian, "--without-program") == []


def test_overlay_reports_why_it_cannot_be_applied_to_a_root(debian: Path) -> None:
    missing = apply(debian / "none")
    write_file(debian, "etc/passwd", "jane:x:1000:1000::/nowhere:/bin/bash\n")
    taken = apply(debian)
    write_file(debian, "etc/passwd", "root:x:0:0:root:/root:/bin/bash\n")
    (debian / "var").symlink_to("run")
    (debian / "run").symlink_to("var")
    circle = apply(debian)

    assert [result.returncode for result in (missing, taken, circle)] == [1, 1, 1]
    assert "none: no such directory" in missing.stderr
    assert taken.stderr == "apply: cannot make user vcap: another one has the number 1000\n"
    assert "too many links" in circle.stderr


def test_overlay_resolves_links_inside_the_image(debian: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Paths that begin with ``/var`` or ``/opt`` could otherwise lead through links in the image to files outside."""
    outside = tmp_path_factory.mktemp("outside")
    descriptor = os.open(outside, os.O_RDONLY | os.O_DIRECTORY)
    name = f"proc/{os.getpid()}/fd/{descriptor}"
    (debian / "var").symlink_to(f"/{name}")
    (debian / "opt").rename(debian / "elsewhere")
    (debian / "opt").symlink_to("../../../../elsewhere")
    (debian / "warden-cpi-dev").mkdir()
    assert (debian / "var").samefile(outside)
    apply_successfully(debian)
    os.close(descriptor)

    assert list(outside.iterdir()) == []
    assert (debian / name / "vcap/bosh/agent.json").is_file()
    assert (debian / "elsewhere/agent_shim/launch").is_file()


def test_systemd_unit_starts_the_program_that_the_overlay_installs() -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.read(ROOT / "systemd/agent-shim.service")
    program = unit["Service"]["ExecStart"].split()[0]

    assert program in {row["path"] for row in MANIFEST["file"]}


@pytest.mark.parametrize(
    "row",
    [row for row in MANIFEST["file"] if row["mode"] == "0755"],
    ids=lambda row: row["path"],
)
def test_overlay_scripts_have_valid_syntax(row: dict[str, Any]) -> None:
    script = OVERLAY / f"rootfs{row['path']}"
    is_python = script.read_text().partition("\n")[0].endswith("python3 -IS")
    parse = "import sys; compile(open(sys.argv[1]).read(), sys.argv[1], 'exec')"
    reader = [sys.executable, "-c", parse] if is_python else ["sh", "-n"]
    result = subprocess.run([*reader, script], capture_output=True, text=True)

    assert (result.returncode, result.stderr) == (0, "")
