"""Deduces from the texts of a job the programs of packages that its life needs."""

from __future__ import annotations

import functools
import json
import re
import resource
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import yaml

from comparison.releases import Checkout, Job

TRIALS: Final = ("death", "empty pidfile", "port closed", "agent restarted")
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
_CYCLES: Final = re.compile(r"(\d+)\s+cycles?", re.IGNORECASE)


@dataclass
class Service:
    """One check of a monit file; ``line`` is that of the rendered file."""

    name: str
    kind: str
    pidfile: str
    start: str
    ports: list[dict[str, Any]]
    text: str


@dataclass
class Plan:
    """The life of one job."""

    job: Job
    services: list[Service]
    files: dict[str, dict[str, str]] = field(default_factory=dict)
    """Contents of packages: their files by package."""
    system: set[str] = field(default_factory=set)
    """Programs that scripts call by name and that neither the machine nor a package has."""

    acts: tuple[tuple[str, str], ...] = ()
    """Further phases after the rest: their names and shell commands."""
    trials: tuple[str, ...] = TRIALS

    @property
    def ports(self) -> list[dict[str, Any]]:
        return [port for service in self.services for port in service.ports]

    @property
    def cycles(self) -> int:
        """The longest rate of the monit file."""
        return min(max([int(found) for found in _CYCLES.findall(self.job.monit)] or [1]), 15)

    @property
    def expectation(self) -> dict[str, Any]:
        """The plan.json of the stand-ins."""
        shared = [port for service in self.services if service.kind != "process" for port in service.ports]
        names = sorted((str(one.get("name")) for one in processes(self.job)), key=len)
        owners = {Path(service.pidfile).stem: service.name for service in self.services if service.pidfile}
        return {
            "bpm": {name: owners.get(name, name) for name in names},
            "tmp": f"/var/vcap/data/{self.job.name}/tmp",
            "services": {
                service.name: {"pidfile": service.pidfile, "ports": service.ports + shared}
                for service in self.services
                if service.kind == "process"
            },
            "starts": sorted({service.start for service in self.services if service.start}),
            "ports": self.ports,
        }


def plan(checkout: Checkout, job: Job) -> Plan:
    """Return what the life of a rendered job needs."""
    job = replace(job, files={path: _within_limits(text) for path, text in job.files.items()})
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
    known = {word for word in words if len(word) > 1 and not _is_here(word)}
    for package, place in on_path:
        for word in known:
            made.files[package].setdefault(f"{place}/{word}", STAND_IN)
    _take_sourced(checkout, texts.values(), made)
    for files in made.files.values():
        # A place below which there are others is a directory.
        for place in [one for one in files if any(other.startswith(f"{one}/") for other in files)]:
            del files[place]
    made.files.pop("bpm", None)
    return made


@functools.cache
def _is_here(word: str) -> bool:
    return shutil.which(word) is not None


def _within_limits(text: str) -> str:
    """Lower what a script asks of ``ulimit``: a machine without CAP_SYS_RESOURCE cannot raise its hard limits."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    text = re.sub(r"(ulimit\s+-[SH]?n\s+)(\d+)", lambda found: f"{found[1]}{min(int(found[2]), hard)}", text)
    return re.sub(r"ulimit\s+-[SH]?[a-mo-z]+\s+\w+", "true", text)


def learn(made: Plan, said: str) -> bool:
    """Add stand-ins for what scripts have not found; False without any."""
    found, news = False, []
    for package, place in re.findall(
        r"/var/vcap/(?:data/|jobs/[\w.-]+/)?packages/([\w.-]+)/([\w./@+-]*[\w@+-]): (?:No such file|not found)", said
    ):
        alike = [name for name in made.files if name.startswith(package)] or [package]
        news += [(name, place) for name in alike]
    for word in re.findall(r"([\w.-]+): (?:command )?not found", said):
        if not word.isdigit() and word not in made.system:
            made.system.add(word)
            found = True
    for package, place in news:
        files = made.files.setdefault(package, {})
        if place not in files and not any(one.startswith(f"{place}/") for one in files):
            files[place] = STAND_IN
            found = True
    return found


def _services(text: str) -> Iterable[Service]:
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
        yield Service(
            head[1].strip("\"'"),
            head[0].lower(),
            pidfile[1] if pidfile else "",
            _program(command),
            ports,
            part,
        )


def _program(command: str) -> str:
    """Return the part of a start program that its command line has: the script behind ``sh -c`` or ``bash``."""
    scripts = re.findall(r"/var/vcap/jobs/\S+", command)
    return scripts[0].strip("'\";") if scripts else command.split(maxsplit=1)[0] if command else ""


def _expanded(text: str) -> str:
    """Return a script with the variables that it assigns in place, as far as that needs no shell."""
    values: dict[str, str] = {}
    for name, value in _ASSIGNED.findall(text):
        values.setdefault(name, _substituted(value, values))
    return _substituted(text, values) if values else text


def _substituted(text: str, values: dict[str, str]) -> str:
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda found: values.get(found[1] or found[2], found[0]), text)


def _take_sourced(checkout: Checkout, texts: Iterable[str], made: Plan) -> None:
    """Take files that scripts source from the release."""
    names = checkout.names()
    for text in texts:
        for path in _SOURCED.findall(text):
            found = _PATH.match(path)
            if found is None:
                continue
            package, place = found[1], found[2].strip("/")
            same = [name for name in names if name.startswith("src/") and name.endswith("/" + Path(place).name)]
            same.sort(key=lambda name: (f"/{package}/" not in name, len(name)))
            if same:
                made.files.setdefault(package, {})[place] = checkout.read(same[0])
            else:
                made.files.setdefault(package, {})[place] = STAND_IN


def processes(job: Job) -> list[dict[str, Any]]:
    """Return the processes of a bpm.yml."""
    try:
        document = yaml.safe_load(job.files.get("config/bpm.yml", "")) or {}
    except yaml.YAMLError:
        return []
    found = document.get("processes") if isinstance(document, dict) else None
    return [one for one in found or [] if isinstance(one, dict)]


def written(made: Plan) -> str:
    """Return the plan as JSON for the program that plays it."""
    return json.dumps(
        {
            "release": made.job.release,
            "job": made.job.name,
            "files": made.job.files,
            "packages": made.files | {"stand_in": {"plan.json": json.dumps(made.expectation)}},
            "services": [vars(service) for service in made.services],
            "ports": made.ports,
            "system": sorted(made.system),
            "acts": made.acts,
            "trials": made.trials,
            "cycles": made.cycles,
        }
    )
