#!/usr/bin/python3 -IS
""":"
return 0 2>/dev/null
"""

# This program replaces every program in a package. Depending on how it was started, it keeps running, forks and writes
# its pidfile, or exits immediately like a tool. It reads plan.json, which tools/comparison/plan.py writes. The lines
# above are also valid shell code, so that nothing happens if a script sources this file.
import json
import os
import re
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

HOME = "/var/vcap/packages/stand_in"
OBSERVER = ("127.0.0.1", 59999)
MEMORY_MB = 90
PATIENCE_S = 1.0  # time limit for a script to write a pidfile
REPLY = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\nok\n"


def say(event: str, name: str = "") -> None:
    told = {"event": event, "name": name or os.path.basename(sys.argv[0]), "argv": sys.argv[:12], "pid": os.getpid()}
    if not event.startswith("SIG"):
        told["context"] = context()
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(json.dumps(told).encode(), OBSERVER)


def context() -> dict[str, Any]:
    """Return everything that this process has inherited.

    The environment is read from the kernel, because Python may have added LC_CTYPE to its own copy.
    """
    with open("/proc/self/environ", "rb") as file:
        entries = [entry.partition("=") for entry in os.fsdecode(file.read()).split("\0") if entry]
    umask = os.umask(0)
    os.umask(umask)
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    limits = {name[7:].lower(): resource.getrlimit(getattr(resource, name)) for name in names}
    return {
        "environment": {name: value for name, _, value in entries},
        "umask": f"{umask:03o}",
        "user": f"{os.getuid()}:{os.getgid()} {sorted(os.getgroups())}",
        "limits": limits,
        "directory": os.getcwd(),
    }


def tell() -> None:
    """Report that a script was run, and delay the script if the ``slow`` file lists it.

    The script's path and arguments are this program's arguments.
    """
    say("script", " ".join(sys.argv[1:]))
    try:
        with open(HOME + "/slow") as file:
            seconds, *slow = file.read().splitlines()
    except OSError:
        return
    if " ".join(sys.argv[1:]) in slow:
        time.sleep(float(seconds))


def ancestors() -> Iterator[tuple[int, str]]:
    """Yield the pid and command line of this process and of each of its ancestors."""
    pid = os.getpid()
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat") as stat, open(f"/proc/{pid}/cmdline") as line:
                yield pid, line.read().replace("\0", " ")
                pid = int(stat.read().rpartition(")")[2].split()[1])
        except OSError:
            return


def pids_in(path: str) -> set[int]:
    try:
        with open(path) as file:
            return {int(word) for word in file.read(100).split() if word.isdigit()}
    except OSError:
        return set()


def named_pidfile() -> str:
    """Return the first pidfile mentioned in the arguments or in a file that they name, or "" if there is none."""
    texts = list(sys.argv[1:])
    for word in sys.argv[1:]:
        path = word.rpartition("=")[2]
        if path.startswith("/var/vcap/") and os.path.isfile(path) and os.access(path, os.R_OK):
            with open(path, errors="replace") as file:
                texts.append(file.read(1 << 20))
    places = [
        place for text in texts for place in re.findall(r"/var/vcap/[\w./-]+\.pid\b|/var/vcap/[\w./-]+/pid\b", text)
    ]
    return places[0] if places else ""


def found(plan: Any) -> tuple[str, str]:
    """Return the service to which this process belongs, and the pidfile that it must write.

    Each is "" if there is none. If both are "", this process acts as a tool.
    """
    if [os.path.basename(sys.argv[0]), *sys.argv[1:2]] == ["docker", "inspect"]:
        return "", ""  # A tool must exit, because a start program waits until the tool's output ends.
    if plan["bpm"] and os.environ.get("TMPDIR") == plan["tmp"]:
        is_main = os.getsid(0) == os.getpid() or os.getpgid(0) == os.getpid() or os.getppid() <= 1
        marked = os.environ.get("BPM_STAND_IN") or ""
        own = [one for name, one in plan["bpm"].items() if name in marked]
        lines = [line for _, line in ancestors()]
        own += [plan["bpm"][name] for name, text in plan["commands"].items() if any(text in line for line in lines)]
        own = own or list(plan["bpm"].values())
        pidfile = named_pidfile()
        is_main = is_main or os.path.basename(sys.argv[0]) in plan["lives"]
        return (own[-1], "") if is_main else (own[-1] if pidfile else "", pidfile)
    above = list(ancestors())
    lines = [line for _, line in above]
    is_start = any(start and start in line for line in lines for start in plan["starts"])
    if not is_start and any(re.search(r"/bin/(pre-|post-|drain)", line) for line in lines):
        return "", ""
    pidfile = named_pidfile()
    services = plan["services"].items()
    if pidfile:
        return next((name for name, one in services if one["pidfile"] == pidfile), pidfile), pidfile
    give_up_at = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up_at:
        for name, one in services:
            if one["pidfile"] and pids_in(one["pidfile"]) & {pid for pid, _ in above[:3]}:
                return name, ""
        time.sleep(0.01)
    if is_start and os.path.basename(sys.argv[0]) in plan["lives"]:
        for name, one in services:
            if one["pidfile"] and any(one["start"] in line for line in lines) and not living(one["pidfile"]):
                os.makedirs(os.path.dirname(one["pidfile"]), exist_ok=True)
                return name, one["pidfile"]
    return "", ""


def living(pidfile: str) -> bool:
    return any(os.path.exists(f"/proc/{pid}") for pid in pids_in(pidfile))


def servers() -> list[int]:
    """Return the pids of stand-ins that act as long-running processes."""
    found = []
    with open("/proc/uptime") as file:
        up = float(file.read().split()[0])
    for name in os.listdir("/proc"):
        try:
            with open(f"/proc/{name}/cmdline") as line, open(f"/proc/{name}/stat") as stat:
                began = int(stat.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
                words = line.read().split("\0")
                is_program = "/packages/" in "".join(words[2:3]) and "/stand_in/" not in "".join(words[2:3])
                if name.isdigit() and is_program and up - began > PATIENCE_S + 1:
                    found.append(int(name))
        except OSError:
            continue
    return found


def answer() -> None:
    """Print the output that start programs expect from a tool with this program's name and arguments."""
    words = " ".join(sys.argv[1:])
    if os.path.basename(sys.argv[0]) == "yq":
        with open(sys.argv[-1]) as file:
            print(looked_up(words, file.read()))
    elif "getpid" in words:
        print(*servers()[:1])
    elif sys.argv[1:] == ["status"] and not servers():
        sys.exit(1)


def looked_up(words: str, text: str) -> str:
    """Return the value at a yq path such as ``.a.b[env(NAME)].c`` in YAML that consists of nested mappings."""
    path = re.findall(
        r"[\w-]+", re.sub(r"env\((\w+)\)", lambda found: os.environ[found[1]], words.split(maxsplit=1)[0])
    )
    here: list[tuple[int, str]] = []
    for line in text.splitlines():
        key, _, value = line.strip().partition(":")
        depth = len(line) - len(line.lstrip())
        here = [one for one in here if one[0] < depth] + [(depth, key)]
        if [name for _, name in here] == path:
            return value.strip(" \"'")
    return "null"


class Ports:
    """A service's listening sockets. They are closed while the ``closed`` file exists."""

    def __init__(self, wanted: list[Any]) -> None:
        self.wanted = wanted
        self.open: dict[str, socket.socket] = {}
        self.talking: list[socket.socket] = []

    def step(self) -> None:
        if os.path.exists(HOME + "/closed"):
            for listening in self.open.values():
                listening.close()
            self.open = {}
        else:
            for place in self.wanted:
                if str(place) not in self.open:
                    self.listen(place)
        readable, _, _ = select.select([*self.open.values(), *self.talking], [], [], 0.2)
        for one in readable:
            if one in self.talking:
                self.answer(one)
            elif one.type == socket.SOCK_STREAM:
                self.talking.append(one.accept()[0])
            else:
                one.sendto(b"ok", one.recvfrom(1024)[1])

    def listen(self, place: Any) -> None:
        kind = socket.SOCK_DGRAM if place.get("udp") else socket.SOCK_STREAM
        try:
            if "path" in place:
                listening = socket.socket(socket.AF_UNIX, kind)
                os.makedirs(os.path.dirname(place["path"]), exist_ok=True)
                if os.path.exists(place["path"]):
                    os.unlink(place["path"])
                listening.bind(place["path"])
            else:
                listening = socket.socket(socket.AF_INET, kind)
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listening.bind(("", place["port"]))
            if kind == socket.SOCK_STREAM:
                listening.listen()
            self.open[str(place)] = listening
        except OSError:
            pass  # Another stand-in is listening on this port.

    def answer(self, one: socket.socket) -> None:
        try:
            data = one.recv(4096)
            if data:
                one.sendall(REPLY)
        except OSError:
            data = b""
        if not data or b"HTTP/" in data:
            self.talking.remove(one)
            one.close()


def live(ports: list[Any]) -> None:
    def ended(number: int, _: object) -> None:
        say(signal.Signals(number).name)
        if number not in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            os._exit(0)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, ended)
    say("lives")
    listening = Ports(ports)
    held: bytearray | None = None
    while True:
        listening.step()
        if os.path.exists(HOME + "/busy"):  # While this file exists, rules about memory and CPU usage must match.
            held = held or bytearray(os.urandom(1 << 20) * MEMORY_MB)
            until = time.monotonic() + 0.4
            while time.monotonic() < until:
                pass
        else:
            held = None


def main() -> None:
    if os.path.basename(sys.argv[0]) == "told":
        tell()
        return
    tool = "/usr/bin/" + os.path.basename(sys.argv[0])
    if os.path.basename(tool) in ("bash", "curl", "jq", "openssl", "rsync") and os.path.exists(tool):
        os.execv(tool, sys.argv)
    with open(HOME + "/plan.json") as file:
        plan = json.load(file)
    name, pidfile = found(plan)
    if not name:
        say("tool")
        answer()
        return
    service = plan["services"].get(name, {"ports": plan["ports"]})
    if pidfile and name:
        if os.fork():
            os._exit(0)
        os.setsid()
        with open(pidfile, "w") as file:
            file.write(f"{os.getpid()}\n")
    live(service["ports"])


main()
