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
from typing import Any

import yaml

from agent_shim.bulk import archive
from agent_shim.core.errors import ConfigError, NotThereError

EXECUTABLE = 0o755
COMPILE = "give its compiled release (`bosh-agent compile` makes it), or put it into `packages`"


def main(args: argparse.Namespace) -> int:
    """Write ``jobs``, ``packages`` and ``instance.json`` into the directory ``args.out``."""
    manifest = _yaml(args.manifest)
    if found := re.search(r"\(\(([^()]+)\)\)", json.dumps(manifest)):
        raise ConfigError(f"cannot render {args.manifest}: (({found[1]})) has no value; fill it by `bosh interpolate`")
    group = _group(manifest, args.group)
    wanted = [job for job in group.get("jobs", ()) if not args.only or job["name"] in args.only]
    if not wanted:
        raise ConfigError(f"cannot render {args.manifest}: {group.get('name')} has no such jobs")
    with tempfile.TemporaryDirectory() as scratch:
        releases = [_unpacked(release, Path(scratch, str(number))) for number, release in enumerate(args.releases)]
        jobs = [_job(manifest, group, job, releases) for job in wanted]
        for name, files in _evaluated(jobs).items():
            _write(args.out / "jobs" / name, files)
        for package in (path for release in releases for path in release.glob("compiled_packages/*.tgz")):
            _unpack(package, args.out / "packages" / package.stem)
    about = {"deployment": manifest.get("name", "standalone"), "name": group["name"], "id": f"{group['name']}-0"}
    (args.out / "instance.json").write_text(json.dumps(about))
    for job in jobs:
        for package in sorted(job["packages"]):
            if not (args.out / "packages" / package).exists():
                sys.stderr.write(f"warning: {job['name']} needs the package {package}: {COMPILE}\n")
    return 0


def _yaml(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_bytes())
    except FileNotFoundError:
        raise NotThereError(f"cannot read {path}: there is no such file") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        raise ConfigError(f"cannot read {path}: {exc}") from exc
    if not isinstance(found, dict):
        raise ConfigError(f"cannot read {path}: it has no keys")
    return found


def _group(manifest: Mapping[str, Any], name: str) -> dict[str, Any]:
    groups: Sequence[dict[str, Any]] = manifest.get("instance_groups") or ()
    found = [group for group in groups if name in ("", group.get("name"))]
    if len(found) != 1:
        known = ", ".join(str(group.get("name")) for group in groups)
        raise ConfigError(f"cannot choose an instance group: --group names one of {known or 'none'}")
    return found[0]


def _job(manifest: Mapping[str, Any], group: Mapping[str, Any], job: Mapping[str, Any], releases: list[Path]) -> Any:
    """Return a job with its properties and templates, as ``render.rb`` reads it."""
    name = str(job["name"])
    homes = [release / "jobs" / name for release in releases if (release / "jobs" / name).is_dir()]
    if not homes:
        raise NotThereError(f"cannot render {name}: none of the releases has this job")
    spec = _yaml(next(path for path in (homes[0] / "job.MF", homes[0] / "spec") if path.is_file()))
    properties: dict[str, Any] = json.loads(json.dumps(job.get("properties") or manifest.get("properties") or {}))
    for path, about in (spec.get("properties") or {}).items():
        if isinstance(about, dict) and about.get("default") is not None:
            _put_default(properties, path.split("."), about["default"])
    templates = {target: homes[0] / "templates" / source for source, target in (spec.get("templates") or {}).items()}
    templates["monit"] = homes[0] / "monit"
    return {
        "name": name,
        "properties": properties,
        "links": {name: given for name, given in (job.get("consumes") or {}).items() if isinstance(given, dict)},
        "templates": {target: path.read_text(encoding="utf-8") for target, path in templates.items() if path.is_file()},
        "spec": _spec(manifest, group, name),
        "packages": spec.get("packages") or [],
    }


def _spec(manifest: Mapping[str, Any], group: Mapping[str, Any], job: str) -> dict[str, Any]:
    """Return ``spec`` of the templates: one instance with the address of this machine's loopback."""
    network = {"ip": "127.0.0.1", "netmask": "255.0.0.0", "gateway": "127.0.0.1", "dns": [], "default": ["gateway"]}
    names = [one["name"] for one in group.get("networks") or ({"name": "default"},)]
    return {
        "name": group["name"],
        "deployment": manifest.get("name", "standalone"),
        "index": 0,
        "id": f"{group['name']}-0",
        "az": "z1",
        "bootstrap": True,
        "address": "127.0.0.1",
        "ip": "127.0.0.1",
        "dns_domain_name": "bosh",
        "job": {"name": group["name"], "template": job},
        "networks": dict.fromkeys(names, network),
        "persistent_disk": group.get("persistent_disk", 0),
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
