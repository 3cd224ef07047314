"""``agent-shim render``: evaluate an instance group's templates without a Director. The result is a spec directory for
``AgentShim.spec``.

The manifest describes a deployment, and all its variables must have values (``bosh interpolate``). Releases are
directories with ``jobs``, or tarballs. If a tarball contains compiled packages, they are unpacked too. Ruby evaluates
the templates (``render.rb``) with the properties and links that a Director would give them. Because source releases
contain no compiled packages, a warning is printed for each missing package.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from agent_shim.cli import deployment, kubernetes, links
from agent_shim.cli.deployment import BPM, DeployedJob, DeploymentManifest, Group, ReleaseDirectory, ReleaseJob
from agent_shim.core.errors import ConfigError, NotThereError

EXECUTABLE: Final = 0o755
COMPILE: Final = "use a compiled release (see `bosh-agent compile`)"
LOOPBACK: Final = "127.0.0.1"
INDEX: Final = "AGENT_SHIM_INDEX"
"""Environment variable that replaces the index option. Every option that describes the instance has such a variable, so
that all pods in a StatefulSet can have the same arguments.
"""
ADDRESS: Final = "AGENT_SHIM_ADDRESS"
AZ: Final = "AGENT_SHIM_AZ"
BOOTSTRAP: Final = "AGENT_SHIM_BOOTSTRAP"


class BpmYml(msgspec.Struct):
    """The processes in a bpm.yml."""

    processes: list[dict[str, Any]] = []


@dataclass(frozen=True)
class RenderedInstance:
    """The instance of ``group`` that is to be rendered. ``az`` is None in a group without zones, and
    ``persistent_disk`` is in MiB.
    """

    group: Group
    index: int
    address: str
    az: str | None
    bootstrap: bool
    persistent_disk: int

    @property
    def id(self) -> str:
        """The instance's id, which is also the pod's name."""
        return f"{self.group.name}-{self.index}"


def main(args: argparse.Namespace) -> int:
    """Render the instance group, print warnings, and return the exit code 0."""
    warn(write(args))
    return 0


def write(args: argparse.Namespace) -> list[str]:
    """Write a spec directory (``jobs``, ``packages`` and ``instance.json``) to ``args.out`` or, if ``args.kubernetes``
    is set, the Kubernetes objects. Return warnings.
    """
    manifest = deployment.read_manifest(args.manifest)
    group = manifest.group(args.group)
    instance = _instance(group, args)
    wanted = _wanted(group, args.only or (), args.manifest)
    if args.out.resolve() in [release.resolve() for release in args.releases]:
        raise ConfigError(f"cannot write to {args.out}: it is a release; choose another --out")
    with tempfile.TemporaryDirectory() as scratch:
        releases = [
            deployment.open_release(release, Path(scratch, str(number))) for number, release in enumerate(args.releases)
        ]
        packages = [path for release in releases for path in release.directory.glob("compiled_packages/*.tgz")]
        known = _known(manifest, releases)
        # The bpm release may be missing, because the agent itself runs the processes in bpm.yml.
        jobs = [job for job in wanted if (group.name, job.name) in known or job.name != BPM]
        if missing := [job for job in jobs if (group.name, job.name) not in known]:
            raise NotThereError(_missing_job_error(group, missing[0], releases))
        patterns = (args.addresses, args.group_address)
        if args.kubernetes:
            patterns = (kubernetes.ADDRESSES, kubernetes.GROUP_ADDRESS)
        addresses = _addresses(manifest, instance, *patterns)
        resolver = links.Resolver(manifest, {key: found.spec for key, found in known.items()}, addresses)
        inputs = [_input(manifest, instance, job, known[group.name, job.name], resolver) for job in jobs]
        evaluated = _evaluated(inputs)
        if args.kubernetes:
            provided = [[link.properties for link in resolver.providers_of(group, job)] for job in jobs]
            declared = [
                manifest.properties_of(group, job) | given["properties"]
                for job, given in zip(jobs, inputs, strict=True)
            ]
            parts = kubernetes.ObjectInputs(
                deployment=manifest.name,
                group=group,
                manifest=deployment.read_text(args.manifest),
                releases=_below_here(args.releases),
                image=args.image,
                renderer=args.renderer,
                ports=kubernetes.ports(list(zip(declared, provided, strict=True))),
                is_privileged=any(map(_is_privileged, evaluated.values())),
            )
            kubernetes.write(parts, args.out)
            existing = {package.stem for package in packages}
            lacking = _missing_package_warnings(group, jobs, known, existing, COMPILE)
            return [*_addon_warnings(manifest), *resolver.warnings, *lacking]
        args.out.mkdir(parents=True, exist_ok=True)
        for name, files in evaluated.items():
            _write(args.out / "jobs" / name, files)
        for package in packages:
            deployment.unpack(package, args.out / "packages" / package.stem)
    about = {
        "deployment": manifest.name,
        "name": group.name,
        "id": instance.id,
        "index": instance.index,
        "az": instance.az or "",
        "persistent_disk": instance.persistent_disk,
    }
    (args.out / "instance.json").write_text(json.dumps(about))
    existing = {path.name for path in (args.out / "packages").glob("*")}
    advice = f"{COMPILE}, or put the package into `packages`"
    lacking = _missing_package_warnings(group, jobs, known, existing, advice)
    others = {path.name for path in (args.out / "jobs").glob("*")} - {job.name for job in group.jobs}
    outdated = [
        f"{group.name} has no job {name}, but an agent would run {args.out}/jobs/{name}; remove it if it is outdated"
        for name in sorted(others)
    ]
    return [*_addon_warnings(manifest), *_disk_size_warnings(group), *resolver.warnings, *lacking, *outdated]


def warn(warnings: Sequence[str]) -> None:
    """Print warnings to standard error."""
    for warning in warnings:
        sys.stderr.write(f"warning: {warning}\n")


def _below_here(releases: Sequence[Path]) -> list[str]:
    """Return the release paths for the Dockerfile. Raises ``ConfigError`` unless all releases are below the current
    directory, which is the build context, and have different names.
    """
    found: dict[str, str] = {}
    for release in releases:
        path = os.path.relpath(release)
        if path == "." or path.startswith(".."):
            raise ConfigError(f"cannot copy {release} into an image: run the command in a directory above it")
        if (other := found.setdefault(Path(path).name, path)) != path:
            raise ConfigError(f"cannot copy {other} and {path} into an image: they have the same name; rename one")
    return list(found.values())


def _is_privileged(files: Mapping[str, str]) -> bool:
    """Return True if a process in a job's bpm.yml is privileged. ``files`` are the job's rendered files by path."""
    config = deployment.parse_yaml(files.get("config/bpm.yml", ""), "bpm.yml", BpmYml)
    return any((process.get("unsafe") or {}).get("privileged") is True for process in config.processes)


def _wanted(group: Group, only: Sequence[str], manifest: Path) -> list[DeployedJob]:
    """Return the group's jobs or, if ``only`` is not empty, the jobs named in ``only``. Raises ``ConfigError``."""
    wanted = [job for job in group.jobs if not only or job.name in only]
    missing = set(only) - {job.name for job in wanted}
    if missing or not wanted:
        what = f"job {', '.join(sorted(missing))}" if missing else "jobs"
        raise ConfigError(f"cannot render {manifest}: {group.name} has no {what}")
    return wanted


def _known(manifest: DeploymentManifest, releases: Sequence[ReleaseDirectory]) -> dict[tuple[str, str], ReleaseJob]:
    """Return the jobs in all groups, because any of them may provide a link. Jobs that no release contains are left
    out.
    """
    deployed = ((group.name, job) for group in manifest.instance_groups for job in group.jobs)
    return {(group, job.name): found for group, job in deployed if (found := deployment.find_job(job, releases))}


def _instance(group: Group, args: argparse.Namespace) -> RenderedInstance:
    """Return the instance that options or environment variables select. Raises ``ConfigError``."""
    given = str(os.environ.get(INDEX, "") if args.index is None else args.index)
    number = re.search(r"(?:^|-)([0-9]+)$", given or "0")  # an index, or the name of a StatefulSet's pod
    if number is None:
        raise ConfigError(f"cannot render {group.name}: {INDEX} is neither a number nor the name of a pod: {given}")
    index = int(number[1])
    if index >= group.count:
        has = f"the manifest has only {group.count} instances of this group"
        raise ConfigError(f"cannot render {group.name}/{index}: {has}; raise `instances`, so that links include it")
    own = args.address or os.environ.get(ADDRESS) or group.static_ip(index, group.default_network) or LOOPBACK
    try:
        ipaddress.ip_address(own)
    except ValueError:
        raise ConfigError(f"cannot render {group.name}/{index}: its address {own} is not an IP address") from None
    az = args.az or os.environ.get(AZ) or group.az(index)
    bootstrap = args.bootstrap
    if bootstrap is None:
        word = os.environ.get(BOOTSTRAP, "")
        if word not in ("", "true", "false"):
            raise ConfigError(f"cannot render {group.name}/{index}: {BOOTSTRAP} is neither true nor false: {word}")
        bootstrap = word == "true" if word else index == 0
    return RenderedInstance(group, index, own, az, bootstrap, group.persistent_disk or 0)


def _disk_size_warnings(group: Group) -> list[str]:
    if group.persistent_disk_type is None:
        return []
    size = f"the size of persistent_disk_type {group.persistent_disk_type} is in the cloud config"
    return [f"{size}, so spec.persistent_disk of {group.name} is 0; use `persistent_disk: MEBIBYTES` instead"]


def _missing_job_error(group: Group, job: DeployedJob, releases: Sequence[ReleaseDirectory]) -> str:
    names = [release.name for release in releases if release.name]
    given = f" ({', '.join(names)})" if names else ""
    add = f"; add the release {job.release}" if job.release and job.release not in names else ""
    return f"cannot render {group.name}/{job.name}: none of the given releases{given} has this job{add}"


def _addon_warnings(manifest: DeploymentManifest) -> list[str]:
    # A dict drops duplicates and keeps the order.
    names = {job.name: None for addon in manifest.addons or () for job in addon.jobs if job.name != BPM}
    left = f"the jobs of addons are left out: {', '.join(names)}"
    return [f"{left}; list them in the instance group instead"] if names else []


def _addresses(manifest: DeploymentManifest, instance: RenderedInstance, one: str, whole: str) -> links.Addresses:
    """Return functions that look up the addresses of instances and groups.

    ``one`` is the pattern for the address of an instance, and ``whole`` the pattern for the address of a group; ""
    means that there is no pattern. Without ``one``, or if a link needs an IP address, the address of ``instance`` and
    static IPs are used.
    """

    def of_instance(group: Group, index: int, network: str, must_be_ip: bool) -> str | None:
        if one and not must_be_ip:
            return _filled(one, manifest, group, network, index)
        if (group.name, index) == (instance.group.name, instance.index):
            return instance.address
        return group.static_ip(index, network)

    # A group has no index, so the index and the id in its pattern are those of the first instance.
    return links.Addresses(of_instance, lambda group, network: _filled(whole, manifest, group, network, index=0))


def _filled(pattern: str, manifest: DeploymentManifest, group: Group, network: str, index: int) -> str:
    """Return the address that results from a pattern, in which each field in braces is replaced by its value."""
    fields = {
        "deployment": manifest.name,
        "group": group.name,
        "index": str(index),
        "id": f"{group.name}-{index}",
        "az": group.az(index) or "",
        "network": network,
    }
    for name, value in fields.items():
        pattern = pattern.replace(f"{{{name}}}", value)
    return pattern


def _input(
    manifest: DeploymentManifest,
    instance: RenderedInstance,
    job: DeployedJob,
    found: ReleaseJob,
    resolver: links.Resolver,
) -> dict[str, Any]:
    """Return a job in the form that ``render.rb`` reads."""
    group = instance.group
    properties = _property_values(manifest, group, job, found)
    resolved = resolver.resolve(group, job)
    texts = [
        {
            "source": f"templates/{source}",
            "target": target,
            "text": deployment.read_text(found.directory / "templates" / source),
        }
        for source, target in (found.spec.templates or {}).items()
    ]
    if (monit := found.directory / "monit").is_file():
        texts.append({"source": "monit", "target": "monit", "text": deployment.read_text(monit)})
    spec = _spec(manifest, instance, job)
    return {
        "name": job.name,
        "properties": properties,
        "links": resolved.found,
        "absent": resolved.absent,
        "templates": texts,
        "spec": {**spec, "properties": properties, "links": resolved.found},
    }


def _property_values(manifest: DeploymentManifest, group: Group, job: DeployedJob, found: ReleaseJob) -> dict[str, Any]:
    """Return the properties in the job's spec, with values from the manifest or defaults.

    A Director gives no other properties to a template. The keys of mappings are sorted, as in the Director.
    """
    given = manifest.properties_of(group, job)
    bound: dict[str, Any] = {}
    for path in found.spec.properties or {}:
        keys = path.split(".")
        value: Any = given
        for key in keys:
            if not isinstance(value, dict):
                what = f"a mapping above `{key}`, not {type(value).__name__}"
                raise ConfigError(f"cannot render {group.name}/{job.name}: the property {path} needs {what}")
            if (value := value.get(key)) is None:
                break
        parent = bound
        for key in keys[:-1]:
            # A spec may list both ``a`` and ``a.b``. In that case, a value of ``a`` that is not a mapping is replaced.
            if not isinstance(below := parent.get(key), dict):
                parent[key] = below = {}
            parent = below
        parent[keys[-1]] = _sorted(found.spec.default(path) if value is None else value)
    return bound


def _sorted(value: Any) -> Any:
    """Sort the keys of a mapping and of the mappings in it."""
    return {key: _sorted(value[key]) for key in sorted(value, key=str)} if isinstance(value, dict) else value


def _spec(manifest: DeploymentManifest, instance: RenderedInstance, job: DeployedJob) -> dict[str, Any]:
    """Return the object that templates access as ``spec``. All networks without a static address have the instance's
    address.
    """
    group = instance.group
    return {
        "name": group.name,
        "deployment": manifest.name,
        "index": instance.index,
        "id": instance.id,
        "az": instance.az,
        "bootstrap": instance.bootstrap,
        "address": instance.address,
        "ip": instance.address,
        "dns_domain_name": links.DOMAIN,
        "job": {
            "name": group.name,
            "template": group.jobs[0].name,
            "templates": [{"name": deployed.name} for deployed in group.jobs],
        },
        "release": {"name": job.release, "version": manifest.version_of(job.release)},
        "networks": {name: _network(manifest, instance, name) for name in group.network_names},
        "persistent_disk": instance.persistent_disk,
    }


def _network(manifest: DeploymentManifest, instance: RenderedInstance, name: str) -> dict[str, Any]:
    """Return a network for ``spec.networks``. The netmask and the gateway are placeholders, because the manifest does
    not contain them.
    """
    group = instance.group
    is_default = name == group.default_network
    address = (None if is_default else group.static_ip(instance.index, name)) or instance.address
    return {
        "ip": address,
        "netmask": "255.0.0.0" if address == LOOPBACK else "255.255.255.255",
        "gateway": LOOPBACK,
        "dns": [],
        "default": ["dns", "gateway"] if is_default else [],
        "dns_record_name": f"{instance.index}.{group.name}.{name}.{manifest.name}.{links.DOMAIN}",
    }


def _evaluated(jobs: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Evaluate the templates, and return each job's resulting files. Raises ``ConfigError`` with a line for each
    template that fails.
    """
    ruby = shutil.which("ruby")
    if ruby is None:
        raise ConfigError("cannot render templates: ruby is not installed (apt-get install ruby)")
    program = Path(__file__).with_name("render.rb")
    done = subprocess.run(
        [ruby, "-EUTF-8:UTF-8", program], input=json.dumps(jobs), capture_output=True, encoding="utf-8", check=False
    )
    if done.returncode != 0:
        raise ConfigError(f"cannot render templates: {done.stderr.strip()}")
    found = json.loads(done.stdout)
    if found["errors"]:
        raise ConfigError("\n".join(map(_failure, found["errors"])))
    files: dict[str, dict[str, str]] = found["files"]
    return files


def _failure(error: Mapping[str, Any]) -> str:
    """Return the message for a template that ``render.rb`` could not evaluate."""
    line = f":{error['line']}" if error["line"] else ""
    return f"cannot render {error['job']}/{error['source']}{line}: {error['text']}"


def _write(home: Path, files: Mapping[str, str]) -> None:
    """Replace a job's directory with the rendered files. They may contain secrets, so only the owner can read them,
    except for the programs in ``bin``.
    """
    shutil.rmtree(home, ignore_errors=True)
    for name, text in files.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(text, encoding="utf-8")
        if name.startswith("bin/"):
            path.chmod(EXECUTABLE)


def _missing_package_warnings(
    group: Group,
    jobs: Sequence[DeployedJob],
    known: Mapping[tuple[str, str], ReleaseJob],
    existing: Collection[str],
    advice: str,
) -> list[str]:
    """Return a warning with ``advice`` for each package that a job needs and that is not in ``existing``."""
    return [
        f"{job.name} needs the package {package}: {advice}"
        for job in jobs
        for package in sorted(known[group.name, job.name].spec.packages or ())
        if package not in existing
    ]
