"""Tests attacks on the sandbox by a bpm process: links planted for root to follow, mounts, rules, signals and
the terminal.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.root.conftest import Inside
from tests.root.test_bpm import run
from tests.support.machine import Machine

pytestmark = pytest.mark.root

EXCHANGING = """
config = paths.jobs / "web/config/bpm.yml"
config.write_text('''
processes:
- name: web
  executable: /bin/sh
  args: [-c, "cat $TMPDIR/secret /tmp/secret 2>/dev/null; test -e /etc/passwd || echo covered; echo done"]
  ephemeral_disk: true
''')
import textwrap
from agent_shim.supervisor.bpm.calls import BpmCall
call = BpmCall("start", "web", "web")
await supervisor.bpm.run(call, [], {})
home = paths.data / "web"
exchange = f'''
import ctypes, os
os.symlink("TARGET", "{home}/link")
rename = ctypes.CDLL(None).renameat2
while True:
    rename(-100, b"{home}/link", -100, b"{home}/tmp", 2)
'''
as_vcap = [process.SETPRIV, "--reuid=vcap", "--clear-groups"]
attacker = process.spawn([*as_vcap, sys.executable, "-c", textwrap.dedent(exchange)], env={})
try:
    await until(lambda: (home / "link").is_dir())
    refused = set()
    for _ in range(60):
        try:
            await supervisor.bpm.run(call, [], {})
        except HostError as exc:
            refused.add(str(exc))
finally:
    attacker.send(signal.SIGKILL)
    await attacker.wait()
return [sorted(set(log("web").splitlines())), log("web", "stderr"), sorted(refused)]
"""


@pytest.mark.attack("a bpm process replaces its directory or volume with a link before the agent mounts it")
@pytest.mark.parametrize("target", ["/var/vcap/jobs/other/config", "/etc"])
@pytest.mark.parametrize("level", [1, 2])
def test_bpm_volume_swapped_with_a_link_shows_no_other_files(inside: Inside, level: int, target: str) -> None:
    """The job keeps swapping the volume with a link while root checks, opens and mounts it. The job must either see its
    own directory or not be started.
    """
    said, errors, refused = run(inside, level, EXCHANGING.replace("TARGET", target))

    assert said == ["done"]
    told = "the path contains a link, 'tmp', of user 1000"
    assert [line for line in errors.splitlines() if line and told not in line] == []
    assert all("tmp" in each for each in refused), refused


PLANTED = """
(paths.jobs / "web/config/bpm.yml").write_text(f'''
processes:
- name: web
  executable: /bin/sh
  args: [-c, "cat VOLUME/secret; exec sleep 600"]
  additional_volumes: [{{path: VOLUME, MORE}}]
''')
volume = Path("VOLUME")
volume.unlink(missing_ok=True)
volume.symlink_to(paths.jobs / "other/config")
os.lchown(volume, OWNER, OWNER)
before = Path("/proc/self/mountinfo").read_text()
await supervisor.configure(monit("web"))
await supervisor.start()
await until(lambda: log("web") or info("web").reason)
return [log("web"), info("web").reason, before == Path("/proc/self/mountinfo").read_text()]
"""


def planted(volume: str, owner: int, more: str = "mount_only: true") -> str:
    """Return the body of a test in which a job's volume is a link, owned by uid ``owner``, to another user's files."""
    return PLANTED.replace("VOLUME", volume).replace("OWNER", str(owner)).replace("MORE", more)


@pytest.mark.attack("a bpm process replaces its directory or volume with a link before the agent mounts it")
@pytest.mark.parametrize("more", ["mount_only: true", "mount_only: true, shared: true"])
@pytest.mark.parametrize("level", [1, 2])
def test_bpm_volume_that_is_a_link_owned_by_the_job_is_refused(inside: Inside, level: int, more: str) -> None:
    volume = "/var/vcap/data/shown/volume"
    said, reason, is_unchanged = run(inside, level, planted(volume, 1000, more))

    assert said == ""
    assert f"{volume}: the path contains a link, 'volume', of user 1000" in reason
    assert is_unchanged


@pytest.mark.attack("a bpm process replaces its directory or volume with a link before the agent mounts it")
@pytest.mark.parametrize("level", [1, 2])
def test_bpm_volume_that_is_a_root_link_in_a_job_directory_is_refused(inside: Inside, level: int) -> None:
    """Root owns the link, but the job can write to the directory and may have moved the link there."""
    said, reason, _ = run(inside, level, planted("/var/vcap/data/shown/volume", 0))

    assert said == ""
    assert "the path contains a link, 'volume', in a directory that others may write" in reason


@pytest.mark.parametrize("level", [1, 2])
def test_bpm_volume_that_is_a_link_placed_by_root_is_followed(inside: Inside, level: int) -> None:
    """Operators and pre-start scripts may replace a volume's directory with a link."""
    said, reason, _ = run(inside, level, planted("/var/vcap/data/volume", 0))

    assert (said, reason) == ("secret", "")


def test_agent_without_root_follows_only_links_owned_by_root_or_by_itself(box: Machine, inside: Inside) -> None:
    box.run(
        "mkdir -p /var/vcap/links; chmod 1777 /var/vcap/links; cd /var/vcap/links; rm -f *;"
        "for owner in 0 1000 65534; do ln -s /etc $owner; chown -h $owner $owner; done"
    )
    body = """
from agent_shim.host import trusted_path
found = []
for owner in (0, 1000, 65534):
    try:
        os.close(trusted_path.hold(f"/var/vcap/links/{owner}/passwd"))
        found.append("")
    except OSError as exc:
        found.append(exc.strerror)
return found
"""
    refused = "the path contains a link, '{}', of user {}"

    assert inside(body, "setpriv", "--reuid=65534", "--clear-groups") == ["", refused.format(1000, 1000), ""]
    assert inside(body) == ["", refused.format(1000, 1000), refused.format(65534, 65534)]


MOVING = """
(paths.jobs / "web/config/bpm.yml").write_text('''
processes:
- name: web
  executable: /bin/sh
  args: [-c, "cd /var/vcap/sys/log/web; cat NAME; mv -f post-start.stdout.log NAME; echo done"]
''')
from agent_shim.supervisor.bpm.calls import BpmCall
call = BpmCall("start", "web", "web")
secret = paths.sys / "log/web/post-start.stdout.log"
await supervisor.bpm.run(call, [], {})
secret.write_text("secret of root")
secret.chmod(0o640)
for _ in range(2):
    await supervisor.bpm.run(call, [], {})
return [log("web"), (paths.sys / "log/web/NAME").stat().st_uid]
"""


@pytest.mark.attack("a job reads the logs of root's scripts")
@pytest.mark.parametrize("name", ["bpm.log", "web.stderr.log"])
@pytest.mark.parametrize("level", [1, 2, 3])
def test_root_log_moved_to_a_bpm_log_path_is_not_given_to_the_job(inside: Inside, level: int, name: str) -> None:
    """The agent makes vcap the owner of a bpm job's own logs. The job therefore moves a log of the post-start script,
    which runs as root, to the path of one of these logs.
    """
    said, owner = run(inside, level, MOVING.replace("NAME", name))

    assert "secret" not in said
    assert said.count("done") == 3
    assert owner == 0


REACHING = """
import os, socket

def said(do, *arguments):
    try:
        do(*arguments)
    except OSError:
        return "not " + do.__name__
    return do.__name__

streams = {os.readlink(f"/proc/self/fd/{number}") for number in range(3)}
listed = {os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")[3:-1]}
print("descriptors", len(streams), sorted(listed))
print(said(os.chmod, "/var/vcap/data/tools/own", 0))
print(said(socket.socket(socket.AF_UNIX).connect, "/var/vcap/data/tools/sock"))
"""
REACHES = """
import socket
from agent_shim.supervisor.bpm.calls import BpmCall
(paths.data / "shown/reaching.py").write_text(REACHING)
own, sock = paths.data / "tools/own", paths.data / "tools/sock"
own.write_text("of another job")
sock.unlink(missing_ok=True)
with socket.socket(socket.AF_UNIX) as listening:
    listening.bind(str(sock))
    listening.listen()
    for path in (own, sock):
        shutil.chown(path, "vcap", "vcap")
    (paths.jobs / "web/config/bpm.yml").write_text(f'''
processes:
- name: web
  executable: {os.path.realpath(sys.executable)}
  args: [-S, -I, /var/vcap/data/shown/reaching.py]
  additional_volumes: [{{path: /var/vcap/data/shown}}]
  unsafe: {{unrestricted_volumes: [{{path: {sys.base_prefix}, allow_executions: true}}]}}
''')
    await supervisor.bpm.run(BpmCall("start", "web", "web"), [], {})
return log("web").splitlines()
"""


@pytest.mark.attack("a bpm process gains capabilities, or keeps the agent's groups or descriptors")
@pytest.mark.parametrize("level", [1, 2, 3])
def test_bpm_process_inherits_no_descriptors_and_reaches_other_jobs_files_only_above_level_1(
    inside: Inside, level: int
) -> None:
    """Other jobs' files and sockets are hidden only at level 1, because Landlock cannot prevent a job from changing
    modes or connecting to sockets.
    """
    descriptors, *done = run(inside, level, REACHES.replace("REACHING", repr(REACHING)))

    assert descriptors == "descriptors 3 []"
    assert done == (["not chmod", "not connect"] if level == 1 else ["chmod", "connect"])


SHELL = """
import fcntl, pty, struct, termios, msgspec
from agent_shim.edges import control_server
from agent_shim.services.bundles import install_bpm_wrapper
from agent_shim.supervisor import bpm_api
install_bpm_wrapper(paths)

async def answer(request, _line, _peer):
    return msgspec.json.encode(await bpm_api.answer(supervisor.bpm, request))

(paths.jobs / "web/config/bpm.yml").write_text(f'''
processes:
- name: web
  executable: /bin/sleep
  args: [1000]
  ephemeral_disk: true
  env: {{PS1: "% "}}
  unsafe: {{unrestricted_volumes: [{{path: {sys.base_prefix}, allow_executions: true}}]}}
''')
await supervisor.configure(monit("web"))
await supervisor.start()
await until(lambda: info("web").pid)
push = "import fcntl, termios\\nfor each in b'echo pushed\\\\n': fcntl.ioctl(0, termios.TIOCSTI, bytes([each]))"
(paths.data / "web/push").write_text(push.replace("\\\\n", chr(92) + "n"))
(paths.data / "web/.bashrc").write_text(PLANTED_RC.format(python=os.path.realpath(sys.executable)))
for name in (".bashrc", "push"):
    shutil.chown(paths.data / "web" / name, "vcap")
typed, seen = TYPED, b""
async with control_server.listening(paths.control_socket, answer):
    pid, master = pty.fork()
    if pid == 0:
        os.execv("/bin/bash", ["bash", "--norc", "--noprofile", "-c", OPERATOR])
    os.set_blocking(master, False)
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("4H", 33, 99, 0, 0))
    before = termios.tcgetattr(master)
    give_up_at = asyncio.get_running_loop().time() + 20
    while b"END" not in seen and asyncio.get_running_loop().time() < give_up_at:
        try:
            seen += os.read(master, 65536)
        except BlockingIOError:
            await asyncio.sleep(0.01)
        except OSError:
            break
        if typed and typed[0][0] in seen:
            keys = typed.pop(0)[1]
            if keys == "resize":
                fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("4H", 44, 111, 0, 0))
                keys = b""
            os.write(master, keys)
    same = termios.tcgetattr(master)[:4] == before[:4]
    process.send(proc.stat(pid).identity, signal.SIGKILL) if proc.stat(pid) else None
    os.close(master)
return [seen.decode(), same]
"""
PUSHING = """{python} /var/vcap/data/web/push && echo has pushed
exit
"""
WORKING = """PS1='% '
bind 'set enable-bracketed-paste off'
"""


def in_shell(inside: Inside, level: int, rc: str, operator: str, typed: list[tuple[bytes, Any]]) -> tuple[str, bool]:
    """Type ``typed`` into a terminal on which ``bpm shell`` runs. Return the output, and whether the operator's
    terminal has its original modes afterwards.
    """
    body = SHELL.replace("PLANTED_RC", repr(rc)).replace("OPERATOR", repr(operator)).replace("TYPED", repr(typed))
    found = run(inside, level, body)
    assert isinstance(found, list), found
    return found[0], found[1]


@pytest.mark.attack("a bpm process types into the operator's terminal, or survives the end of `bpm shell`")
@pytest.mark.parametrize("level", [1, 2, 3])
def test_bpm_shell_cannot_inject_input_into_the_operators_terminal(inside: Inside, level: int) -> None:
    """A .bashrc that the job has planted pushes a command into the terminal's input (TIOCSTI). The command must reach
    the job's shell and not the operator's.
    """
    operator = "/var/vcap/jobs/bpm/bin/bpm shell web; echo BA''CK; read line; echo got:$line; echo EN''D"
    seen, same = in_shell(inside, level, PUSHING, operator, [(b"BACK", b"operator\n")])

    assert "has pushed" in seen, "the attack was not tried"
    assert "got:operator" in seen
    assert same


@pytest.mark.parametrize("level", [1, 2, 3])
def test_bpm_shell_is_interactive(inside: Inside, level: int) -> None:
    operator = "/var/vcap/jobs/bpm/bin/bpm shell web; echo code $?; echo EN''D"
    typed: list[tuple[bytes, Any]] = [
        (b"% ", b"tty; stty size; echo fir''st\n"),
        (b"first", b"trap 'stty size; echo chan''ged' WINCH; echo trap''ped\n"),
        (b"trapped", "resize"),
        (b"changed", b"sh -c 'echo run''ning; exec sleep 1000'\n"),
        (b"running", b"\x03"),
        (b"^C", b"echo interrup''ted $?\n"),
        (b"interrupted 130", b"exit 7\n"),
    ]
    seen, same = in_shell(inside, level, WORKING, operator, typed)

    assert "/dev/pts/" in seen
    assert "33 99\r\nfirst" in seen
    assert "44 111\r\nchanged" in seen
    assert "code 7\r\nEND" in seen
    assert "no job control" not in seen
    assert same


@pytest.mark.attack("a bpm process types into the operator's terminal, or survives the end of `bpm shell`")
@pytest.mark.parametrize("level", [1, 2, 3])
def test_bpm_shell_does_not_change_the_operators_terminal_modes(inside: Inside, level: int) -> None:
    """If the shell left the terminal in raw mode without echo, the operator could not see what they type."""
    operator = "/var/vcap/jobs/bpm/bin/bpm shell web; echo EN''D"
    seen, same = in_shell(inside, level, WORKING, operator, [(b"% ", b"stty raw -echo && echo chan''ged; exit\n")])

    assert "changed" in seen, "the attack was not tried"
    assert "END" in seen
    assert same
