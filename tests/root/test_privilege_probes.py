"""Tests each of the doctor's privilege probes, with and without the privilege that it tests."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.root.conftest import UNPRIVILEGED, Inside
from tests.support.machine import Machine

pytestmark = pytest.mark.root

TRY_ALL = """
import errno
from agent_shim.host import privilege_probes as probes
scratch = Path("/var/vcap/probes")
wanted = {
    "bind mount": (probes.bind_mount, scratch),
    "tmpfs": (probes.tmpfs, scratch),
    "user namespace": (probes.user_namespace, scratch),
    "process namespace": (probes.process_namespace, scratch),
    "change user": (probes.change_user, 1000, 1000),
    "change owner": (probes.change_owner, scratch, 1000),
    "write": (probes.write, scratch),
    "write elsewhere": (probes.write, Path("/var/vcap/closed")),
    "open": (probes.open_for_writing, Path("/var/vcap/closed/file")),
    "listen": (probes.listen, "127.0.0.1", 0),
    "listen on six": (probes.listen, "::1", 0),
    "listen low": (probes.listen_low,),
    "inotify": (probes.open_inotify,),
    "pidfd": (probes.open_pidfd,),
}
codes = {name: probes.error_of(probe, *args) for name, (probe, *args) in wanted.items()}
failed = {name: errno.errorcode[code] for name, code in codes.items() if code}
return [failed, os.listdir(scratch), "probes" in Path("/proc/self/mountinfo").read_text(), os.getuid()]
"""


@pytest.fixture
def places(box: Machine) -> None:
    box.run(
        "mkdir -p /var/vcap/probes /var/vcap/closed; chmod 777 /var/vcap/probes; chmod 755 /var/vcap/closed;"
        "echo content >/var/vcap/closed/file"
    )


def makes_user_namespaces(*prefix: str) -> bool:
    """Return True if a process that runs with the command prefix ``prefix`` can create user namespaces."""
    argv = [*prefix, "unshare", "--user", "--mount", "--map-root-user", "true"]
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0


@pytest.mark.usefixtures("places")
@pytest.mark.parametrize(
    ("prefix", "missing"),
    [
        ((), {}),
        (
            ("setpriv", "--bounding-set=-sys_admin"),
            {"bind mount": "EPERM", "tmpfs": "EPERM", "process namespace": "EPERM"},
        ),
        (("setpriv", "--bounding-set=-setuid"), {"change user": "EPERM"}),
        (("setpriv", "--bounding-set=-setgid"), {"change user": "EPERM"}),
        (("setpriv", "--bounding-set=-chown"), {"change owner": "EPERM"}),
        (("setpriv", "--bounding-set=-net_bind_service"), {"listen low": "EACCES"}),
        (
            UNPRIVILEGED,
            {
                "bind mount": "EPERM",
                "tmpfs": "EPERM",
                "process namespace": "EPERM",
                "change user": "EPERM",
                "change owner": "EPERM",
                "write elsewhere": "EACCES",
                "open": "EACCES",
                "listen low": "EACCES",
            },
        ),
    ],
    ids=["root", "sys_admin", "setuid", "setgid", "chown", "net_bind_service", "ordinary user"],
)
def test_privilege_probe_fails_only_without_its_privilege(
    inside: Inside, prefix: tuple[str, ...], missing: dict[str, str]
) -> None:
    failed, left, is_mounted, uid = inside(TRY_ALL, *prefix)
    if not makes_user_namespaces(*prefix):
        assert failed.pop("user namespace")
    # If the host lets every user listen on this port, no privilege is needed.
    if int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text()) <= 1000:
        missing = {name: code for name, code in missing.items() if name != "listen low"}

    assert failed == missing
    assert left == []
    assert not is_mounted
    assert (uid == 0) == (prefix != UNPRIVILEGED)


def test_privilege_probe_that_raises_an_exception_fails(inside: Inside) -> None:
    codes = inside("""
import errno, signal
from agent_shim.host import privilege_probes as probes
def raised(exc):
    raise exc
def killed():
    os.kill(os.getpid(), signal.SIGKILL)
codes = [probes.error_of(raised, exc) for exc in (OSError(errno.EACCES, ""), OSError("none"), OSError(255, ""))]
sys.stderr = open(os.devnull, "w")
codes += [probes.error_of(raised, ValueError()), probes.error_of(killed), probes.error_of(os.getpid)]
return [errno.errorcode.get(code, code) for code in codes]
""")

    assert codes == ["EACCES", "EIO", "EIO", "EIO", "EIO", 0]
