"""Tests that a job's attacks on the agent in the same container fail."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import stat
import struct
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from agent_shim.bulk import copytruncate
from agent_shim.core.errors import HostError
from agent_shim.core.paths import Paths
from agent_shim.demo.director import RpcRemoteError
from agent_shim.host import files, guarded
from agent_shim.services.disks import markers
from agent_shim.services.logs import tail
from agent_shim.supervisor import filesystem_usage
from agent_shim.supervisor.ownership import process_record
from tests.support import jobs
from tests.support.guest import ROOT
from tests.support.pod import AGENT, PodInstance, end

pytestmark = pytest.mark.root

VCAP: Final = 1000
AS_VCAP: Final = "setpriv --reuid=vcap --regid=vcap --clear-groups"
CANARY: Final = "canary-4b1d"

ASK = """
import socket
with socket.socket(socket.AF_UNIX) as asked:
    asked.connect({socket!r})
    try:
        asked.sendall(b'{{"command": "status"}}\\n')
        print("answered" if asked.recv(1000) else "hung up")
    except (ConnectionResetError, BrokenPipeError):
        print("hung up")
"""
TOUCH = """
import ctypes, os
from pathlib import Path
touched = set()
for entry in Path("/proc").glob("[0-9]*"):
    if int(entry.name) == os.getpid() or b"agent_shim" not in (entry / "cmdline").read_bytes():
        continue
    try:
        (entry / "mem").open("rb").close()
        touched.add("read")
    except PermissionError:
        touched.add("not read")
    if os.geteuid():
        touched.add("not traced" if ctypes.CDLL(None).ptrace(16, int(entry.name), None, None) else "traced")  # ATTACH
print(sorted(touched))
"""
ALL_FOR_VCAP: Final = struct.pack("<I" + 5 * "HHI", 2, 1, 7, 0, 2, 7, VCAP, 4, 7, 0, 16, 7, 0, 32, 7, 0)
"""A default ACL that grants vcap all rights, limited by the group permissions in the mode."""
NAMES_ANOTHER = "cat /var/vcap/data/victim >$pidfile"
MANY: Final = jobs.process(
    Paths(),
    "many",
    f"setsid {AS_VCAP} perl -e 'for (1 .. 6000) {{ fork or last }} sleep 1000' >/dev/null 2>&1 & echo $! >$pidfile",
)
"""A job with 6000 processes, which its stop program leaves running."""
EXCHANGE: Final = """
mv jobs others && cp -rL others jobs
for ctl in jobs/web/bin/ctl jobs/web/*/bin/ctl; do
  test -f $ctl || continue
  printf '#!/bin/sh\\nid >/tmp/run-by\\n' >new && tail -n +2 $ctl >>new && chmod 755 new && mv -f new $ctl
done
"""
SLEEPING: Final = "processes: [{name: caged, executable: /bin/sleep, args: [1000]}]"
BPM: Final = jobs.of_bpm(Paths(), "caged", SLEEPING)


STOPPER: Final = """
import os, signal
while True:
    try:
        os.kill(-1, signal.SIGSTOP)
    except ProcessLookupError:
        pass
"""
STOPPED: Final = """
check process stopped{number}
  with pidfile /var/vcap/sys/run/web/stopped{number}.pid
  start program "/bin/sleep 1000" as uid vcap and gid vcap with timeout 1 seconds
  stop program "/bin/true" as uid vcap with timeout 1 seconds
  group vcap
"""


def liar(start: str) -> dict[str, str]:
    """Return a job whose start and stop programs both run ``start``, which writes the pid of an unrelated process to
    the pidfile. Neither program kills a process.
    """
    return jobs.process(Paths(), "liar", start, stop=start, within="with timeout 1 seconds")


def pid_in_container(pod: PodInstance, pattern: str) -> int:
    """Return the pid, in the container's PID namespace, of the oldest process that matches ``pattern``."""
    return int(pod.machine.run(f"pgrep -o -f '{pattern}'"))


@pytest.mark.attack("a job writes the pid of a root process or of another job's process into its pidfile")
@pytest.mark.parametrize("victim", ["the agent", "process 1", "another job"])
async def test_agent_does_not_signal_other_processes_named_in_a_jobs_pidfile(pod: PodInstance, victim: str) -> None:
    """The job must not be reported as running either. The exception is PID 1: as in monit, a job whose pidfile names
    PID 1 is reported as running without a process.
    """
    await pod.start()
    files_of = {"web": jobs.sleeper(Paths(), "web"), "liar": liar(NAMES_ANOTHER)}
    only_web = {"web": files_of["web"]}
    await pod.deploy(only_web)
    agent, web = pid_in_container(pod, "agent_shim.cli run"), int((pod.vcap / "data/sys/run/web/web.pid").read_text())
    number = {"the agent": agent, "process 1": 1, "another job": web}[victim]
    (pod.vcap / "data/victim").write_text(f"{number}\n")
    await pod.apply(files_of, version="2")
    await pod.run("start")

    await pod.until("running" if number == 1 else "failing")
    states = {each["name"]: each["state"] for each in (await pod.run("get_state"))["processes"]}
    assert (states["liar"] == "running") is (number == 1)
    pod.machine.run(f"{sys.executable} -m agent_shim.cli stop liar --wait")

    assert pid_in_container(pod, "agent_shim.cli run") == agent
    assert int((pod.vcap / "data/sys/run/web/web.pid").read_text()) == web
    pod.machine.run(f"kill -0 {web} 1")


@pytest.mark.attack("a job makes a dead service appear to be running by using the pid of an operator's process")
async def test_pidfile_written_by_vcap_cannot_claim_an_operators_program(pod: PodInstance) -> None:
    """The program runs as root, and its arguments contain the job's directory, but the agent has not started it."""
    await pod.start()
    pod.machine.run("tail -f /var/vcap/data/log --retry >/dev/null 2>&1 & echo $! >/var/vcap/data/victim")
    victim = int((pod.vcap / "data/victim").read_text())
    writes = f"{AS_VCAP} sh -c 'cat >/var/vcap/sys/run/liar/liar.pid'"
    await pod.apply({"liar": liar(f"cat /var/vcap/data/victim | {writes}")})
    await pod.run("start")

    await pod.until("failing")
    told = pod.machine.run(f"{sys.executable} -m agent_shim.cli status --json")
    assert f"the pidfile names process {victim} (tail): it was not started by this agent" in told
    await pod.run("stop")

    pod.machine.run(f"kill -0 {victim}")


@pytest.mark.attack("a job tricks root into writing a script's output through a symlink or a hard link")
async def test_script_fails_if_its_log_path_is_not_a_regular_file(pod: PodInstance) -> None:
    """A job puts a FIFO, a symbolic link or a hard link at its log path. Other jobs' scripts must still succeed."""
    planted = {"pipe": "mkfifo {log}", "link": "ln -s {victim} {log}", "second-name": "ln {victim} {log}"}
    await pod.start()
    script = {"bin/post-start": "#!/bin/sh\necho written by root\n"}
    await pod.apply({job: {**jobs.sleeper(Paths(), job), **script} for job in [*planted, "good"]})
    victim, log = "/var/vcap/data/victim", "/var/vcap/sys/log/{job}/post-start.stdout.log"
    pod.machine.run(f"touch {victim}")
    for job, how in planted.items():
        pod.machine.run(how.format(victim=victim, log=log.format(job=job)))

    with pytest.raises(RpcRemoteError, match=r"post-start") as failed:
        await pod.run("run_script", "post-start", {})

    assert [job for job in [*planted, "good"] if job in str(failed.value).partition("Successful")[0]] == list(planted)
    assert await pod.director.value(AGENT, "ping") == "pong"
    assert pod.machine.run(f"cat {victim}") == ""
    assert pod.machine.run(f"cat {log.format(job='good')}") == "written by root\n"
    assert [job for job in planted if f"{job}/post-start.stdout.log" not in pod.log] == []


@pytest.mark.attack("a job replaces its error log with a link to the settings or with a FIFO")
async def test_error_log_replaced_by_a_job_neither_blocks_the_agent_nor_leaks_secrets(pod: PodInstance) -> None:
    """The agent reports the last line of each error log. Neither ``status`` nor the alert may contain a line from the
    settings.
    """
    pod.env = {"note": CANARY}
    planted = {
        "pipe": "rm {log}; mkfifo {log}",
        "link": "ln -sf /var/vcap/bosh/settings.json {log}",
        "link-to-a-pipe": "mkfifo pipe; ln -sf pipe {log}",
    }
    deployed = {}
    for job, how in planted.items():
        script = f"cd /var/vcap/sys/log/{job} && {how.format(log=f'{job}.stderr.log')} && exit 1"
        process = {"name": job, "executable": "/bin/sh", "args": ["-c", script]}
        deployed[job] = jobs.of_bpm(Paths(), job, json.dumps({"processes": [process]}))
    await pod.start()
    await pod.apply(deployed)
    await pod.run("start")

    for job in planted:
        log = f"/var/vcap/sys/log/{job}/{job}.stderr.log"
        pod.machine.run(f"until test -p {log} -o -L {log}; do sleep 0.1; done")
    await pod.until("failing")
    assert await pod.director.value(AGENT, "ping") == "pong"
    told = pod.machine.run(f"{sys.executable} -m agent_shim.cli status --json")
    assert "BEGIN" not in told + pod.log
    assert CANARY not in told + pod.log
    for job in planted:
        logs = pod.machine.run(f"{sys.executable} -m agent_shim.cli.bpm logs -a {job} 2>&1 || true")
        ran = pod.machine.run(f"timeout 20 {sys.executable} -m agent_shim.cli.bpm run {job} 2>&1; echo code $?")
        assert "BEGIN" not in logs + ran + pod.log, job
        assert CANARY not in logs + ran + pod.log, job
        assert ran.endswith("code 1\n"), job
        assert re.match(rf"Error: cannot .*{job}\.stderr\.log: .*(not a regular file|a symbolic link)", logs), job

    pod.kill()
    await pod.start()
    assert await pod.director.value(AGENT, "ping") == "pong"


@pytest.mark.attack("a job occupies the run directory that bpm, the agent or a later job will use")
@pytest.mark.parametrize("planted", ["link", "file", "directory in the place of the pidfile"])
async def test_object_planted_at_the_bpm_pidfile_directory_is_replaced(pod: PodInstance, planted: str) -> None:
    """Every user may write to ``/var/vcap/sys/run``, so a job can create ``bpm`` there before the agent does."""
    await pod.start()
    how = {
        "link": "ln -s /var/vcap/data/elsewhere /var/vcap/sys/run/bpm",
        "file": "touch /var/vcap/sys/run/bpm",
        "directory in the place of the pidfile": "mkdir -p /var/vcap/sys/run/bpm/caged/caged.pid/full",
    }[planted]
    pod.machine.run("mkdir -m 755 /var/vcap/data/elsewhere")
    pod.machine.run(f"{AS_VCAP} {how}")
    await pod.apply({"caged": BPM})
    await pod.run("start")

    await pod.until("running")

    assert pod.machine.run("ls /var/vcap/data/elsewhere") == ""
    assert pod.machine.run("stat -c %U%a /var/vcap/sys/run/bpm /var/vcap/sys/run/bpm/caged") == "root755\nroot700\n"
    await pod.run("stop")
    assert pod.machine.run("ls /var/vcap/sys/run/bpm/caged") == ""


@pytest.mark.attack("a job makes a dead service appear to be running by using the pid of an operator's process")
async def test_pidfile_planted_in_the_bpm_directory_is_ignored(pod: PodInstance) -> None:
    """Before a job's first bpm process runs, any user can create the directory and put a pidfile with the expected name
    into it.
    """
    await pod.start()
    await pod.apply({"caged": BPM})
    pod.machine.run("sleep 1000 >/dev/null 2>&1 & echo $! >/var/vcap/data/victim")
    victim = int((pod.vcap / "data/victim").read_text())
    place = "/var/vcap/sys/run/bpm/caged"
    pod.machine.run(f"{AS_VCAP} sh -c 'mkdir -p {place}; echo {victim} >{place}/caged.pid'")

    bpm = f"{sys.executable} -m agent_shim.cli.bpm"
    assert pod.machine.run(f"{bpm} pid caged 2>&1 || true") == "Error: process is not running or could not be found\n"
    pod.machine.run(f"{bpm} stop caged")
    await pod.run("start")
    await pod.until("running")

    pod.machine.run(f"kill -0 {victim}")
    assert int(pod.machine.run(f"{bpm} pid caged")) != victim


@pytest.mark.attack("a job occupies the run directory that bpm, the agent or a later job will use")
async def test_object_planted_at_a_later_jobs_run_directory_is_moved_away(pod: PodInstance) -> None:
    """If a link remained there, the later job's start script would write its pidfile through the link as root."""
    planted = {"link": "ln -s /var/vcap/data/elsewhere", "file": "touch", "pipe": "mkfifo"}
    await pod.start()
    pod.machine.run("mkdir -m 755 /var/vcap/data/elsewhere")
    for job, how in planted.items():
        pod.machine.run(f"{AS_VCAP} {how} /var/vcap/sys/run/{job}")

    await pod.apply({job: jobs.sleeper(Paths(), job) for job in planted})
    await pod.run("start")

    await pod.until("running")
    assert pod.machine.run("ls /var/vcap/data/elsewhere") == ""
    made = {job: pod.machine.run(f"stat -c %F%U%a /var/vcap/sys/run/{job}") for job in planted}
    assert made == dict.fromkeys(planted, "directoryroot770\n")


@pytest.mark.attack("a job occupies the run directory that bpm, the agent or a later job will use")
@pytest.mark.parametrize("planted", ["ln -s /var/vcap/data/elsewhere", "touch", "mkdir -p"])
async def test_agent_starts_despite_an_object_planted_at_its_run_directory(pod: PodInstance, planted: str) -> None:
    """The directory does not exist before this agent's first start, so jobs that ran under the Go agent can put
    something else in its place.
    """
    pod.start_container()
    more = "/output/full" if planted == "mkdir -p" else ""
    pod.machine.run("mkdir -p -m 1777 /var/vcap/data/sys/run; mkdir -m 755 /var/vcap/data/elsewhere")
    pod.machine.run(f"{AS_VCAP} {planted} /var/vcap/data/sys/run/agent_shim{more}")

    await pod.start_agent()

    assert await pod.director.value(AGENT, "ping") == "pong"
    assert pod.machine.run("ls /var/vcap/data/elsewhere; stat -c %U%a /var/vcap/sys/run/agent_shim") == "root700\n"


@pytest.mark.attack("a job puts a link into a path in which root creates, opens or chowns files")
def test_directories_are_not_created_or_chowned_through_links_owned_by_jobs(tmp_path: Path) -> None:
    """Links owned by root are followed, because images and operators create them."""
    for name in ("victim", "victim/there", "way", "way/of_a_job"):
        (tmp_path / name).mkdir()
    (tmp_path / "way/ours").symlink_to(tmp_path / "victim")
    (tmp_path / "way/of_a_job/theirs").symlink_to("../../victim")
    for path in (tmp_path / "way/of_a_job", tmp_path / "way/of_a_job/theirs"):
        os.lchown(path, VCAP, VCAP)

    for name in ("new", "there", "deep/er"):
        with pytest.raises(HostError, match=r"the path contains a link, 'theirs', of user 1000"):
            files.make_dir(tmp_path / "way/of_a_job/theirs" / name, 0o700, f"{VCAP}")
    files.make_dir(tmp_path / "way/ours/new", 0o711)

    assert sorted(path.name for path in (tmp_path / "victim").iterdir()) == ["new", "there"]
    assert (tmp_path / "victim/there").stat().st_uid == 0


@pytest.mark.attack("a job puts a link into a path in which root creates, opens or chowns files")
@pytest.mark.parametrize("planted", ["link", "link on the way", "link of root that was moved", "link of root"])
def test_guarded_reads_follow_only_links_placed_by_root(tmp_path: Path, planted: str) -> None:
    """A link counts as placed by root if root owns it and only root can write to its directory."""
    secret, theirs = tmp_path / "secret/file", tmp_path / "theirs"
    secret.parent.mkdir()
    secret.write_text("secret")
    theirs.mkdir()
    os.chown(theirs, VCAP, VCAP)
    path = theirs / "x.pid"
    if planted == "link on the way":
        (theirs / "way").symlink_to(secret.parent)
        path = theirs / "way/file"
    elif planted == "link of root":
        path = tmp_path / "ours"
        path.symlink_to(secret)
    else:
        path.symlink_to(secret)
    if planted in ("link", "link on the way"):
        os.lchown(theirs / ("x.pid" if planted == "link" else "way"), VCAP, VCAP)

    if planted == "link of root":
        assert guarded.head(path, 10) == b"secret"
        return
    with pytest.raises(OSError, match="the path contains a link"):
        guarded.head(path, 10)
    with pytest.raises(OSError, match="the path contains a link"):
        filesystem_usage.usage(path)
    assert process_record.read(path) is None


@pytest.mark.attack("a job exposes other users' files through symlinks or hard links in its log directory")
def test_hard_link_to_a_root_owned_file_is_not_read(tmp_path: Path) -> None:
    """Without ``fs.protected_hardlinks`` on the host, a job can put a hard link to any file into its log directory."""
    (tmp_path / "job").mkdir()
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "job/x.log").hardlink_to(tmp_path / "secret")

    with pytest.raises(OSError, match="second hard link"):
        guarded.tail(tmp_path / "job/x.log", 10, tmp_path)
    assert list(tail.Follower(tmp_path).last(5)) == []
    os.chown(tmp_path / "secret", VCAP, VCAP)
    assert guarded.tail(tmp_path / "job/x.log", 10, tmp_path) == b"secret"


@pytest.mark.attack("a job connects to the control socket")
async def test_control_socket_does_not_answer_other_users(pod: PodInstance) -> None:
    """Other users must get no answer even if the socket's mode allows them to connect."""
    await pod.start()
    socket = "/var/vcap/bosh/agent_shim.sock"
    pod.machine.run(f"chmod 777 {socket} $(dirname {socket})")
    code = ASK.format(socket=socket)
    place = "/var/vcap/data/ask.py"
    (pod.vcap / "data/ask.py").write_text(code)
    pod.machine.run(f"chmod 755 /var/vcap /var/vcap/data; chmod 644 {place}")

    assert pod.machine.run(f"{sys.executable} {place}") == "answered\n"
    assert pod.machine.run(f"{AS_VCAP} {sys.executable} {place}") == "hung up\n"


@pytest.mark.attack("a job reads the agent's memory or core file")
async def test_jobs_cannot_read_the_agents_memory(pod: PodInstance) -> None:
    await pod.start()
    (pod.vcap / "data/touch.py").write_text(TOUCH)
    place = "/var/vcap/data/touch.py"
    pod.machine.run(f"chmod 755 /var/vcap /var/vcap/data; chmod 644 {place}")

    assert pod.machine.run(f"{sys.executable} {place}") == "['read']\n"
    assert pod.machine.run(f"{AS_VCAP} {sys.executable} {place}") == "['not read', 'not traced']\n"


@pytest.mark.attack("a job searches for the agent's keys and settings")
async def test_job_cannot_read_the_agents_secrets(pod: PodInstance) -> None:
    pod.env = {"note": CANARY, "blobstores": [{"provider": "local", "options": {"blobstore_path": "/var/vcap/blobs"}}]}
    await pod.start()
    await pod.deploy()
    places = "/var/vcap /etc /tmp /var/tmp /home /run /var/log /proc/[0-9]*/environ /proc/[0-9]*/cmdline"
    search = (
        f"grep -rlsF -D skip -e canary-4b1 -e 'BEGIN RSA PRIVATE' -e 'BEGIN PRIVATE' -e 'BEGIN EC PRIVATE' {places}"
    )

    seen_by_root = pod.machine.run(f"{search} || true")
    seen_by_job = pod.machine.run(f"{AS_VCAP} {search} || true").split()

    assert "settings.json" in seen_by_root
    found = [path for path in seen_by_job if path.startswith(("/var/vcap", "/tmp"))]
    # Ignore the project's own files, which contain such strings and may be below /tmp.
    assert [path for path in found if not Path(path).is_relative_to(ROOT)] == []


async def test_thousands_of_job_processes_do_not_block_the_loop(pod: PodInstance) -> None:
    """``status``, ``get_state`` and a stop read the process table, which takes a tenth of a second here.

    A callback may take longer than usual, because the kernel holds the process table's lock while thousands of
    processes exit.
    """
    await pod.start()
    await pod.deploy({"many": MANY})
    living = "pgrep -c -u vcap -r R,S,D,T,t perl"
    pod.machine.run(f"until test $({living}) -gt 6000; do sleep 0.1; done")

    assert "many" in pod.machine.run(f"{sys.executable} -m agent_shim.cli status")
    for _ in range(3):
        assert (await pod.run("get_state", "full"))["job_state"] == "running"
    await pod.run("stop")

    # pgrep does not count zombies here. They remain for a while, because the agent reaps only a few in each iteration
    # of its event loop.
    assert pod.machine.run(f"{living} || true") == "0\n"
    pod.machine.run("until ! pgrep -u vcap perl >/dev/null; do sleep 0.1; done")
    assert re.findall("the event loop was blocked: a callback computed.*", pod.log) == []


@pytest.mark.attack("a job replaces a directory with root's programs on a world-writable volume")
async def test_jobs_cannot_replace_root_programs_in_a_world_writable_volume(pod: PodInstance) -> None:
    """The kubelet creates emptyDirs with mode 0777. In such a volume, a job could replace the directory of a program
    that root runs.
    """
    pod.start_container()
    pod.machine.run("chmod 777 /var/vcap /var/vcap/data")
    await pod.start_agent()
    await pod.apply()
    (pod.machine.root / "mnt/exchange").write_text(EXCHANGE)
    for place in ("/var/vcap", "/var/vcap/data"):
        pod.machine.run(f"cd {place}; {AS_VCAP} sh /mnt/exchange || true")

    await pod.run("start")
    await pod.until("running")

    assert pod.machine.run("cat /tmp/run-by || true") == ""


async def test_jobs_can_enter_volumes_with_restrictive_modes(pod: PodInstance) -> None:
    """The local-path provisioner creates volumes with mode 0750. The agent changes the mode so that vcap can enter the
    volume.
    """
    pod.start_container()
    pod.machine.run("chmod 750 /var/vcap /var/vcap/data")
    await pod.start_agent()

    assert pod.machine.run(f"{AS_VCAP} ls -d /var/vcap/data/packages/.") == "/var/vcap/data/packages/.\n"


@pytest.mark.attack("a job replaces a directory with root's programs on a world-writable volume")
async def test_job_cannot_create_sshds_run_directory(pod: PodInstance) -> None:
    """If the root file system is read-only, ``/run`` is a world-writable emptyDir, in which a job could create
    ``/run/sshd``.
    """
    pod.start_container()
    pod.machine.run("chmod 777 /run")
    await pod.start_agent()

    assert pod.machine.run(f"{AS_VCAP} mkdir /run/sshd 2>/dev/null || stat -c %U%a /run") == "root755\n"


@pytest.mark.attack("a job reads the logs of root's scripts")
@pytest.mark.parametrize("planted", ["set-group-id", "access list"])
@pytest.mark.parametrize("kind", ["log", "archive"])
def test_root_logs_in_a_job_directory_are_unreadable_to_the_job(tmp_path: Path, kind: str, planted: str) -> None:
    """vcap owns the log directory of a bpm job, so the job can set the set-group-id bit or a default ACL on that
    directory. The logs of root's scripts in the directory may contain secrets.
    """
    place = tmp_path / "log"
    place.mkdir(0o750)
    os.chown(place, VCAP, VCAP)
    if planted == "access list":
        os.setxattr(place, "system.posix_acl_default", ALL_FOR_VCAP)
    else:
        place.chmod(0o2750)
    os.close(guarded.open_log(place / "x.log", 0o640))
    if kind == "archive":
        (place / "x.log").write_text("secret")
        top = os.open(place, os.O_PATH)
        copytruncate.rotate(top, "x.log", 7, 1000)
        os.close(top)

    (place / ("x.log.1.gz" if kind == "archive" else "x.log")).rename(tmp_path / "made")

    status = (tmp_path / "made").stat()
    assert (status.st_uid, status.st_gid) == (0, 0)
    assert os.listxattr(tmp_path / "made") == []
    if kind == "archive":
        assert gzip.decompress((tmp_path / "made").read_bytes()) == b"secret"


@pytest.mark.attack("a job forges its disk's marker")
def test_job_cannot_replace_the_marker_on_a_world_writable_disk(tmp_path: Path) -> None:
    """Some provisioners create volumes with mode 0777. In such a volume, a job could forge a marker that names another
    disk.
    """
    volume = tmp_path / "volume"
    volume.mkdir()
    volume.chmod(0o777)
    markers.write(volume, markers.Marker("disk-1", "store"))

    as_vcap = ["setpriv", f"--reuid={VCAP}", f"--regid={VCAP}", "--clear-groups"]
    subprocess.run([*as_vcap, "mv", ".agent_shim", "other"], cwd=volume, capture_output=True, check=False)

    assert markers.read(volume) == markers.Marker("disk-1", "store")
    assert stat.S_IMODE(volume.stat().st_mode) == 0o755


@pytest.mark.attack("a job suspends all its user's processes, including the agent's children")
async def test_job_that_stops_all_processes_of_its_user_does_not_block_the_agent(pod: PodInstance) -> None:
    """The job sends SIGSTOP to all of vcap's processes, including children of the agent that have switched to vcap but
    have not started their program yet.
    """
    pod.env = {"authorized_keys": ["ssh-ed25519 AAAA vcap"]}
    await pod.start()
    monit = "".join(STOPPED.format(number=number) for number in range(20))
    await pod.apply({"web": {"monit": monit}})
    saboteur = pod.machine.popen([*AS_VCAP.split(), sys.executable, "-c", STOPPER])
    try:
        for _ in range(2):
            await pod.run("start")
            for _ in range(50):
                assert await pod.director.value(AGENT, "ping") == "pong"
            await pod.run("stop")
        for _ in range(3):
            pod.end_agent()
            await pod.start_agent()
    finally:
        end(saboteur, signal.SIGKILL)
