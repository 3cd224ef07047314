"""Determines from a job's files which programs from its packages are needed to run its lifecycle."""

from __future__ import annotations

import functools
import json
import re
import resource
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import yaml

from tools.comparison.releases import Checkout, Job

TOOLS: Final = ("curl", "jq", "openssl", "python3", "iptables", "ip6tables", "ipset", "nc", "rsync", "setpriv")
"""Programs that both environments use if this machine has them, in addition to those of a minimal Debian."""
NEVER_LIVE: Final = ("yq", "keytool", "lsb_release")
CAP_SYS_RESOURCE: Final = 24
TRIALS: Final = (
    *("death", "empty pidfile", "monit restart", "port closed", "usage", "changed file", "unmonitor"),
    *("agent restarted", "errand", "update", "start after stop", "slow start"),
)
HOOKS: Final = ("pre-start", "post-start", "post-deploy", "pre-stop", "drain", "post-stop", "run")
"""Scripts that the Director runs. If the job lacks one of them, a script is added that only reports that it was run."""
TOLD: Final = "/var/vcap/packages/stand_in/told"
SLOW_TIMEOUT_S: Final = 10
SLOW_S: Final = 16
"""Delay in seconds that makes start programs exceed their timeout."""
STAND_IN: Final = "STAND_IN"
STAND_IN_TEXT: Final = Path(__file__).with_name("stand_in.py").read_text()
_PATH: Final = re.compile(r"/var/vcap/(?:data/|jobs/[\w.-]+/)?packages/([\w.-]+)((?:/[\w.@+-]+)*)")
_ASSIGNED: Final = re.compile(
    r"^\s*(?:export\s+|declare\s+(?:-\w+\s+)*|readonly\s+|local\s+)?(\w+)=[\"']?([^\s\"';]*)", re.MULTILINE
)
_SOURCED: Final = re.compile(
    r"^\s*(?:source|\.)\s+[\"']?(/var/vcap/(?:data/|jobs/[\w.-]+/)?packages/[^\s\"';]+)", re.MULTILINE
)
_WORD: Final = re.compile(r"(?<![\w./$-])([A-Za-z][\w-]*(?:\.[a-z]+)?)(?![\w/=(.])")
_BIN: Final = re.compile(r"/(?:bin|sbin)$")
_PORT: Final = re.compile(r"\bport\s+(\d+)|\burl\s+[\"']?http://[^\s/:]+:(\d+)")
_SOCKET: Final = re.compile(r"\bunixsocket\s+[\"']?(/[^\s\"']+)")
_START: Final = re.compile(
    r"(\bstart(?:\s+program)?\s*=?\s*)(\"[^\"]+\"|'[^']+')(\s+as\s+uid\s+\S+(?:\s+and\s+gid\s+\S+)?)?"
    r"(\s+(?:with\s+)?timeout\s+\d+\s+seconds?)?"
)
_USAGE: Final = re.compile(
    r"(\bif\s+(?:total)?(mem|memory|cpu)(?:\s+usage)?\s*(?:>|gt|greater)\s*)[\d.]+\s*(%|[KMG]?i?B\b)?", re.IGNORECASE
)
_CYCLES: Final = re.compile(r"(\d+)\s+cycles?", re.IGNORECASE)


@dataclass
class MonitCheck:
    """A check in a monit file."""

    name: str
    kind: str
    pidfile: str
    start: str
    ports: list[dict[str, Any]]
    text: str


@dataclass
class Plan:
    """Everything that is needed to run a job's lifecycle."""

    job: Job
    services: list[MonitCheck]
    files: dict[str, dict[str, str]] = field(default_factory=dict)
    """The contents of each package's files."""
    system: set[str] = field(default_factory=set)
    """Programs that scripts call by name and that neither this machine nor a package has."""

    lives: list[str] = field(default_factory=list)
    """Stand-ins that must keep running although their command lines do not show that they should."""
    is_lenient: bool = False
    """Whether scripts continue after errors, in both environments."""

    acts: tuple[tuple[str, str], ...] = ()
    """Names and shell commands of the phases to add once the job has come to rest."""
    trials: tuple[str, ...] = TRIALS

    @property
    def slow(self) -> list[str]:
        """Return the command lines of start programs that run one of the job's shell scripts."""
        commands = re.findall(
            r"/var/vcap/jobs/[^\"']+", "\n".join(found[2] for found in _START.finditer(self.job.monit))
        )
        own = f"/var/vcap/jobs/{self.job.name}/"
        scripts = {own + path for path, text in self.job.files.items() if TOLD in text}
        return [" ".join(command.split()) for command in commands if command.split()[0] in scripts]

    @property
    def second(self) -> dict[str, str]:
        """Return the files in the job's second version, in which start programs have short timeouts."""
        short = rf"\1\2\3 with timeout {SLOW_TIMEOUT_S} seconds"
        texts = self.job.files.items()
        return {path: _START.sub(short, text) if _is_monit(path) else text for path, text in texts}

    @property
    def watched(self) -> list[str]:
        """Return the paths of the files that have a change rule (changed, timestamp, checksum or match)."""
        rule = r"(?is)\bpath\s+[\"']?([^\s\"']+).*\b(?:changed|timestamp|checksum|match)\b"
        found = [re.search(rule, one.text) for one in self.services if one.kind == "file"]
        return [one[1] for one in found if one]

    @property
    def ports(self) -> list[dict[str, Any]]:
        return [port for service in self.services for port in service.ports]

    @property
    def cycles(self) -> int:
        """Return the longest period over which a rule in the monit file counts failures, in cycles, but at most 15."""
        return min(max([int(found) for found in _CYCLES.findall(self.job.monit)] or [1]), 15)

    @property
    def expectation(self) -> dict[str, Any]:
        """Return the content of plan.json, which stand-ins read."""
        shared = [port for service in self.services if service.kind != "process" for port in service.ports]
        names = sorted((str(one.get("name")) for one in processes(self.job)), key=len)
        owners = {Path(service.pidfile).stem: service.name for service in self.services if service.pidfile}
        return {
            "bpm": {name: owners.get(name, name) for name in names},
            "commands": {
                str(one.get("name")): " ".join(map(str, [one.get("executable"), *(one.get("args") or [])]))
                for one in processes(self.job)
            },
            "tmp": f"/var/vcap/data/{self.job.name}/tmp",
            "services": {
                service.name: {"pidfile": service.pidfile, "start": service.start, "ports": service.ports + shared}
                for service in self.services
                if service.kind == "process"
            },
            "starts": sorted({service.start for service in self.services if service.start}),
            "ports": self.ports,
            "lives": self.lives,
        }


def plan(checkout: Checkout, job: Job) -> Plan:
    """Return the plan for a rendered job."""
    job = replace(job, files={path: _within_limits(text) for path, text in job.files.items()})
    if any(one.get("capabilities") for one in processes(job)):
        job = replace(job, files=job.files | {"config/bpm.yml": _within_capabilities(job.files["config/bpm.yml"])})
    known = {service.name for service in _services(job.monit)}
    job = replace(job, files={path: _without_other_jobs(path, text, known) for path, text in job.files.items()})
    job = replace(
        job, files={path: _with_reachable_limits(text) if _is_monit(path) else text for path, text in job.files.items()}
    )
    made = Plan(job, list(_services(job.monit)))
    texts = {path: _expanded(text) for path, text in job.files.items()}
    for name in job.packages:
        made.files[name] = {}
    on_path = set()
    words = set()
    for path, text in texts.items():
        for package, inside in _PATH.findall(text):
            place = inside.strip("/").rstrip(".")
            files = made.files.setdefault(package, {})
            if _BIN.search(inside):
                on_path.add((package, place))
            elif place and not place.endswith((".", "/")):
                files[place] = STAND_IN
        if path.startswith("bin/") or text.startswith("#!"):
            words |= set(_WORD.findall(text))
    known = {word for word in words if len(word) > 1 and not _is_preinstalled(word)}
    made.system |= {word for word in known if shutil.which(word)}
    for package, place in on_path:
        for word in known:
            made.files[package].setdefault(f"{place}/{word}", STAND_IN)
    _add_sourced_files(checkout, texts.values(), made)
    _drop_directories(made)
    made.files.pop("bpm", None)
    hooks = {f"bin/{name}": _hook(name) for name in HOOKS}
    made.job = replace(job, files=hooks | {path: told(path, text) for path, text in job.files.items()})
    return made


def _hook(name: str) -> str:
    return f'#!/bin/sh\n{TOLD} "$0" "$@"\n' + ("echo 0\n" if name == "drain" else "echo done\n" * (name == "run"))


def told(path: str, text: str) -> str:
    """Return one of the job's shell scripts with an added first line that reports each run.

    The text of any other file is returned unchanged.
    """
    head, newline, rest = text.partition("\n")
    if not path.startswith("bin/") or not re.match(r"#!\S*(?:/env )?(?:ba|da)?sh\b", head) or not newline:
        return text
    return f'{head}\n{TOLD} "$0" "$@" </dev/null >/dev/null 2>&1 || true\n{rest}'


def _is_monit(path: str) -> bool:
    return path == "monit" or path.endswith(".monit")


def _with_reachable_limits(text: str) -> str:
    """Lower the memory and CPU limits in a monit file so that a stand-in can reach them. Return the new text."""

    def limit(found: re.Match[str]) -> str:
        if found[2].lower() == "cpu":
            return f"{found[1]}2%"  # As in monit, the percentage is of all CPUs.
        # Use an absolute size, because even 1%, the smallest percentage, is more than a stand-in can use on a large
        # machine.
        return f"{found[1]}60 MB"

    return _USAGE.sub(limit, text)


def _without_other_jobs(path: str, text: str, known: set[str]) -> str:
    """Remove dependencies on other jobs' services from a monit file, because the other jobs are not deployed here.

    ``set daemon`` is removed as well, because monit applies it to the whole machine. Other files are not changed.
    """
    if not _is_monit(path):
        return text
    text = re.sub(r"(?im)^\s*set\s+daemon\s+\d+.*$", "", text)
    return re.sub(r"\bdepends\s+(?:on\s+)?([\w-]+)", lambda found: found[0] if found[1] in known else "", text)


def _drop_directories(made: Plan) -> None:
    """Remove paths from the plan's files if other files lie below them, because these paths must be directories."""
    for files in made.files.values():
        for place in [one for one in files if any(other.startswith(f"{one}/") for other in files)]:
            del files[place]


@functools.cache
def _is_preinstalled(word: str) -> bool:
    """Return True for a program that both this machine and every stemcell have."""
    place = shutil.which(word)
    return place is not None and (word in TOOLS or not _base() or str(Path(place).resolve().name) in _base())


@functools.cache
def _base() -> frozenset[str]:
    """Return the names of programs in a minimal Debian system. The result is empty on systems other than Debian."""
    try:
        shown = ["dpkg-query", "-W", "-f", "${Priority}\\t${db-fsys:Files}\\n\\n"]
        listed = subprocess.run(shown, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return frozenset()
    packages = [one for one in listed.split("\n\n") if one.strip().startswith(("required", "important", "standard"))]
    return frozenset(re.findall(r"/s?bin/([^/\s]+)$", "\n".join(packages), re.MULTILINE))


def _within_limits(text: str) -> str:
    """Lower the limits in a script or bpm.yml to this machine's hard limits, because raising a hard limit requires
    CAP_SYS_RESOURCE.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    text = re.sub(r"(ulimit\s+-[SH]?n\s+)(\d+)", lambda found: f"{found[1]}{min(int(found[2]), hard)}", text)
    text = re.sub(r"(open_files['\"]?:\s*)(\d+)", lambda found: f"{found[1]}{min(int(found[2]), hard)}", text)
    return re.sub(r"ulimit\s+-[SH]?[a-mo-z]+\s+\w+", "true", text)


def _within_capabilities(text: str) -> str:
    """Remove capabilities that this machine cannot grant from a bpm.yml. runc would not start the process with them."""
    document = yaml.safe_load(text)
    bounds = re.search(r"CapBnd:\s*(\w+)", Path("/proc/self/status").read_text())
    held = int(bounds[1], 16) if bounds else 0
    for one in document["processes"]:
        asked = one.get("capabilities") or []
        one["capabilities"] = [name for name in asked if name != "SYS_RESOURCE" or held >> CAP_SYS_RESOURCE & 1]
    return yaml.safe_dump(document)


def learn(made: Plan, said: str, called: Sequence[str]) -> bool:
    """Change the plan after a run in which the job did not stay up. Return False if there is nothing else to try.

    Add stand-ins for programs and files that the scripts did not find, according to their logs (``said``). ``called``
    are the stand-ins that start programs ran as tools; the last one must keep running in the next run. If neither step
    changes the plan, let all scripts continue after errors.
    """
    found = learn_paths(made, said)
    new = [name for name in called if name not in (*made.lives, *NEVER_LIVE)][-1:]
    made.lives += new
    if found or new:
        return True
    if made.is_lenient:
        return False
    made.is_lenient = True
    made.job = replace(made.job, files={path: lenient(path, text) for path, text in made.job.files.items()})
    for files in made.files.values():
        files |= {path: lenient(path, text) for path, text in files.items()}
    return True


def lenient(path: str, text: str) -> str:
    """Return a shell script that continues after errors, or a bpm.yml without hooks.

    Any other text is returned unchanged.
    """
    if path == "config/bpm.yml" and "hooks" in text:
        document = yaml.safe_load(text)
        for one in document.get("processes") or []:
            one.pop("hooks", None)
        return yaml.safe_dump(document)
    if not re.match(r"#!\S*(?:/env )?(?:ba|da)?sh\b", text) and not path.endswith(".sh"):
        return text
    text = re.sub(r"\A(#!.*?sh)[ \t]+-\w.*", r"\1", text)
    text = re.sub(r"(?m)^([ \t]*)set[ \t]+-(?:\w*[eu]\w*|o[ \t]+(?:errexit|nounset|pipefail))\b.*$", r"\1set +e", text)
    text = re.sub(r"\bexit[ \t]+-?[1-9]\d*\b", "true", text)
    return f"{text}\nexit 0\n" if path in ("bin/pre-start", "bin/post-start") else text


def learn_paths(made: Plan, said: str) -> bool:
    """Add stand-ins for the programs and files that scripts have reported as missing. ``said`` is the text of their
    logs. Return True if a stand-in was added.
    """
    found, news = False, []
    for package, place in re.findall(
        r"/var/vcap/(?:data/|jobs/[\w.-]+/)?packages/([\w.-]+)/([\w./@+-]*[\w@+-])[*]?['’]?: "
        r"(?:No such file|not found|Not a directory)",
        said,
    ):
        alike = [name for name in made.files if name.startswith(package)] or [package]
        news += [(name, place) for name in alike]
    for word in re.findall(r"([\w.-]+): (?:command )?not found", said) + re.findall(
        r"failed to execute ([\w.-]+)", said
    ):
        if not word.isdigit() and word.strip(".") and word not in made.system:
            made.system.add(word)
            found = True
    for package, place in news:
        files = made.files.setdefault(package, {})
        if place not in files and not any(one.startswith(f"{place}/") for one in files):
            files[place] = STAND_IN
            found = True
    _drop_directories(made)
    return found


def _services(text: str) -> Iterable[MonitCheck]:
    parts = re.split(r"(?m)^[ \t]*check\s+(?=\w+\s)", text, flags=re.IGNORECASE)[1:]
    for part in parts:
        head = part.split(None, 2)
        pidfile = re.search(r"\bpidfile\s+[\"']?(/[^\s\"']+)", part)
        start = re.search(r"\bstart(?:\s+program)?\s*=?\s*(?:\"([^\"]+)\"|'([^']+)'|(/\S+))", part)
        ports: list[dict[str, Any]] = [
            {"port": int(number)} | ({"udp": True} if re.search(rf"port\s+{number}\s+type\s+udp", part) else {})
            for number in dict.fromkeys("".join(found) for found in _PORT.findall(part))
        ]
        ports += [{"path": path} for path in dict.fromkeys(_SOCKET.findall(part))]
        command = next((found for found in start.groups() if found), "") if start else ""
        yield MonitCheck(
            head[1].strip("\"'"),
            head[0].lower(),
            pidfile[1] if pidfile else "",
            _program(command),
            ports,
            part,
        )


def _program(command: str) -> str:
    """Return the program that a start program's command line eventually runs, such as the script behind ``sh -c``."""
    scripts = re.findall(r"/var/vcap/jobs/\S+", command)
    return scripts[0].strip("'\";") if scripts else command.split(maxsplit=1)[0] if command else ""


def _expanded(text: str) -> str:
    """Replace variables in a script with the values that the script assigns, unless finding the value requires a
    shell.
    """
    values: dict[str, str] = {}
    for name, value in _ASSIGNED.findall(text):
        values.setdefault(name, _substituted(value, values))
    return _substituted(text, values) if values else text


def _substituted(text: str, values: dict[str, str]) -> str:
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda found: values.get(found[1] or found[2], found[0]), text)


def _add_sourced_files(checkout: Checkout, texts: Iterable[str], made: Plan) -> None:
    """Add the files that scripts source. A file is copied from the release if the release has one with that name.
    Otherwise, it is a stand-in.
    """
    names = checkout.names()
    for text in texts:
        for path in _SOURCED.findall(text):
            found = _PATH.match(path)
            if found is None or not found[2].strip("/"):
                continue
            package, place = found[1], found[2].strip("/")
            same = [name for name in names if name.startswith("src/") and name.endswith("/" + Path(place).name)]
            same.sort(key=lambda name: (f"/{package}/" not in name, len(name)))
            if same:
                made.files.setdefault(package, {})[place] = checkout.read(same[0])
            else:
                made.files.setdefault(package, {})[place] = STAND_IN


def processes(job: Job) -> list[dict[str, Any]]:
    """Return the processes in the job's bpm.yml, or an empty list if the file is missing or cannot be parsed."""
    try:
        document = yaml.safe_load(job.files.get("config/bpm.yml", "")) or {}
    except yaml.YAMLError:
        return []
    found = document.get("processes") if isinstance(document, dict) else None
    return [one for one in found or [] if isinstance(one, dict)]


def written(made: Plan, bpm: str = "") -> str:
    """Return the plan as JSON for tools.comparison.life. ``bpm`` is the name of the process to run with the real bpm,
    or "" if the stand-in for bpm is used.
    """
    return json.dumps(
        {
            "release": made.job.release,
            "job": made.job.name,
            "files": made.job.files,
            "packages": made.files | {"stand_in": {"plan.json": json.dumps(made.expectation), "told": STAND_IN}},
            "second": made.second,
            "slow": made.slow,
            "watched": made.watched,
            "usage": [one.name for one in made.services if _USAGE.search(one.text)],
            "services": [vars(service) for service in made.services],
            "ports": made.ports,
            "system": sorted(made.system),
            "acts": made.acts,
            "trials": made.trials,
            "cycles": made.cycles,
            "bpm": bpm,
        }
    )
