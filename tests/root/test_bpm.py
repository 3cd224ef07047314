"""Tests what jobs with a bpm.yml can see and do at each isolation level. The jobs run as vcap on a test machine."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

from agent_shim.host import sandbox
from tests.root.conftest import Inside
from tests.support.bpm_keys import HONOURED

pytestmark = pytest.mark.root

PYTHON = os.path.realpath(sys.executable)

SETUP = """
import shutil, signal, subprocess, uuid
from agent_shim.host import cgroups, job_cgroups, proc, process, reaper, sandbox
from agent_shim.supervisor.supervisor import JobFile, Supervisor, Timing
from tests.support.waiting import until

paths = Paths()
for name in ("jobs", "packages", "data", "store", "bosh"):
    shutil.rmtree(paths.base / name, ignore_errors=True)
for name in ("jobs/other/config", "jobs/web/bin", "jobs/web/config", "packages/tool/bin", "data/packages", "store"):
    (paths.base / name).mkdir(parents=True)
for name in ("data/sys/log", "data/sys/run", "data/tools", "data/shown", "monit", "bosh", "data/bosh"):
    (paths.base / name).mkdir(parents=True, exist_ok=True)
if not paths.sys.is_symlink():
    paths.sys.symlink_to(paths.data_sys)
(paths.jobs / "other/config/secret").write_text("secret")
(paths.bosh / "settings.json").write_text("secret")
for name in ("data/tools/tool", "data/shown/tool", "packages/tool/bin/tool"):
    shutil.copy("/bin/true", paths.base / name)
shutil.chown(paths.base / "data/shown", "vcap")
# Jobs must inherit neither the agent's supplementary groups nor its protection from the OOM killer.
os.setgroups([0, 4, 1001])
try:
    Path("/proc/self/oom_score_adj").write_text("-500")
except PermissionError:
    pass  # this machine does not allow lowering the OOM score
(paths.etc / "sv").mkdir(exist_ok=True)
(paths.etc / "sv/secret").write_text("secret")
script = paths.jobs / "web/bin/look"
script.write_text(os.environ["LOOK"])
hook = paths.jobs / "web/bin/hook"
hook.write_text("#!/bin/sh\\necho hook $(id -u) $NAME\\n")
hook.chmod(0o755)
(paths.jobs / "web/config/bpm.yml").write_text(os.environ["BPM_YML"])

# Other tests on this kernel have jobs with the same names, so create the job cgroups below a cgroup of this process.
groups = []
for hierarchy in dict.fromkeys(filter(None, (cgroups.find().memory, cgroups.find().pids))):
    top = job_cgroups.parent_of_job_cgroups(hierarchy)
    group = joined = top / f"test-{uuid.uuid4()}"
    group.mkdir()
    if hierarchy.version == 2:
        # As systemd does, delegate a cgroup, and put this process into a subgroup.
        (top / "cgroup.subtree_control").write_text("+memory +pids")
        os.setxattr(group, "user.delegate", b"1")
        joined = group / "agent"
        joined.mkdir()
    (joined / "cgroup.procs").write_text("0")
    groups.append((hierarchy.levels[0], group))

def remove(group):
    for each in sorted((each for each in group.rglob("*") if each.is_dir()), reverse=True):
        each.rmdir()
    group.rmdir()

async def leave():
    for own, group in groups:
        (own / "cgroup.procs").write_text("0")
        for _ in range(1000):  # killed processes may still be exiting
            try:
                remove(group)
                break
            except OSError:
                await asyncio.sleep(0.01)

def monit(*names):
    tool = "/var/vcap/jobs/bpm/bin/bpm"
    return [JobFile("web", "", "".join(f'''check process {name} with pidfile {paths.sys}/run/bpm/web/{name}.pid
  start program "{tool} start web -p {name}"
  stop program "{tool} stop web -p {name}"
  group vcap
''' for name in names))]

def log(name, stream="stdout"):
    path = paths.sys / f"log/web/{name}.{stream}.log"
    return path.read_text() if path.exists() else ""

def info(name):
    return next(each for each in supervisor.services() if each.process.name == name)

events = []
supervisor = Supervisor(paths, notify=events.append, timing=Timing(settle=0.2))
async def isolation(found=sandbox.isolation, **fewer):
    return (await found())._replace(level=int(os.environ["LEVEL"]), **fewer)

sandbox.isolation = isolation
stranger = process.spawn([process.SETPRIV, "--reuid=vcap", "--clear-groups", "/bin/sleep", "600"], env={})
with reaper.reaping():
    try:
BODY
    finally:
        await supervisor.stop(wait=True)
        await supervisor.close()
        stranger.send(signal.SIGKILL)
        await stranger.wait()
        await leave()
"""

LOOK = r"""
import ctypes, json, os, resource, signal, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
def can(do, *arguments):
    try:
        return do(*arguments) is not False
    except (OSError, subprocess.SubprocessError):
        return False
def run(path):
    subprocess.run([path], check=True, stdout=-3, stderr=-3)
def call(name, *arguments):
    return getattr(libc, name)(*arguments) == 0
def other():
    return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and seen(pid) == b"/bin/sleep\0" + b"600\0"]
def seen(pid):
    try:
        return open(f"/proc/{pid}/cmdline", "rb").read()
    except OSError:
        return b""
def mount_in_user_namespace():
    if os.fork() == 0:
        made = libc.unshare(0x10020000) == 0
        os._exit(0 if made and libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0 else 1)
    return os.wait()[1] == 0
def write(path):
    open(path, "w").close()
def closed(path):
    # Return whether the path is empty or unreadable, and whether it cannot be written.
    try:
        content = os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(1)
    except OSError:
        content = ""
    return [not content, not os.access(path, os.W_OK)]
is_harmless = os.getuid() != 0  # as root without namespaces, the attempts would succeed on the machine of the tests
status = dict(line.rstrip("\n").split(":\t", 1) for line in open("/proc/self/status") if ":\t" in line)
outside = int(os.environ["OUTSIDE"])
base = "/var/vcap"
print(json.dumps({
    "ids": [os.getuid(), os.geteuid(), os.getgid(), os.getegid(), os.getgroups()],
    "capabilities": [status["CapEff"], status["CapBnd"], status["CapAmb"]],
    "nothing gained": status["NoNewPrivs"],
    "ignored": int(status["SigIgn"], 16), "blocked": int(status["SigBlk"], 16),
    "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "core": resource.getrlimit(resource.RLIMIT_CORE),
    "executable": os.readlink("/proc/self/exe"),
    "directory": os.getcwd(), "arguments": sys.argv[1:], "umask": os.umask(0o22),
    "environment": {k: v for k, v in os.environ.items() if k not in ("OUTSIDE", "LC_CTYPE")},
    "spared": int(open("/proc/self/oom_score_adj").read()),
    "closed": {path: closed(path) for path in (
        "/etc/sv", "/proc/kcore", "/proc/timer_list", "/sys/firmware", "/proc/sysrq-trigger", "/proc/sys/vm/swappiness",
    )},
    "own session": os.getsid(0) == os.getppid(),
    "first": seen(1)[:9].decode() if seen(1) else "",
    "sees stranger": bool(other()),
    "reads": [path for path in (
        "jobs/web/config/bpm.yml", "jobs/other/config/secret", "bosh/settings.json", "data/shown/tool",
        "data/tools/tool",
    ) if can(open, f"{base}/{path}")],
    "writes": [path for path in (
        "/etc/x", "/usr/x", "/x", "/var/tmp/x", "/tmp/x", "/proc/sys/kernel/hostname", f"{base}/x",
        f"{base}/jobs/web/x", f"{base}/packages/x", f"{base}/data/x", f"{base}/data/web/x", f"{base}/data/web/tmp/x",
        f"{base}/store/web/x", f"{base}/sys/log/web/x", f"{base}/sys/log/x", f"{base}/sys/run/web/x",
        f"{base}/sys/run/bpm/web/x", f"{base}/data/extra/x", f"{base}/data/shown/x", f"{base}/data/tools/x",
    ) if is_harmless and can(write, path)],
    "runs": [path for path in ("packages/tool/bin/tool", "data/tools/tool", "data/shown/tool")
             if can(run, f"{base}/{path}")],
    "does": is_harmless and [name for name, done in {
        "signal": can(os.kill, outside, 0),
        "trace": call("ptrace", 16, outside, None, None),
        "memory": can(open, f"/proc/{outside}/mem", "rb"),
        "mount": call("mount", b"none", b"/tmp", b"tmpfs", 0, None),
        "umount": call("umount2", b"/proc", 2),
        "mount below": mount_in_user_namespace(),
        "setuid": can(os.setuid, 0), "setgid": can(os.setgid, 0), "setgroups": can(os.setgroups, [0]),
        "chroot": can(os.chroot, "/tmp"),
        "mknod": can(os.mknod, f"{base}/data/web/tmp/node", 0o20600, os.makedev(1, 1)),
        "hostname": call("sethostname", b"x", 1),
        "su": can(run, "/bin/su"),
    }.items() if done],
}))
sys.stdout.flush()
def end(number, _):
    print("got", signal.Signals(number).name, flush=True)
    sys.exit(3)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, end)
while True:
    signal.pause()
"""

BPM_YML = f"""
processes:
- &web
  name: web
  executable: {PYTHON}
  args: [-I, -S, /var/vcap/jobs/web/bin/look, 1.10]
  env: {{NAME: value, OUTSIDE: "OUTSIDE_PID"}}
  hooks: {{pre_start: /var/vcap/jobs/web/bin/hook}}
  limits: {{memory: 200M, open_files: 123, processes: 40, core_file_size: 4096}}
  ephemeral_disk: true
  persistent_disk: true
  additional_volumes:
  - {{path: /var/vcap/data/extra, writable: true}}
  - {{path: /var/vcap/data/tools, allow_executions: true, mount_only: true}}
  - {{path: /var/vcap/data/shown, mount_only: true}}
  unsafe: &unsafe {{unrestricted_volumes: [{{path: {sys.base_prefix}, allow_executions: true}}]}}
  shutdown_signal: INT
- name: free
  executable: {PYTHON}
  args: [-I, -S, /var/vcap/jobs/web/bin/look]
  env: {{OUTSIDE: "OUTSIDE_PID"}}
  unsafe: {{<<: *unsafe, privileged: true}}
- name: seeing
  executable: {PYTHON}
  args: [-I, -S, /var/vcap/jobs/web/bin/look]
  env: {{OUTSIDE: "OUTSIDE_PID"}}
  unsafe: {{<<: *unsafe, host_pid_namespace: true}}
- name: worker
  executable: {PYTHON}
  args: [-I, -S, /var/vcap/jobs/web/bin/look]
  env: {{OUTSIDE: "OUTSIDE_PID"}}
  capabilities: [NET_BIND_SERVICE]
  workdir: /var/vcap/packages
  unsafe: *unsafe
- name: hungry
  executable: {PYTHON}
  args: [-I, -S, -c, "import time; x = bytearray(120 << 20); time.sleep(600)"]
  limits: {{memory: 64M}}
  unsafe: *unsafe
- name: forker
  executable: /bin/sh
  args: [-c, "for i in 1 2 3 4 5 6 7 8; do sleep 600 & done; echo all; wait"]
  limits: {{processes: 6}}
"""

RUN_ALL = """
import json
config = paths.jobs / "web/config/bpm.yml"
config.write_text(config.read_text().replace("OUTSIDE_PID", str(stranger.pid)))
names = ("web", "worker", "free", "seeing")
await supervisor.configure(monit(*names))
await supervisor.start()
await until(lambda: all("}" in log(name) for name in names))
pids = {name: info(name).pid for name in names}
files = {name: int((paths.sys / f"run/bpm/web/{name}.pid").read_text()) for name in names}
assert pids == files, (pids, files)
modes = {str(path): oct((paths.base / path).stat().st_mode & 0o777) for path in (
    "sys/run/bpm/web", "sys/run/web", "data/web", "data/web/tmp", "store/web", "data/extra",
    "sys/log/web/web.stdout.log")}
volumes = [oct((paths.base / path).stat().st_mode & 0o777) for path in ("data/extra", "data/tools", "data/shown")]
pidfiles = sorted(path.name for path in paths.sys.glob("run/bpm/web/*.pid"))
offered = await supervisor.bpm.isolation()
owners = sorted({path: (paths.base / path).owner() for path in modes}.items())
await supervisor.stop(wait=True)
left = [pid for pid, owner in ((pid, proc.stat(pid)) for pid in pids.values()) if owner and owner.is_alive]
hook, web, last = log("web").splitlines()
return {"hook": hook, "web": json.loads(web), **{name: json.loads(log(name).splitlines()[0]) for name in names[1:]},
        "last": [last, log("worker").splitlines()[-1]], "left": left, "modes": modes, "owners": owners,
        "modes of volumes": volumes, "pidfiles before": pidfiles,
        "limits memory": offered.memory, "limits processes": offered.processes,
        "pidfiles": [str(path) for path in paths.sys.glob("run/bpm/web/*.pid")],
        "errors": log("web", "stderr") + log("worker", "stderr")}
"""

COMMON_WRITES = {
    "/var/vcap/data/web/x",
    "/var/vcap/data/web/tmp/x",
    "/var/vcap/store/web/x",
    "/var/vcap/sys/log/web/x",
    "/var/vcap/sys/run/web/x",
    "/var/vcap/data/extra/x",
    "/tmp/x",
    "/var/tmp/x",
}


def run(inside: Inside, level: int, body: str) -> Any:
    """Run ``body`` with a supervisor that uses isolation level ``level``. Return what ``body`` returns."""
    indented = "\n".join(f"        {line}" for line in body.strip().splitlines())
    text = SETUP.replace("BODY", f"{indented}")
    environment = [f"LEVEL={level}", f"LOOK={LOOK}", f"BPM_YML={BPM_YML}"]
    return inside(text, "env", *environment)


@pytest.fixture(scope="module")
def known() -> dict[int, Any]:
    """Provide a dictionary that caches the jobs' observations by isolation level for all of the module's tests."""
    return {}


@pytest.fixture
def look(inside: Inside, known: dict[int, Any]) -> Callable[[int], Any]:
    """Provide a function that returns what the jobs in ``BPM_YML`` observed at an isolation level."""

    def seen(level: int) -> Any:
        if level not in known:
            known[level] = run(inside, level, RUN_ALL)
        return known[level]

    return seen


def has_rules(cell: str) -> bool:
    """Return True if a cell of the documented table says that a job's access is restricted to what the key grants."""
    return not re.search("not enforced|not restricted|^only the container's privileges$", cell)


CLOSED = {"jobs/other/config/secret", "bosh/settings.json"}
SHOWN: dict[str, Callable[[Any, str], tuple[Any, Any]]] = {
    "name": lambda found, _: (found["pidfiles before"], ["free.pid", "seeing.pid", "web.pid", "worker.pid"]),
    "executable": lambda found, _: (found["web"]["executable"], PYTHON),
    "args": lambda found, _: (found["web"]["arguments"], ["1.10"]),
    "env": lambda found, _: (found["web"]["environment"]["NAME"], "value"),
    "workdir": lambda found, _: (found["worker"]["directory"], "/var/vcap/packages"),
    "hooks.pre_start": lambda found, _: (found["hook"], "hook 0 value"),
    "capabilities": lambda found, _: ([int(each, 16) for each in found["worker"]["capabilities"]], [1 << 10] * 3),
    "limits.memory": lambda found, cell: (found["limits memory"], cell.startswith("cgroup")),
    "limits.open_files": lambda found, _: (found["web"]["files"], [123, 123]),
    "limits.processes": lambda found, cell: (found["limits processes"], cell == "with a cgroup"),
    "limits.core_file_size": lambda found, _: (found["web"]["core"], [4096, 4096]),
    "ephemeral_disk": lambda found, cell: (
        ["/var/vcap/data/web/x" in found["web"]["writes"], "/var/vcap/data/web/x" in found["worker"]["writes"]],
        [True, not has_rules(cell)],
    ),
    "persistent_disk": lambda found, cell: (
        ["/var/vcap/store/web/x" in found["web"]["writes"], "/var/vcap/store/web/x" in found["worker"]["writes"]],
        [True, not has_rules(cell)],
    ),
    "additional_volumes[].path": lambda found, cell: (
        CLOSED & set(found["web"]["reads"]),
        set() if has_rules(cell) else CLOSED,
    ),
    "additional_volumes[].writable": lambda found, cell: (
        ["/var/vcap/data/extra/x" in found["web"]["writes"], "/var/vcap/data/shown/x" in found["web"]["writes"]],
        [True, not has_rules(cell)],
    ),
    "additional_volumes[].allow_executions": lambda found, cell: (
        ["data/tools/tool" in found["web"]["runs"], "data/shown/tool" in found["web"]["runs"]],
        [True, not has_rules(cell)],
    ),
    "additional_volumes[].mount_only": lambda found, _: (found["modes of volumes"], ["0o700", "0o755", "0o755"]),
    "additional_volumes[].shared": lambda _, cell: (cell in ("yes", "no effect, because nothing is mounted"), True),
    "unsafe.privileged": lambda found, cell: (
        [found["free"]["ids"][0], found["free"]["nothing gained"], CLOSED & set(found["free"]["reads"])],
        [0, "0", set() if cell == "yes" else CLOSED],
    ),
    "unsafe.unrestricted_volumes": lambda found, _: (found["web"]["executable"].startswith(sys.base_prefix), True),
    "unsafe.host_pid_namespace": lambda found, cell: (
        [[each["sees stranger"], "signal" in each["does"]] for each in (found["web"], found["seeing"])],
        [[cell != "yes", cell == "always on"], [True, True]],
    ),
    "shutdown_signal": lambda found, _: (found["last"], ["got SIGINT", "got SIGTERM"]),
}
"""For each bpm.yml key, a function that returns the observed value and the value that docs/bpm.md promises at a
level.
"""


def test_every_documented_bpm_key_has_a_check() -> None:
    assert SHOWN.keys() == HONOURED.keys()


@pytest.mark.attack("a bpm process reads another job's files or the agent's settings")
@pytest.mark.attack("root in a container escapes from a bpm sandbox with a mount")
@pytest.mark.parametrize("level", [1, 2, 3])
def test_bpm_keys_have_the_documented_effect(look: Callable[[int], Any], level: int) -> None:
    """Jobs that use every bpm.yml key report their files, ids, limits, signals and environment. The reports must
    agree with docs/bpm.md, which says which keys take effect at each level.
    """
    found = look(level)

    for key, shown in SHOWN.items():
        seen, said = shown(found, HONOURED[key][level - 1])
        assert seen == said, key


@pytest.mark.attack("a bpm process gains capabilities, or keeps the agent's groups or descriptors")
@pytest.mark.parametrize("level", [1, 2, 3])
def test_bpm_job_runs_in_the_same_default_context_as_under_bpm(look: Callable[[int], Any], level: int) -> None:
    """The context is everything that bpm.yml does not configure, such as ids, umask, environment and pidfiles."""
    found = look(level)
    web, worker = found["web"], found["worker"]

    assert found["errors"] == ""
    assert (found["left"], found["pidfiles"]) == ([], [])
    assert set(found["modes"].values()) == {"0o700", "0o600"}
    assert [path for path, owner in found["owners"] if owner != "vcap"] == ["sys/run/bpm/web"]
    for each in (web, worker):
        assert each["ids"] == [1000, 1000, 1000, 1000, []]
        assert (each["nothing gained"], each["umask"], each["own session"]) == ("1", 0o22, True)
        assert each["spared"] == 0
        # The job is a Python program, and Python itself ignores SIGPIPE and SIGXFSZ. glibc's two internal signals (32
        # and 33) are ignored in every child of posix_spawn.
        assert (each["blocked"], each["ignored"] & ~(3 << 31)) == (0, 1 << 12 | 1 << 24)
        assert "packages/tool/bin/tool" in each["runs"]
    assert [int(each, 16) for each in web["capabilities"]] == [0, 0, 0]
    assert web["directory"] == "/var/vcap/jobs/web"
    assert web["environment"] == {
        "NAME": "value",
        "TMPDIR": "/var/vcap/data/web/tmp",
        "LANG": "en_US.UTF-8",
        "HOME": "/var/vcap/data/web",
        "PATH": "/var/vcap/jobs/web/bin:/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin:.",
    }
    assert {"jobs/web/config/bpm.yml", "data/shown/tool", "data/tools/tool"} <= set(web["reads"])
    # Other files stay read-only at every level because their modes deny vcap write access.
    assert set(web["writes"]) - {"/var/vcap/data/shown/x"} == COMMON_WRITES


@pytest.mark.attack("a bpm process uses kernel interfaces that it does not need, such as /proc/kcore")
def test_bpm_masks_kernel_paths(look: Callable[[int], Any]) -> None:
    masked = {"/etc/sv", "/proc/kcore", "/proc/timer_list", "/sys/firmware"}
    web, free = look(1)["web"]["closed"], look(1)["free"]["closed"]

    assert {path for path, (is_empty, _) in web.items() if is_empty} >= masked
    assert {path for path, (_, is_read_only) in web.items() if is_read_only} >= web.keys() - masked
    assert not free["/etc/sv"][0]
    assert not free["/proc/sys/vm/swappiness"][1]


@pytest.mark.attack("a bpm process affects other processes, mounts file systems or gains rights outside its sandbox")
@pytest.mark.parametrize("level", [1, 2])
def test_bpm_job_cannot_escape_its_isolation(look: Callable[[int], Any], level: int) -> None:
    """At level 3, which has no such isolation, the same job must be able to signal other processes. Otherwise, this
    test would prove nothing.
    """
    assert look(level)["web"]["does"] == []
    assert "signal" in look(3)["web"]["does"]


OUT_OF_MEMORY = """
paths_of = monit("hungry")
# This process must keep its pid, which shows that only the process above its limit was killed.
await supervisor.configure([*paths_of, JobFile("other", "", f'''check process other with pidfile {paths.base}/other.pid
  start program "/bin/sh -c 'echo $$ >{paths.base}/other.pid; exec sleep 600'"
  stop program "/bin/sh -c 'kill $(cat {paths.base}/other.pid)'"
  group vcap
''')])
await supervisor.start()
watching = asyncio.create_task(supervisor.run())
other = (await until(lambda: info("other") if info("other").pid else None)).pid
event = await until(lambda: next((each for each in events if each.event == "Resource limit matched"), None))
await until(lambda: info("hungry").restarts > 0)
watching.cancel()
isolation = await supervisor.bpm.isolation()
return [event.service, event.description, info("other").pid == other, isolation.memory,
        [info("hungry").last_exit, info("hungry").oom_kills - sum(info("hungry").exits.values())]]
"""

WITHOUT_CGROUPS = """
sandbox.isolation = lambda: isolation(memory=False, processes=False)
"""


@pytest.mark.attack("a bpm process exceeds its memory or process limit")
@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("has_cgroups", [True, False])
def test_bpm_process_above_its_memory_limit_is_killed_and_reported(
    inside: Inside, level: int, has_cgroups: bool
) -> None:
    """Without a cgroup, the process is killed by the agent's watchdog instead of the kernel."""
    body = ("" if has_cgroups else WITHOUT_CGROUPS) + OUT_OF_MEMORY
    found = run(inside, level, body)
    service, description, is_other_alive, has_limit, end = found

    if has_cgroups and not has_limit:
        pytest.skip("no cgroup can be made here")
    assert (service, is_other_alive) == ("hungry", True)
    assert end == ["SIGKILL, out of memory", 0], "it must be killed only for exceeding its memory limit"
    said = re.fullmatch(
        r"out of memory: process hungry of job web used ([0-9.]+) MiB, its limit is 64.0 MiB: it was killed",
        description,
    )
    assert said is not None
    # The kernel prevents a process from exceeding the limit, whereas the watchdog acts after the process has exceeded
    # it.
    assert float(said[1]) == 64 if has_cgroups else float(said[1]) > 64


PROCESSES = """
await supervisor.configure(monit("forker"))
await supervisor.start()
await until(lambda: "fork" in log("forker", "stderr"))
return [log("forker"), log("forker", "stderr"), (await supervisor.bpm.isolation()).processes]
"""


VOLUME_OF_EVERYTHING = """
(paths.jobs / "web/config/bpm.yml").write_text('''
processes:
- name: web
  executable: /bin/sh
  args:
  - -c
  - |
    for path in /etc/open /var/vcap/jobs/web/open /var/vcap/jobs/other/open /dev/null; do
      (: >>$path) && echo writes $path
      (: <$path) && echo reads $path
    done 2>/dev/null
    (: <>/dev/ptmx) && echo has terminals
    exec sleep 600
  unsafe: {unrestricted_volumes: [{path: /, writable: IS_WRITABLE}]}
''')
for path in (paths.etc / "open", paths.jobs / "web/open", paths.jobs / "other/open"):
    path.touch()
    path.chmod(0o666)
await supervisor.configure(monit("web"))
await supervisor.start()
await until(lambda: "terminals" in log("web") or info("web").reason)
return [sorted(log("web").splitlines()), log("web", "stderr"), info("web").reason]
"""


@pytest.mark.attack("a bpm process gains capabilities, or keeps the agent's groups or descriptors")
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("is_writable", [True, False])
def test_bpm_volume_may_be_the_root_directory(inside: Inside, level: int, is_writable: bool) -> None:
    """Paths that bpm itself mounts must keep their own access rights.

    With Landlock, a writable root directory makes everything writable, because Landlock cannot restrict a path below a
    directory to which it has granted access.
    """
    said, errors, reason = run(inside, level, VOLUME_OF_EVERYTHING.replace("IS_WRITABLE", str(is_writable).lower()))

    assert (errors, reason) == ("", "")
    own, other, system = "/var/vcap/jobs/web/open", "/var/vcap/jobs/other/open", "/etc/open"
    writes = {"/dev/null"} | ({other} if is_writable else set())
    if is_writable and HONOURED["unsafe.unrestricted_volumes"][level - 1] != "yes":
        writes |= {own, system}
    wanted = ["has terminals", *(f"reads {path}" for path in ("/dev/null", own, other, system))]
    assert said == sorted([*wanted, *(f"writes {path}" for path in writes)])


PACKAGE_IN_PLACE = """
from agent_shim.supervisor.bpm.calls import BpmCall
there = paths.base / "release/packages/far"
shutil.rmtree(there, ignore_errors=True)
(there / "bin").mkdir(parents=True)
shutil.copy("/bin/true", there / "bin/far")
(there.parent / "beside").write_text("beside")
(paths.data_packages / "far").mkdir()
(paths.data_packages / "far/1").symlink_to(there)
(paths.packages / "far").symlink_to(paths.data_packages / "far/1")
(paths.jobs / "web/config/bpm.yml").write_text('''
processes:
- name: far
  executable: /var/vcap/packages/far/bin/far
- name: beside
  executable: /bin/cat
  args: [/var/vcap/release/packages/beside]
''')
return [await supervisor.bpm.run(BpmCall("start", "web", name), [], {}) for name in ("far", "beside")]
"""


@pytest.mark.parametrize("level", [1, 2])
def test_bpm_job_can_run_packages_from_a_standalone_directory(inside: Inside, level: int) -> None:
    """Without a Director, the packages are links into the deployed directory. The job must not be able to read other
    files in that directory.
    """
    assert run(inside, level, PACKAGE_IN_PLACE) == [0, 1]


ALL_JOBS = """
from agent_shim.supervisor.bpm.calls import BpmCall
rendered = paths.data / "jobs/web/1"
rendered.parent.mkdir(parents=True)
(paths.jobs / "web").rename(rendered)
(paths.jobs / "web").symlink_to(rendered)
(rendered / "bin/web").write_text("#!/bin/sh\\nexec ls /var/vcap/jobs /var/vcap/jobs/web/bin/web\\n")
(rendered / "bin/web").chmod(0o755)
(rendered / "config/bpm.yml").write_text('''
processes:
- name: web
  executable: /var/vcap/jobs/web/bin/web
  unsafe: {unrestricted_volumes: [{path: /var/vcap/jobs}]}
''')
return [await supervisor.bpm.run(BpmCall("start", "web", "web"), [], {}), log("web"), log("web", "stderr")]
"""


@pytest.mark.parametrize("level", [1, 2])
def test_bpm_volume_may_be_the_jobs_directory(inside: Inside, level: int) -> None:
    """health_monitor requests the jobs directory as a volume. It must be possible to run the job's own program there,
    although the path contains a link.
    """
    code, said, errors = run(inside, level, ALL_JOBS)

    assert (code, errors) == (0, "")
    assert said.split()[0] == "/var/vcap/jobs/web/bin/web"
    assert {"other", "web"} <= set(said.split())


SHARED = """
(paths.jobs / "web/config/bpm.yml").write_text(f'''
processes:
- name: web
  executable: /bin/sh
  args:
  - -c
  - |
    for volume in shared own; do
      mkdir -p /var/vcap/data/$volume/inside /var/vcap/data/$volume/outside
      mount -t tmpfs none /var/vcap/data/$volume/inside && : >/var/vcap/data/$volume/inside/x
    done
    echo mounted
    until [ -e /var/vcap/data/shared/outside/x ]; do sleep 0.05; done
    ls -d /var/vcap/data/*/*/x
    exec sleep 600
  additional_volumes:
  - {{path: /var/vcap/data/shared, writable: true, shared: true}}
  - {{path: /var/vcap/data/own, writable: true}}
  unsafe: {{privileged: true}}
''')
await supervisor.configure(monit("web"))
await supervisor.start()
await until(lambda: "mounted" in log("web") or info("web").reason)
outside = sorted(str(path) for path in paths.data.glob("*/*/x"))
for volume in ("shared", "own"):
    subprocess.run(["mount", "-t", "tmpfs", "none", paths.data / volume / "outside"], check=True)
    (paths.data / volume / "outside/x").touch()
await until(lambda: "outside/x" in log("web"))
inside = log("web").split()[1:]
await supervisor.stop(wait=True)
for each in ("shared/inside", "shared/outside", "own/outside"):
    subprocess.run(["umount", paths.data / each], check=True)
return [outside, inside, log("web", "stderr")]
"""


@pytest.mark.attack("root in a container escapes from a bpm sandbox with a mount")
def test_mounts_below_shared_bpm_volumes_propagate_in_both_directions(inside: Inside) -> None:
    """Below volumes that are not shared, mounts propagate only from the machine to the job, or not at all."""
    outside, inner, errors = run(inside, 1, SHARED)

    assert errors == ""
    assert outside == ["/var/vcap/data/shared/inside/x"]
    assert [path for path in inner if "/shared/" in path] == [
        "/var/vcap/data/shared/inside/x",
        "/var/vcap/data/shared/outside/x",
    ]
    assert "/var/vcap/data/own/inside/x" in inner


@pytest.mark.attack("a bpm process exceeds its memory or process limit")
@pytest.mark.parametrize("level", [1, 2, 3])
def test_bpm_limits_the_number_of_processes(inside: Inside, level: int) -> None:
    out, errors, has_limit = run(inside, level, PROCESSES)

    assert has_limit
    assert "all" not in out
    assert "annot fork" in errors


NEXT_AGENT = """
config = paths.jobs / "web/config/bpm.yml"
config.write_text(config.read_text().replace("OUTSIDE_PID", str(stranger.pid)))
await supervisor.configure(monit("web", "worker"))
await supervisor.start()
await until(lambda: all("}" in log(name) for name in ("web", "worker")))
before = {name: info(name).pid for name in ("web", "worker")}
await supervisor.close()
supervisor = await Supervisor(paths, notify=events.append, timing=Timing(settle=0.2)).__aenter__()
await supervisor.recover()
await until(lambda: all(each.state == "running" for each in supervisor.services()))
adopted = {name: info(name).pid for name in ("web", "worker")}
below = proc.descent(proc.children(proc.table()), before.values())
commands = sorted(command for pid in below if (command := proc.command_line(pid)))
process.send(proc.stat(before["worker"]).identity, signal.SIGKILL)
await until(lambda: info("worker").last_exit == "SIGKILL")
await supervisor.stop(wait=True)
left = [pid for pid in below if (found := proc.stat(pid)) and found.is_alive]
return [before == adopted, log("web").splitlines()[-1], left, commands]
"""


@pytest.mark.parametrize("level", [1, 2, 3])
def test_restarted_agent_adopts_an_isolated_bpm_process(inside: Inside, level: int) -> None:
    same, last, left, commands = run(inside, level, NEXT_AGENT)

    assert same
    assert last == "got SIGINT"
    assert left == []
    assert len(commands) == 4, f"an init stands above each: {commands}"


ISOLATION = """
from agent_shim.host import sandbox
return list(await sandbox.isolation())
"""


def test_bpm_isolation_level_follows_the_containers_privileges(inside: Inside) -> None:
    assert inside(ISOLATION)[:2] == [1, ""]
    without = inside(ISOLATION, "setpriv", "--bounding-set", "-sys_admin")
    assert without[:2] == [2, "create namespaces: Operation not permitted"]


INIT = """
def running(pid):
    return [found for each in proc.descent(proc.children(proc.table()), [pid]) if (found := proc.stat(each))]
places = [sandbox.bind_mount(each, run=True) for each in sandbox.SYSTEM]
script = "trap 'exit 7' TERM; (sh -c 'exit 0' & sh -c 'sleep 0.1' &) ; echo up; while :; do sleep 0.05; done"
members = dict(uid=1000, gid=1000, env={"PATH": "/bin"}, binds=places, namespaces=list(sandbox.NAMESPACES))
members |= {"has_init": True, "inits": INITS}
codes = []
for number, to_child in ((signal.SIGTERM, False), (signal.SIGKILL, True)):
    out = paths.base / f"data/out{number}"
    order = sandbox.exec_spec(["/bin/sh", "-c", script], **members)
    async def start(argv, stdin):
        return process.spawn(argv, env={}, stdin=stdin, stdout=out, stderr=out)
    async with sandbox.prepared(order, start) as one:
        pass
    await until(lambda: "up" in out.read_text())
    init = proc.command_line(one.pid).split(" ")[0]
    # The loop has at most one child at a time. All other children must have been reaped by the init.
    await until(lambda: len(running(one.pid)) <= 3 and all(each.is_alive for each in running(one.pid)))
    child = next(each for each in running(one.pid) if each.parent == one.pid)
    process.send(child.identity if to_child else one.identity, number)
    codes.append(await one.wait())
return [codes, init]
"""


@pytest.mark.parametrize("inits", [list(sandbox.INITS), []])
def test_first_process_in_a_bpm_namespace_is_an_init(inside: Inside, inits: list[str]) -> None:
    """The namespace uses the container's init program if there is one, and otherwise the agent's own. Both forward
    signals, reap orphans and exit with the program's exit status.
    """
    codes, init = run(inside, 1, INIT.replace("INITS", repr(inits)))

    assert codes == [7, 137]
    if not inits:
        assert init == sys.executable
