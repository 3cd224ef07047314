"""``agent-shim try``: run a release's jobs in a podman or docker container, to try them out.

The command performs the steps described in docs/without-director.md (compile, render and run). Files are copied into
containers and out of them, so the podman or docker daemon may run on another machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from agent_shim.cli import deployment, render
from agent_shim.cli.deployment import JobSpec, ReleaseDirectory
from agent_shim.core.errors import ConfigError, NotThereError, ShimError

TOOLS: Final = ("podman", "docker")
PROGRAM: Final = "/opt/agent_shim/bin"
NOT_READY: Final = 1
VERSION: Final = "/var/vcap/bosh/etc/stemcell_version"
COMPILE: Final = f"""set -e
[ -s {VERSION} ] || echo 0 >{VERSION}
mkdir /out
exec /var/vcap/bosh/bin/bosh-agent compile -output-directory=/out /release.tgz"""
"""Script that compiles a release. If the image was built without a stemcell version, the script sets it to 0, because a
compiled release must name a version.
"""
STORE: Final = "/var/vcap/store"
"""Mount point of an anonymous volume, which the agent treats as the persistent disk."""
POLL_S: Final = 0.5


class _Packages(msgspec.Struct):
    """The fields of release.MF that this command reads."""

    packages: list[dict[str, Any]] | None = None
    name: str = ""
    version: str | int | float = ""


def main(args: argparse.Namespace) -> int:
    """Run a release in a container. Return 0 as soon as all processes are running, or 1 after a timeout. The container
    is kept in either case.
    """
    tool = args.tool or next((name for name in TOOLS if shutil.which(name)), "")
    if not tool:
        raise ConfigError("cannot run a container: neither podman nor docker is installed")
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        release = deployment.open_release(args.release, directory / "source")
        if not (release.directory / "release.MF").is_file():
            how = "a tarball is required; create one with `bosh create-release --tarball=release.tgz`"
            raise ConfigError(f"cannot compile the checkout {args.release}: {how}")
        about = deployment.read_yaml(release.directory / "release.MF", _Packages)
        name = args.name or f"try-{about.name}"
        if _run(tool, "container", "inspect", name, check=False).returncode == 0:
            remove = f"{tool} rm --force --volumes {name}"
            raise ConfigError(f"cannot create the container {name}: it already exists; remove it with `{remove}`")
        manifest = args.manifest or _manifest(release, str(about.version), args.only, directory / "manifest.yml")
        out = directory / "rendered"
        tarball = args.release
        # Only a source release lists ``packages``. A compiled release lists ``compiled_packages``.
        if about.packages:
            # Find errors in the manifest now, because compiling may take many minutes.
            render.write(_arguments(args, manifest, tarball, directory / "uncompiled"))
            tarball = _compiled(tool, args.image, args.release, directory / "compiled")
        _say("render")
        render.warn(render.write(_arguments(args, manifest, tarball, out)))
        # podman and docker kill a container 10 s after asking it to stop, so the jobs get 9 s.
        (directory / "agent.json").write_text(json.dumps({"AgentShim": {"spec": "/release", "grace": 9}}))
        _say(f"run the container {name}")
        published = [word for port in args.publish or () for word in ("--publish", port)]
        _run(tool, "create", "--name", name, "--volume", STORE, *published, args.image)
        _run(tool, "cp", f"{directory}/agent.json", f"{name}:/var/vcap/bosh/agent.json")
        _run(tool, "cp", f"{out}/.", f"{name}:/release")
        _run(tool, "start", name)
    return _wait_and_show(tool, name, args.timeout)


def _arguments(args: argparse.Namespace, manifest: Path, release: Path, out: Path) -> argparse.Namespace:
    """Return the arguments of ``agent-shim render`` for one instance of the release. In links, all instances have the
    loopback address.
    """
    return argparse.Namespace(
        manifest=manifest,
        releases=[release],
        group=args.group,
        only=args.only,
        out=out,
        index=None,
        address=None,
        az=None,
        bootstrap=None,
        addresses=render.LOOPBACK,
        group_address=render.LOOPBACK,
        kubernetes=False,
    )


def _compiled(tool: str, image: str, release: Path, out: Path) -> Path:
    """Compile a source tarball in a container created from the image, and return the path of the compiled release."""
    began = time.monotonic()
    _say("compile")
    out.mkdir()
    # The last word of the output is the container's id. Messages about pulling the image may precede it.
    container = _run(tool, "create", image, "sh", "-c", COMPILE).stdout.split()[-1]
    try:
        _run(tool, "cp", str(release), f"{container}:/release.tgz")
        if _run(tool, "start", "--attach", container, check=False, capture=False).returncode != 0:
            raise ConfigError(f"cannot compile {release}: see the output above")
        _run(tool, "cp", f"{container}:/out/.", str(out))
    finally:
        _run(tool, "rm", "--force", container, check=False)
    _say(f"compiled in {time.monotonic() - began:.0f} s")
    return next(out.glob("*.tgz"))


def _manifest(release: ReleaseDirectory, version: str, only: Sequence[str] | None, path: Path) -> Path:
    """Write a manifest for a single instance that runs a release's jobs with default properties. Errands are left out
    unless ``only`` names them.
    """
    jobs = sorted(path.name for path in (release.directory / "jobs").iterdir() if path.is_dir())
    specs = {name: deployment.read_yaml(release.directory / "jobs" / name / "job.MF", JobSpec) for name in jobs}
    # As in the Director, a job with bin/run is an errand.
    errands = [
        name for name in jobs if "bin/run" in (specs[name].templates or {}).values() and name not in (only or ())
    ]
    if errands:
        _say(f"leave out errands: {', '.join(errands)} (include one with --only)")
    wanted = [{"name": name, "release": release.name} for name in jobs if name not in errands]
    group = {"name": release.name, "instances": 1, "persistent_disk": 1024, "jobs": wanted}
    releases = [{"name": release.name, "version": version}]
    path.write_text(json.dumps({"name": "try", "releases": releases, "instance_groups": [group]}))
    return path


def _wait_and_show(tool: str, name: str, timeout_s: float) -> int:
    """Wait up to ``timeout_s`` seconds until all processes are running, and print their status. Return the exit code
    for ``agent-shim try``.
    """
    deadline = time.monotonic() + timeout_s
    ready = _probe(tool, name)
    while ready.returncode != 0 and time.monotonic() < deadline and _is_running(tool, name):
        time.sleep(POLL_S)  # noqa: TID251 a command has no event loop
        ready = _probe(tool, name)
    if not _is_running(tool, name):
        subprocess.run([tool, "logs", "--tail", "20", name], stdout=sys.stderr, check=False)
        raise NotThereError(f"cannot show {name}: the container has ended; see its log above")
    sys.stdout.write(_run(tool, "exec", name, f"{PROGRAM}/agent-shim", "status", check=False).stdout)
    sys.stdout.flush()
    if ready.returncode != 0:
        _say(f"not ready after {timeout_s:g} s: {ready.stdout.strip()}")
    _say(f"show logs: {tool} exec -it {name} agent-shim logs\nremove: {tool} rm --force --volumes {name}")
    return 0 if ready.returncode == 0 else NOT_READY


def _probe(tool: str, name: str) -> subprocess.CompletedProcess[str]:
    """Run ``agent-shim probe ready`` in the container. It succeeds once all processes are running."""
    return _run(tool, "exec", name, f"{PROGRAM}/agent-shim", "probe", "ready", check=False)


def _is_running(tool: str, name: str) -> bool:
    return (
        _run(tool, "container", "inspect", "--format", "{{.State.Running}}", name, check=False).stdout.strip() == "true"
    )


def _run(tool: str, *words: str, check: bool = True, capture: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a podman or docker command. If ``check`` is set and the command fails, raise ``ShimError``. If ``capture`` is
    set, return the command's output; otherwise, show it to the user. Without ``capture``, ``check`` must not be set.
    """
    pipe = subprocess.PIPE if capture else None
    done = subprocess.run([tool, *words], stdout=pipe, stderr=pipe, encoding="utf-8", errors="replace", check=False)
    if check and done.returncode != 0:
        raise ShimError(f"cannot {tool} {words[0]}: {done.stderr.strip()}")
    return done


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
