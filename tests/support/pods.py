"""Wraps podman for the image tests: builds a base image from Debian packages and our image on top, and runs
containers.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import resource
import shutil
import subprocess
import tarfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.source import ROOT

PACKAGES = "mmdebstrap podman buildah runc netavark aardvark-dns catatonit iptables uidmap"
NEXT = "next"
"""Value of TEST_BASE_IMAGE for a base that resembles Ubuntu 26.04: uutils, sudo-rs, Python 3.14, no runit, /tmp on
tmpfs.
"""
IS_NEXT = os.environ.get("TEST_BASE_IMAGE") == NEXT
IMAGE = "localhost/agent-shim/test-next" if IS_NEXT else "localhost/agent-shim/test"
EXAMPLE = "localhost/agent-shim/example"
BASE = "localhost/agent-shim/debian"

SECRETS = {"pip_conf": Path("/etc/pip.conf"), "ca_bundle": Path("/etc/ssl/certs/ca-certificates.crt")}
"""Build secrets that let a build reach a package mirror. They are passed if they exist, and do not become part of any
image.
"""


@dataclass(frozen=True)
class Podman:
    """Runs podman with a configuration made for this machine, because machines differ in their cgroups and in which
    limits can be raised.
    """

    config: Path

    def __call__(self, *arguments: str, stdin: bytes | None = None) -> str:
        """Run a command and return its output. If it fails, fail the test with podman's message."""
        result = self.run(*arguments, stdin=stdin)
        if result.returncode != 0:
            said = (result.stdout + result.stderr).decode(errors="replace")
            pytest.fail(f"podman {' '.join(arguments)} ended with {result.returncode}:\n{said}")
        return result.stdout.decode(errors="replace")

    def run(self, *arguments: str, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
        """Run a command, and return its result even if it fails."""
        environment = {**os.environ, "CONTAINERS_CONF": str(self.config)}
        return subprocess.run(["podman", *arguments], input=stdin, capture_output=True, env=environment)


def podman(where: Path) -> Podman:
    """Write a podman configuration to ``where``, and return a ``Podman`` that uses it. Fail the test if podman or a
    program that it needs is missing.
    """
    missing = [name for name in ("podman", "mmdebstrap", "runc") if shutil.which(name) is None]
    if missing:
        pytest.fail(f"{' and '.join(missing)} missing: apt-get install --no-install-recommends {PACKAGES}")
    limits = [("nofile", resource.RLIMIT_NOFILE, 16384), ("nproc", resource.RLIMIT_NPROC, 32768)]
    ulimits = ", ".join(f'"{name}={most}:{most}"' for name, kind, wanted in limits for most in [_most(kind, wanted)])
    config = where / "containers.conf"
    config.write_text(
        f"[containers]\ndefault_ulimits = [{ulimits}]\n"
        '[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\nruntime = "runc"\n'
    )
    return Podman(config)


def _most(kind: int, wanted: int) -> int:
    hard = resource.getrlimit(kind)[1]
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)


def base_image(podman: Podman, where: Path) -> str:
    """Return the image named by TEST_BASE_IMAGE, or build a plain Debian image without a registry.

    The Debian image is rebuilt once a week so that it contains security updates.
    """
    if (wanted := os.environ.get("TEST_BASE_IMAGE")) and not IS_NEXT:
        return wanted
    make: list[str | Path] = (
        [ROOT / "tests/image/next_base"] if IS_NEXT else [ROOT / "stemcell_overlay/make/base", "bookworm"]
    )
    return _imported(podman, NEXT if IS_NEXT else "bookworm-slim", make, where)


def arm64_base_image(podman: Podman, where: Path) -> str:
    """Build a plain Debian image for arm64 in an emulator, at most once a week."""
    make: list[str | Path] = [ROOT / "stemcell_overlay/make/base", "bookworm"]
    return _imported(podman, "bookworm-slim-arm64", make, where, "--arch=arm64")


def _imported(podman: Podman, name: str, make: list[str | Path], where: Path, *options: str) -> str:
    """Return this week's base image called ``name``, building it if it does not exist.

    ``options`` are passed to both mmdebstrap and ``podman import``.
    """
    tag = f"{BASE}:{name}-{time.strftime('%Gw%V')}"
    if podman.run("image", "exists", tag).returncode != 0:
        archive = where / "base.tar"
        subprocess.run([*make, archive, *options], check=True, capture_output=True)
        podman("import", "--quiet", *options, str(archive), tag)
        archive.unlink()
    return tag


def secrets() -> list[str]:
    """Return the ``podman build`` options for those ``SECRETS`` whose files exist on this machine."""
    return [f"--secret=id={name},src={path}" for name, path in SECRETS.items() if path.exists()]


def build(podman: Podman, base: str, target: str = "", *, tree: Path = ROOT, name: str = IMAGE) -> str:
    """Build our image, or the stage that ``target`` names, from the Dockerfile without the compiler stages.

    The previous image with the same name is removed.
    """
    image = f"{name}-{target}" if target else name
    before = podman.run("image", "inspect", "--format", "{{.Id}}", image).stdout.decode().strip()
    stage = [f"--target={target}"] if target else []
    arguments = [f"--build-arg=BASE_IMAGE={base}", "--build-arg=COMPILERS=", *stage, *secrets(), "--tag", image]
    if IS_NEXT:
        arguments.append("--build-arg=OPTIONAL=udhcpc")
    podman("build", "--quiet", *arguments, str(tree))
    if before and before != podman("image", "inspect", "--format", "{{.Id}}", image).strip():
        podman.run("rmi", before)
    return image


def example(podman: Podman, image: str) -> str:
    """Build our image with a job in it, tagged with the name that the manifests in deploy/kubernetes use."""
    where = ROOT / "deploy/kubernetes/example"
    podman("build", "--quiet", f"--build-arg=IMAGE={image}", "--tag", EXAMPLE, str(where))
    return EXAMPLE


@dataclass(frozen=True)
class ContainerNetwork:
    """A podman network. ``gateway`` is this machine's address on it."""

    name: str
    gateway: str


@contextmanager
def network(podman: Podman, name: str) -> Iterator[ContainerNetwork]:
    """Create a network for the duration of the block."""
    podman("network", "create", name)
    try:
        yield ContainerNetwork(name, json.loads(podman("network", "inspect", name))[0]["subnets"][0]["gateway"])
    finally:
        podman.run("network", "rm", "--force", name)


@dataclass(frozen=True)
class Container:
    """A running container. Every call runs in a thread, so the test's bus keeps working during a call."""

    podman: Podman
    name: str

    async def address(self) -> str:
        """Return the container's address on its network."""
        form = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        return (await asyncio.to_thread(self.podman, "inspect", "--format", form, self.name)).strip()

    async def is_running(self) -> bool:
        """Return True if PID 1 is running."""
        said = await asyncio.to_thread(self.podman, "inspect", "--format", "{{.State.Running}}", self.name)
        return said == "true\n"

    async def signal(self, name: str) -> None:
        """Send a signal to PID 1."""
        await asyncio.to_thread(self.podman, "kill", "--signal", name, self.name)

    async def ended(self) -> int:
        """Wait until the container has exited. Return its exit code."""
        return int(await asyncio.to_thread(self.podman, "wait", self.name))

    async def exec(self, *command: str, stdin: bytes | None = None) -> str:
        """Return the output of a command in the container. The command must succeed."""
        return await asyncio.to_thread(self.podman, "exec", "--interactive", self.name, *command, stdin=stdin)

    async def status_of(self, *command: str) -> int:
        """Return the exit code of a command in the container."""
        return (await asyncio.to_thread(self.podman.run, "exec", self.name, *command)).returncode

    async def until(self, code: int, *command: str) -> None:
        """Run ``command`` in the container again and again until it exits with ``code``. Fail the test if the container
        exits first.
        """
        async with asyncio.timeout(60):
            while await self.status_of(*command) != code:
                if not await self.is_running():
                    pytest.fail("the container has ended")
                await asyncio.sleep(0.1)

    async def put(self, path: str, content: str, mode: int = 0o640) -> None:
        """Unpack one file into the running container, as the Docker CPI does."""
        await self.exec("tar", "-C", "/", "-xf", "-", stdin=_archive(path, content, mode))

    async def copy(self, path: str, content: str) -> None:
        """Copy one file into a container, which need not be running."""
        archive = _archive(path, content, 0o644)
        await asyncio.to_thread(self.podman, "cp", "-", f"{self.name}:/", stdin=archive)

    async def kill(self) -> None:
        """Kill the container with everything in it."""
        await self.signal("KILL")
        await self.ended()

    async def start(self) -> None:
        """Start the container again with the files that it had when it exited."""
        await asyncio.to_thread(self.podman, "start", self.name)

    async def stop(self) -> int:
        """Send SIGTERM to PID 1, as a runtime does to stop a container. Return the exit code."""
        await self.signal("TERM")
        async with asyncio.timeout(60):
            return await self.ended()

    async def changed(self) -> list[str]:
        """Return the paths that differ from the image."""
        lines = (await asyncio.to_thread(self.podman, "diff", self.name)).splitlines()
        return [line.split(maxsplit=1)[1] for line in lines]

    def logs(self) -> str:
        """Return the output of PID 1 so far."""
        result = self.podman.run("logs", self.name)
        return (result.stdout + result.stderr).decode(errors="replace")


@asynccontextmanager
async def running(
    podman: Podman, image: str, *command: str, options: tuple[str, ...] = (), files: dict[str, str] | None = None
) -> AsyncIterator[Container]:
    """Run a container for the duration of the block. ``files`` are copied into it before it starts."""
    no_systemd = () if any(option.startswith("--systemd") for option in options) else ("--systemd=false",)
    in_memory = ("--tmpfs=/tmp:rw,exec,nosuid,nodev,mode=1777",) if IS_NEXT else ()
    create = ["create", *no_systemd, *in_memory, *options, image, *command]
    container = Container(podman, (await asyncio.to_thread(podman, *create)).strip())
    try:
        for path, content in (files or {}).items():
            await container.copy(path, content)
        await container.start()
        yield container
    finally:
        print(await asyncio.to_thread(container.logs))  # noqa: T201 - pytest shows it if the test fails
        await asyncio.to_thread(podman.run, "rm", "--force", "--time", "0", container.name)


def _archive(path: str, content: str, mode: int) -> bytes:
    raw = content.encode()
    member = tarfile.TarInfo(path.removeprefix("/"))
    member.size, member.mode = len(raw), mode
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(member, io.BytesIO(raw))
    return buffer.getvalue()
