"""Tests programs that run in new namespaces or with Landlock rules, and programs that enter a job's namespaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.root.conftest import Inside

pytestmark = pytest.mark.root

SETUP = """
import shutil, signal
from agent_shim.host import process, sandbox
volumes = Path("/var/vcap/data/volumes")
shutil.rmtree(volumes, ignore_errors=True)
for name in ("plain", "writable", "tools", "open", "below"):
    (volumes / name).mkdir(parents=True)
    shutil.chown(volumes / name, "vcap")
    os.mknod(volumes / name / "null", 0o20666, os.makedev(1, 3))
    (volumes / name / "null").chmod(0o666)
    shutil.copy("/bin/true", volumes / name / "tool")
    (volumes / name / "tool").chmod(0o755)
(volumes / "open/below").mkdir()
(volumes / "file").write_text("content")
shutil.chown(volumes / "file", "vcap")
out = volumes / "out"
SYSTEM = [sandbox.bind_mount(each, run=True) for each in sandbox.SYSTEM]
NULL = sandbox.bind_mount("/dev/null", write=True)

def wanted(script, **members):
    members = {"uid": 1000, "gid": 1000, "env": {"PATH": "/bin"}, "binds": SYSTEM, **members}
    return sandbox.exec_spec(["/bin/sh", "-c", script], **members)

async def start(argv, stdin):
    return process.spawn(argv, env={}, stdin=stdin, stdout=out, stderr=out)

async def said(script, **members):
    # Return the exit code and the output.
    async with sandbox.prepared(wanted(script, **members), start) as one:
        pass
    status = await one.wait()
    return [status, out.read_text()]
"""
NAMESPACES = "namespaces=list(sandbox.NAMESPACES)"
VOLUMES = """
places = [
    *SYSTEM,
    sandbox.bind_mount("/sys"),
    sandbox.bind_mount("/volume/plain", source=str(volumes / "plain")),
    sandbox.bind_mount("/volume/writable", source=str(volumes / "writable"), write=True),
    sandbox.bind_mount("/volume/tools", source=str(volumes / "tools"), run=True),
    sandbox.bind_mount("/volume/open", source=str(volumes / "open"), write=True, run=True),
    sandbox.bind_mount("/volume/open/below", source=str(volumes / "below")),
    sandbox.bind_mount("/dev/own", source=str(volumes / "below"), write=True, run=True),
    sandbox.bind_mount("/dev/shm/own", source=str(volumes / "below")),
    sandbox.bind_mount("/volume/file", source=str(volumes / "file")),
    sandbox.bind_mount("/volume/none", source=str(volumes / "none")),
]
"""


@pytest.fixture
def run_body(inside: Inside) -> Callable[[str], Any]:
    """Provide a function that runs the body of a test on a machine with volumes. The body can run programs as vcap."""
    return lambda body: inside(SETUP + VOLUMES + body)


def test_sandbox_mounts_only_the_requested_paths_with_their_rights(run_body: Callable[[str], Any]) -> None:
    status, text = run_body(f'return await said("cat /proc/self/mountinfo", binds=places, {NAMESPACES})')
    rows = [line.split() for line in text.splitlines()]
    rights = {row[4]: set(row[5].split(",")) & {"ro", "rw", "nosuid", "nodev", "noexec"} for row in rows}

    assert status == 0, text
    assert {path for path in rights if path.startswith("/volume")} == {
        f"/volume/{name}" for name in ("plain", "writable", "tools", "open", "open/below", "file")
    }
    closed, devices = {"nosuid", "nodev", "noexec"}, ("null", "zero", "full", "random", "urandom", "tty")
    assert rights == rights | {
        "/": {"ro", *closed},
        "/etc": {"ro", "nosuid", "nodev"},
        "/usr": {"ro", "nosuid", "nodev"},
        "/volume/plain": {"ro", *closed},
        "/volume/writable": {"rw", *closed},
        "/volume/tools": {"ro", "nosuid", "nodev"},
        "/volume/open": {"rw", "nosuid", "nodev"},
        "/volume/open/below": {"ro", *closed},
        "/volume/file": {"ro", *closed},
        "/dev/own": {"rw", "nosuid"},
        "/dev/shm/own": {"ro", "nosuid", "noexec"},
        "/proc": {"rw", *closed},
        "/proc/sys": {"ro", *closed},
        "/dev/pts": {"rw", "nosuid", "noexec"},
        "/dev/shm": {"rw", *closed},
        **{f"/dev/{name}": {"rw", "nosuid", "noexec"} for name in devices},
    }
    # A shared mount would have a peer outside the sandbox, and mounts below it would propagate to that peer.
    assert [row[4] for row in rows if any(field.startswith("shared:") for field in row[6 : row.index("-")])] == []


def test_sandbox_root_has_directories_links_and_devices_as_in_bpm(run_body: Callable[[str], Any]) -> None:
    script = (
        "ls /; ls /volume; stat -c '%a %U %n' / /volume /dev /dev/pts /dev/shm;"
        "cd /dev; for each in fd stdin stdout stderr ptmx; do readlink $each; done;"
        "for each in null zero full random urandom tty; do stat -c '%F %n' $each; done; hostname | wc -l; echo $$"
    )
    status, text = run_body(f"os.umask(0o077); return await said({script!r}, binds=places, {NAMESPACES})")

    assert status == 0, text
    assert text.splitlines() == [
        *("bin", "dev", "etc", "lib", "lib64", "proc"),
        *(["run"] if "\nrun\n" in text else []),
        *("sbin", "sys", "usr", "volume"),
        *("file", "open", "plain", "tools", "writable"),
        *("755 root /", "755 root /volume", "755 root /dev", "755 root /dev/pts", "1777 root /dev/shm"),
        *("/proc/self/fd", "/proc/self/fd/0", "/proc/self/fd/1", "/proc/self/fd/2", "pts/ptmx"),
        *(f"character special file {name}" for name in ("null", "zero", "full", "random", "urandom", "tty")),
        *("1", "1"),
    ]


RIGHTS = """
cd /volume 2>/dev/null || cd /var/vcap/data/volumes
for each in plain writable tools open; do
  (: >$each/new) && echo writes $each
  $each/tool && echo runs $each
  (: >$each/null) && echo has devices $each
  ls $each >/dev/null && cat $each/tool >/dev/null && echo reads $each
done 2>/dev/null
(: >>file) 2>/dev/null && echo writes file
cat file
"""
ALLOWED = {
    *("reads plain", "reads writable", "reads tools", "reads open", "content"),
    *("writes writable", "writes open", "runs tools", "runs open"),
}


def test_sandbox_mounts_grant_only_the_requested_rights(run_body: Callable[[str], Any]) -> None:
    status, text = run_body(f"return await said({RIGHTS!r}, binds=places, {NAMESPACES})")

    assert (status, set(text.splitlines())) == (0, ALLOWED)


def test_sandbox_landlock_rules_grant_only_the_requested_rights(run_body: Callable[[str], Any]) -> None:
    """Landlock has no rules for devices, so a device in a writable directory can be opened."""
    status, text = run_body(f"return await said({RIGHTS!r}, binds=[*places, NULL])")

    assert (status, set(text.splitlines())) == (0, ALLOWED | {"has devices writable", "has devices open"})


ENTERED = f"""
from contextlib import asynccontextmanager

@asynccontextmanager
async def job():
    script = "trap 'exit 0' TERM; echo up; while :; do sleep 0.05; done"
    async with sandbox.prepared(wanted(script, binds=places, {NAMESPACES}), start) as one:
        pass
    while "up" not in out.read_text():
        await asyncio.sleep(0.01)
    try:
        yield one
    finally:
        one.send(signal.SIGKILL)
        await one.wait()

async def entered(pid, script, **members):
    spec = wanted(script, **{{"binds": None, "enter": pid, **members}}, {NAMESPACES})
    descriptor = os.memfd_create("spec")
    os.write(descriptor, json.dumps(spec).encode() + b"\\n")
    os.lseek(descriptor, 0, os.SEEK_SET)
    reading, writing = os.pipe()
    one = process.spawn([*sandbox.launcher(), "0"], env={{}}, stdin=descriptor, stdout=writing, stderr=writing)
    os.close(writing)
    os.close(descriptor)
    return one, os.fdopen(reading)
"""


def test_program_that_enters_a_sandbox_is_as_confined_as_its_job(run_body: Callable[[str], Any]) -> None:
    script = (
        "ls /volume; grep -E '^(Uid|Groups|Cap(Prm|Eff|Bnd|Amb)|NoNewPrivs)' /proc/self/status;"
        "ls /proc | grep ^1$; readlink /proc/self/ns/*"
    )
    found = run_body(f"""{ENTERED}
async with job() as one:
    running, text = await entered(one.pid, {script!r})
    status = await running.wait()
    lines = text.read().splitlines()
    ours = [os.readlink(each) for each in Path("/proc/self/ns").iterdir() if each.name in sandbox.NAMESPACES]
    theirs = [os.readlink(f"/proc/{{one.pid}}/ns/{{name}}") for name in sandbox.NAMESPACES]
    return [status, lines, ours, theirs]
""")
    status, lines, ours, theirs = found

    assert status == 0
    assert lines[:5] == ["file", "open", "plain", "tools", "writable"]
    assert [line.split() for line in lines[5:12]] == [
        ["Uid:", "1000", "1000", "1000", "1000"],
        ["Groups:"],
        *([f"Cap{name}:", "0" * 16] for name in ("Prm", "Eff", "Bnd", "Amb")),
        ["NoNewPrivs:", "1"],
    ]
    assert lines[12] == "1"
    assert set(theirs) <= set(lines[13:])
    assert set(ours) & set(lines[13:]) == set()


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -KILL $$", 137)])
def test_exit_code_of_a_program_that_enters_a_sandbox_is_passed_on(
    run_body: Callable[[str], Any], script: str, code: int
) -> None:
    assert (
        run_body(f"""{ENTERED}
async with job() as one:
    running, _ = await entered(one.pid, {script!r})
    return await running.wait()
""")
        == code
    )


@pytest.mark.parametrize("name", ["SIGINT", "SIGQUIT", "SIGTERM", "SIGHUP"])
def test_entering_a_sandbox_forwards_signals_and_keeps_no_streams_open(
    run_body: Callable[[str], Any], name: str
) -> None:
    script = f"trap 'exit 5' {name[3:]}; echo up; exec >&- 2>&-; while :; do sleep 0.05; done"
    assert run_body(f"""{ENTERED}
async with job() as one:
    running, text = await entered(one.pid, {script!r})
    said = await asyncio.to_thread(text.read)
    running.send(signal.{name})
    return [said, await running.wait()]
""") == ["up\n", 5]


def test_entering_the_sandbox_of_an_exited_process_is_an_error(run_body: Callable[[str], Any]) -> None:
    status, text = run_body(f"""{ENTERED}
async with job() as one:
    pass
running, text = await entered(one.pid, "echo ran")
return [await running.wait(), text.read()]
""")

    assert status == 127
    assert text.startswith("agent-shim: cannot run /bin/sh: enter its namespaces: ")


@pytest.mark.parametrize("name", ["plain", "two words", "back\\slash"])
def test_shared_sandbox_volume_is_bound_only_once(run_body: Callable[[str], Any], name: str) -> None:
    """If the volume were bound again, each start of a job would add another mount."""
    found = run_body(f"""
import subprocess
from agent_shim.host import mounts, sandbox_exec
place = volumes / {name!r}
place.mkdir(exist_ok=True)
for _ in range(3):
    sandbox_exec.make_shared(str(place))
at = [each for each in mounts.mounts() if each.point == place]
table = Path("/proc/self/mountinfo").read_text().splitlines()
lines = [line for line in table if int(line.split()[0]) == at[-1].number]
for _ in at:
    subprocess.run(["umount", place], check=True)
return [len(at), "shared:" in lines[0]]
""")

    assert found == [1, True]
