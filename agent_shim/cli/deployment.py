"""Reads deployment manifests and releases, for commands that work without a Director. Fields that these commands do not
need are ignored.

A release is a checked-out directory, or a tarball with sources or with compiled packages. Invalid input raises
``ConfigError`` or ``NotThereError`` with a message that names the file and the position in it.
"""

from __future__ import annotations

import ipaddress
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import yaml

from agent_shim.bulk import archive
from agent_shim.cli import yaml_errors
from agent_shim.core.errors import ArchiveError, ConfigError, NotThereError

BPM: Final = "bpm"
"""Name of the bpm job. Because the agent itself replaces bpm, bpm-release need not be among the releases. The job has
no links.
"""
ERRAND: Final = "errand"

T = TypeVar("T")


# --- the manifest -----------------------------------------------------------------------------------------------------


class DeployedJob(msgspec.Struct):
    """A job in an instance group. Values of ``consumes`` and ``provides`` are mappings or the string ``nil``."""

    name: str
    release: str = ""
    properties: dict[str, Any] | None = None
    consumes: dict[str, Any] | None = None
    provides: dict[str, Any] | None = None
    custom_provider_definitions: list[dict[str, Any]] | None = None


class GroupNetwork(msgspec.Struct):
    """A network in an instance group. ``default`` lists the purposes for which this network is the default, such as
    ``gateway``.
    """

    name: str
    static_ips: list[str] | str | None = None
    default: list[str] | None = None


class DiskLink(msgspec.Struct):
    """A disk listed in ``persistent_disks``. Jobs consume it as a link of type ``disk``."""

    name: str


class Resources(msgspec.Struct):
    """``vm_resources``, with memory and disk in MiB."""

    cpu: float = 0
    ram: int = 0
    ephemeral_disk_size: int = 0


class Group(msgspec.Struct):
    """An instance group. ``persistent_disk`` is in MiB."""

    name: str
    jobs: list[DeployedJob] = []
    instances: int | None = None
    azs: list[str] | None = None
    networks: list[GroupNetwork] | None = None
    persistent_disk: int | None = None
    persistent_disk_type: str | None = None
    persistent_disks: list[DiskLink] | None = None
    properties: dict[str, Any] | None = None
    vm_resources: Resources | None = None
    lifecycle: str = "service"

    @property
    def count(self) -> int:
        """Return the number of instances, which is 1 if the manifest does not give it."""
        return 1 if self.instances is None else self.instances

    @property
    def network_names(self) -> list[str]:
        """Return the names of the networks in the manifest's order, or just ``default`` if it lists none."""
        return [network.name for network in self.networks or ()] or ["default"]

    @property
    def default_network(self) -> str:
        """Return the name of the network that gives the instance its address: the default network for ``addressable``,
        else the default network for ``gateway``, else the first network.
        """
        for purpose in ("addressable", "gateway"):
            for network in self.networks or ():
                if purpose in (network.default or ()):
                    return network.name
        return self.network_names[0]

    def az(self, index: int) -> str | None:
        """Return the zone of an instance. Zones are assigned round-robin, as a Director does for a new deployment."""
        return self.azs[index % len(self.azs)] if self.azs else None

    def static_ip(self, index: int, network: str) -> str | None:
        """Return the static address of an instance in a network, or None. Raises ``ConfigError``."""
        for entry in self.networks or ():
            if entry.name == network:
                given = [entry.static_ips] if isinstance(entry.static_ips, str) else entry.static_ips or ()
                return next((ip for number, ip in enumerate(_addresses(self.name, given)) if number == index), None)
        return None


class ReleaseOfManifest(msgspec.Struct):
    """An entry of ``releases`` in a deployment manifest."""

    name: str
    version: str | int | float = ""


class AddonJob(msgspec.Struct):
    """A job in an addon."""

    name: str


class Addon(msgspec.Struct):
    """A member of ``addons``, whose jobs a Director adds to instance groups."""

    jobs: list[AddonJob] = []


class DeploymentManifest(msgspec.Struct):
    """A deployment manifest in which all variables have values."""

    instance_groups: list[Group]
    name: str = "standalone"
    properties: dict[str, Any] | None = None
    releases: list[ReleaseOfManifest] | None = None
    addons: list[Addon] | None = None

    def group(self, name: str) -> Group:
        """Return the instance group called ``name`` or, if ``name`` is "", the only group in the manifest. Raises
        ``ConfigError``.
        """
        found = [group for group in self.instance_groups if name in ("", group.name)]
        if len(found) != 1:
            known = ", ".join(group.name for group in self.instance_groups)
            raise ConfigError(f"cannot choose an instance group: --group must name one of: {known or 'none'}")
        return found[0]

    def properties_of(self, group: Group, job: DeployedJob) -> dict[str, Any]:
        """Return a job's properties: the job's own ``properties`` if the manifest contains them (even if they are
        empty), otherwise the manifest's global properties overridden by those of the instance group.
        """
        return _merged(self.properties or {}, group.properties or {}) if job.properties is None else job.properties

    def version_of(self, release: str) -> str:
        """Return a release's version, or "" if the manifest does not list the release."""
        return next((str(entry.version) for entry in self.releases or () if entry.name == release), "")


def read_manifest(path: Path) -> DeploymentManifest:
    """Read a manifest. Raises ``ConfigError`` if a variable such as ``((password))`` has no value."""
    manifest = read_yaml(path, DeploymentManifest)
    if found := re.search(rb"\(\(([^()]+)\)\)", msgspec.json.encode(manifest)):
        variable = found[0].decode()
        raise ConfigError(f"cannot render {path}: {variable} has no value; fill it in with `bosh interpolate`")
    return manifest


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``below`` overridden by ``above``, merging nested mappings key by key."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _addresses(group: str, given: Sequence[str]) -> Iterator[str]:
    """Yield the addresses in ``static_ips``, which lists single addresses, ranges ``FIRST-LAST`` and blocks
    ``ADDRESS/BITS``. Raises ``ConfigError``.
    """
    for text in given:
        try:
            if "/" in text:
                yield from map(str, ipaddress.ip_network(text, strict=False))
                continue
            first, _, last = text.partition("-")
            start, end = (ipaddress.ip_address(address.strip()) for address in (first, last or first))
            for number in range(int(start), int(end) + 1):
                yield str(type(start)(number))
        except ValueError as exc:
            raise ConfigError(f"cannot read static_ips of the instance group {group}: {exc}") from exc


# --- releases ---------------------------------------------------------------------------------------------------------


class Consumed(msgspec.Struct):
    """A link that a job consumes according to its spec."""

    name: str
    type: str
    optional: bool = False


class Provided(msgspec.Struct):
    """A link that a job provides according to its spec, with the paths of its properties."""

    name: str
    type: str
    properties: list[str] | None = None


class JobSpec(msgspec.Struct):
    """A job's ``spec`` or ``job.MF`` file. ``templates`` maps sources to targets."""

    properties: dict[str, Any] | None = None
    templates: dict[str, str] | None = None
    packages: list[str] | None = None
    consumes: list[Consumed] | None = None
    provides: list[Provided] | None = None

    def default(self, path: str) -> Any:
        """Return the default of a property, or None."""
        about = (self.properties or {}).get(path)
        return about.get("default") if isinstance(about, dict) else None


class ReleaseDirectory(NamedTuple):
    """A release in a directory. ``name`` is "" if no file in the release contains the name."""

    directory: Path
    name: str


class ReleaseJob(NamedTuple):
    """A job in a release: its directory and its spec."""

    directory: Path
    spec: JobSpec


class _ReleaseName(msgspec.Struct):
    name: str = ""
    final_name: str = ""


def open_release(path: Path, scratch: Path) -> ReleaseDirectory:
    """Open a release. If it is a tarball, unpack it below ``scratch``, together with the jobs that it contains."""
    if not path.is_dir():
        unpack(path, scratch)
        for job in list(scratch.glob("jobs/*.tgz")):
            unpack(job, job.with_suffix(""))
        path = scratch
    # A tarball contains release.MF, and a checked-out directory contains final.yml, dev.yml or both.
    for name in ("release.MF", "config/final.yml", "config/dev.yml"):
        if (path / name).is_file():
            about = read_yaml(path / name, _ReleaseName)
            if found := about.name or about.final_name:
                return ReleaseDirectory(path, found)
    return ReleaseDirectory(path, "")


def find_job(job: DeployedJob, releases: Sequence[ReleaseDirectory]) -> ReleaseJob | None:
    """Find a job in the releases, or return None if none contains it. The release that the manifest names for the job
    is preferred to releases whose name is unknown. If the manifest names no release, the first release that contains
    the job is used.
    """
    candidates = [
        release
        for release in releases
        if "" in (release.name, job.release) or release.name == job.release  # "" means unknown or not given
        if (release.directory / "jobs" / job.name).is_dir()
    ]
    if not candidates:
        return None
    release = next((release for release in candidates if release.name == job.release), candidates[0])
    home = release.directory / "jobs" / job.name
    # In tarballs, a job's spec is called job.MF.
    return ReleaseJob(home, read_yaml(home / ("job.MF" if (home / "job.MF").is_file() else "spec"), JobSpec))


def unpack(tarball: Path, directory: Path) -> None:
    """Unpack a tarball into ``directory``, replacing the directory's content."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tarball.open("rb") as packed:
            archive.unpack(packed, directory)
    except FileNotFoundError:
        raise NotThereError(f"cannot read {tarball}: there is no such file") from None
    except ArchiveError as exc:
        raise ConfigError(f"cannot read {tarball}: {exc}") from exc


# --- files ------------------------------------------------------------------------------------------------------------


class _DatelessLoader(yaml.SafeLoader):
    """A YAML loader that reads dates as text, because templates get their values as JSON, which has no dates."""


_DatelessLoader.add_constructor("tag:yaml.org,2002:timestamp", lambda _, node: node.value)


def read_text(path: Path) -> str:
    """Return the text of a file. Raises ``NotThereError`` or ``ConfigError``."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise NotThereError(f"cannot read {path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read {path}: {exc}") from exc


def read_yaml(path: Path, wanted: type[T]) -> T:
    """Read a YAML file as one document of the type ``wanted``. Raises ``NotThereError`` or ``ConfigError``."""
    return parse_yaml(read_text(path), str(path), wanted)


def parse_yaml(text: str, place: str, wanted: type[T]) -> T:
    """Parse YAML text as one document of the type ``wanted``. The text may be empty if all fields have defaults. Errors
    name ``place``. Raises ``ConfigError``.
    """
    try:
        document = yaml.load(text, Loader=_DatelessLoader)  # noqa: S506 - derived from SafeLoader
        return msgspec.convert({} if text.strip() == "" else document, wanted)
    except (yaml.YAMLError, msgspec.ValidationError, RecursionError) as exc:
        raise ConfigError(f"cannot read {place}: {yaml_errors.in_a_line(exc)}") from exc
