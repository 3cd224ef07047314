"""``agent-shim render``: evaluate the templates of an instance group without a Director, for ``AgentShim.spec``.

The manifest describes a deployment and has all variables filled (``bosh interpolate``). Releases are directories with
``jobs``, or tarballs. Packages of compiled tarballs are unpacked, too. Ruby evaluates the templates (``render.rb``). A
link has the values that ``consumes`` of the manifest gives it: only a Director finds others. Warnings name
packages that are not there: those of source releases.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from agent_shim.bulk import archive
from agent_shim.core.errors import ConfigError, NotThereError

EXECUTABLE = 0o755
COMPILE = "give its compiled release (`bosh-agent compile` makes it), or put it into `packages`"

T = TypeVar("T")


class _Job(msgspec.Struct):
    name: str
    properties: dict[str, Any] | None = None
    consumes: dict[str, Any] | None = None


class _Network(msgspec.Struct):
    name: str


class _Group(msgspec.Struct):
    name: str
    jobs: list[_Job] = []
    networks: list[_Network] | None = None
    persistent_disk: int | None = 0


class _Manifest(msgspec.Struct):
    instance_groups: list[_Group]
    name: str = "standalone"
    properties: dict[str, Any] | None = None


class _Spec(msgspec.Struct):
    """The file of a job in its release. ``templates`` maps sources to targets."""

    properties: dict[str, Any] | None = None
    templates: dict[str, str] | None = None
    packages: list[str] | None = None


class _Loader(yaml.SafeLoader):
    """Leaves a date as its text: ruby gets JSON, which has no dates."""


_Loader.add_constructor("tag:yaml.org,2002:timestamp", lambda _, node: node.value)


def main(args: argparse.Namespace) -> int:
    """Write ``jobs``, ``packages`` and ``instance.json`` into the directory ``args.out``."""
    manifest = _yaml(args.manifest, _Manifest)
    if found := re.search(rb"\(\(([^()]+)\)\)", msgspec.json.encode(manifest)):
        variable = found[0].decode()
        raise ConfigError(f"cannot render {args.manifest}: {variable} has no value; fill it by `bosh interpolate`")
    group = _group(manifest, args.group)
    wanted = [job for job in group.jobs if not args.only or job.name in args.only]
    missing = set(args.only or ()) - {job.name for job in wanted}
    if missing or not wanted:
        what = f"job {', '.join(sorted(missing))}" if missing else "jobs"
        raise ConfigError(f"cannot render {args.manifest}: {group.name} has no {what}")
    with tempfile.TemporaryDirectory() as scratch:
        releases = [_unpacked(release, Path(scratch, str(number))) for number, release in enumerate(args.releases)]
        jobs = [_job(manifest, group, job, releases) for job in wanted]
        for name, files in _evaluated(jobs).items():
            _write(args.out / "jobs" / name, files)
        for package in (path for release in releases for path in release.glob("compiled_packages/*.tgz")):
            _unpack(package, args.out / "packages" / package.stem)
    about = {"deployment": manifest.name, "name": group.name, "id": f"{group.name}-0"}
    (args.out / "instance.json").write_text(json.dumps(about))
    for job in jobs:
        for package in sorted(job["packages"]):
            if not (args.out / "packages" / package).exists():
                sys.stderr.write(f"warning: {job['name']} needs the package {package}: {COMPILE}\n")
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise NotThereError(f"cannot read {path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read {path}: {exc}") from exc


def _yaml(path: Path, wanted: type[T]) -> T:
    try:
        return msgspec.convert(yaml.load(_text(path), Loader=_Loader), wanted)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, msgspec.ValidationError, RecursionError) as exc:
        raise ConfigError(f"cannot read {path}: {exc}") from exc


def _group(manifest: _Manifest, name: str) -> _Group:
    found = [group for group in manifest.instance_groups if name in ("", group.name)]
    if len(found) != 1:
        known = ", ".join(group.name for group in manifest.instance_groups)
        raise ConfigError(f"cannot choose an instance group: --group names one of {known or 'none'}")
    return found[0]


def _job(manifest: _Manifest, group: _Group, job: _Job, releases: list[Path]) -> Any:
    """Return a job with its properties and templates, as ``render.rb`` reads it."""
    home = next((found for release in releases if (found := release / "jobs" / job.name).is_dir()), None)
    if home is None:
        raise NotThereError(f"cannot render {job.name}: none of the releases has this job")
    spec = _yaml(home / ("job.MF" if (home / "job.MF").is_file() else "spec"), _Spec)
    properties: dict[str, Any] = json.loads(json.dumps(job.properties or manifest.properties or {}))
    for path, about in (spec.properties or {}).items():
        if isinstance(about, dict) and about.get("default") is not None:
            _put_default(properties, path.split("."), about["default"])
    templates = {target: _text(home / "templates" / source) for source, target in (spec.templates or {}).items()}
    if (monit := home / "monit").is_file():
        templates["monit"] = _text(monit)
    return {
        "name": job.name,
        "properties": properties,
        "links": {name: given for name, given in (job.consumes or {}).items() if isinstance(given, dict)},
        "templates": templates,
        "spec": _spec(manifest, group, job.name),
        "packages": spec.packages or [],
    }


def _spec(manifest: _Manifest, group: _Group, job: str) -> dict[str, Any]:
    """Return ``spec`` of the templates: one instance with the address of this machine's loopback."""
    network = {"ip": "127.0.0.1", "netmask": "255.0.0.0", "gateway": "127.0.0.1", "dns": [], "default": ["gateway"]}
    return {
        "name": group.name,
        "deployment": manifest.name,
        "index": 0,
        "id": f"{group.name}-0",
        "az": "z1",
        "bootstrap": True,
        "address": "127.0.0.1",
        "ip": "127.0.0.1",
        "dns_domain_name": "bosh",
        "job": {"name": group.name, "template": job},
        "networks": dict.fromkeys([each.name for each in group.networks or ()] or ["default"], network),
        "persistent_disk": group.persistent_disk,
    }


def _put_default(properties: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Give a property its default unless the manifest has a value, also a part of one."""
    *above, last = path
    for key in above:
        below = properties.setdefault(key, {})
        if not isinstance(below, dict):
            return
        properties = below
    if properties.get(last) is None:
        properties[last] = value


def _evaluated(jobs: list[Any]) -> dict[str, dict[str, str]]:
    ruby = shutil.which("ruby")
    if ruby is None:
        raise ConfigError("cannot render templates: ruby is not installed; apt-get install ruby")
    program = Path(__file__).with_name("render.rb")
    done = subprocess.run(
        [ruby, "-EUTF-8:UTF-8", program], input=json.dumps(jobs), capture_output=True, encoding="utf-8", check=False
    )
    if done.returncode != 0:
        raise ConfigError(f"cannot render {done.stderr.strip()}")
    found: dict[str, dict[str, str]] = json.loads(done.stdout)
    return found


def _write(home: Path, files: Mapping[str, str]) -> None:
    shutil.rmtree(home, ignore_errors=True)
    for name, text in files.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(text, encoding="utf-8")
        if name.startswith("bin/"):
            path.chmod(EXECUTABLE)


def _unpacked(release: Path, scratch: Path) -> Path:
    """Return the directory of a release. Jobs of a tarball are tarballs themselves."""
    if release.is_dir():
        return release
    _unpack(release, scratch)
    for job in list(scratch.glob("jobs/*.tgz")):
        _unpack(job, job.with_suffix(""))
    return scratch


def _unpack(tarball: Path, directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tarball.open("rb") as packed:
            archive.unpack(packed, directory)
    except FileNotFoundError:
        raise NotThereError(f"cannot read {tarball}: there is no such file") from None
