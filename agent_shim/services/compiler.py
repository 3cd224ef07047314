"""Compiles a package: unpacks its source, runs its packaging script, and packs and uploads the result.

The environment, logs and error messages match those of the Go agent (agent/compiler/concrete_compiler.go,
compiler_unix.go, agent/cmdrunner/file_logging_cmd_runner.go). There are two differences. A compilation's processes and
files never outlive it. Compilations are reproducible (the same source results in the same bytes) if they use
reproducible tools.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from agent_shim.bulk import protocol, workers
from agent_shim.bulk.protocol import BlobRef
from agent_shim.core.errors import ActionError, errors_as
from agent_shim.core.paths import Paths
from agent_shim.core.settings import Blobstore
from agent_shim.host import files
from agent_shim.host.keeper import Program
from agent_shim.host.process import Process

logger = logging.getLogger(__name__)

QUOTED_BYTES: Final = 10 * 1024
"""An error quotes at most this many bytes from the end of stdout and of stderr (app/app.go)."""
GRACE_S: Final = 1.0
"""Time between TERM and KILL for a compilation's processes. It is short because these processes have nothing to save.
"""
LABEL: Final = "compilation"
"""Label of the keepers that run packaging scripts."""
EARLIEST_S: Final = 315_532_800
"""1 January 1980, the earliest time that some archive formats (zip, wheels) can represent."""


class Package(msgspec.Struct, frozen=True):
    """A package to compile. The result is uploaded to the signed URL or, without one, to the blobstore.

    ``headers`` are sent with the upload.
    """

    name: str
    version: str
    source: BlobRef
    signed_url: str = ""
    headers: Mapping[str, str] = {}

    def __repr__(self) -> str:
        return f"Package({self.name!r}, {self.version!r}, {self.source!r})"  # the other fields may be secret


class PackagingKeepers(Protocol):
    """The part of ``supervisor.ownership.keepers.Keepers`` that this module needs. Packaging scripts and all processes
    that they start run under keepers, so all of them can be found and killed.
    """

    async def spawn(self, label: str, program: Program, out: Path, err: Path) -> Process: ...

    async def end(
        self, labels: Sequence[str], others: Collection[tuple[int, int]], grace: float
    ) -> Sequence[object]: ...


class Compiler:
    """Compiles one package at a time. Packaging scripts inherit ``environ``, with the agent's programs added to
    PATH.
    """

    def __init__(
        self,
        paths: Paths,
        environ: Mapping[str, str],
        keepers: PackagingKeepers,
        execute: protocol.Execute = workers.execute,
    ) -> None:
        self._paths = paths
        self._keepers = keepers
        own, path = str(paths.bosh_bin), environ.get("PATH", os.defpath)
        self._environ = {**environ, "PATH": path if own in path.split(":") else f"{own}:{path}"}
        self._execute = execute

    async def compile(
        self, package: Package, target: Path, store: Blobstore, report: Callable[[str], None]
    ) -> protocol.Done:
        """Compile the package into ``target``, an empty linked bundle, and upload the result. Return the blob id and
        the digests.

        The package's dependencies must already be linked. ``report`` is called with a description of each step as it
        begins. Raises ``ActionError``.
        """
        report("fetching the source")
        source = await self._fetch(package, store)
        newest = max(source.newest, EARLIEST_S)
        if await asyncio.to_thread((self._directory(package) / "packaging").exists):
            report("running the packaging script")
            await self._run(package, newest)
        # Clean up before packing, because processes that are still running could change ``target``, and because packing
        # may need the space.
        await self.clean()
        archive = files.sibling(self._paths.tmp / "compiled")
        try:
            headers = dict(package.headers)
            put = protocol.Put(str(self._paths.base), store, str(archive), package.signed_url, headers)
            trees = [protocol.Tree(str(target))]
            pack = protocol.Pack(trees, str(archive), source.compressed, newest=newest, put=put)
            report("packing")
            with errors_as("Compressing compiled package", ActionError):
                done = await self._execute(pack, report=lambda step: report(step.phase))
            if done.put_error:
                raise ActionError(f"Uploading compiled package: {done.put_error}")
            return done
        finally:
            await asyncio.to_thread(files.remove_tree, archive)

    async def clean(self) -> None:
        """Kill processes that compilations have left running, and remove the source directories. This also cleans up
        after an earlier agent's compilations.
        """
        if survivors := await self._keepers.end([LABEL], others=(), grace=0.0):
            logger.warning("processes of a compilation cannot be ended: %s", ", ".join(map(str, survivors)))
        with errors_as("Removing sources"):
            await asyncio.to_thread(self._remove_sources)

    async def _fetch(self, package: Package, store: Blobstore) -> protocol.Outcome:
        """Fetch and unpack the package's source."""
        with errors_as(f"Fetching package {package.name}", ActionError):
            if not package.source.blob_id and not package.source.signed_url:
                raise ActionError(f"No blobstore reference for package '{package.name}'")
            target = protocol.UnpackTarget("source", package.name, str(self._directory(package)), package.source)
            done = await self._execute(protocol.Install(str(self._paths.base), store, 1, [target]))
            if done.outcomes[0].error:
                raise ActionError(done.outcomes[0].error)
            return done.outcomes[0]

    async def _run(self, package: Package, newest_s: int) -> None:
        """Run the package's ``packaging`` script. When it exits, terminate the other processes in its process group.
        Raises ``ActionError`` with the end of the script's output if it fails.

        ``newest_s`` is the modification time of the source's newest file in seconds, which tools use as the build time.
        """
        log = self._paths.log / "compilation"
        stdout, stderr = log / "packaging.stdout.log", log / "packaging.stderr.log"
        try:
            await asyncio.to_thread(files.remove_tree, log)
            await asyncio.to_thread(files.make_dir, log, 0o750)
            argv, env = ["bash", "-x", "packaging"], self._environment(package, newest_s)
            packaging = Program(argv, env, cwd=str(self._directory(package)))
            script = await self._keepers.spawn(LABEL, packaging, stdout, stderr)
            try:
                status = await script.wait()
            finally:
                await script.terminate(GRACE_S)
            text = "" if status == 0 else await asyncio.to_thread(_failure, status, stdout, stderr)
        except OSError as exc:
            text = str(exc)
        if text:
            # The Go agent's error has the same prefix twice.
            raise ActionError(f"Running packaging script: Running packaging script: {text}")

    def _environment(self, package: Package, newest: int) -> dict[str, str]:
        return {
            **self._environ,
            "BOSH_COMPILE_TARGET": str(self._directory(package)),
            "BOSH_INSTALL_TARGET": str(self._paths.packages / package.name),
            "BOSH_PACKAGE_NAME": package.name,
            "BOSH_PACKAGE_VERSION": package.version,
            # Tools write this time into their output instead of the current time (reproducible-builds.org).
            "SOURCE_DATE_EPOCH": str(newest),
        }

    def _directory(self, package: Package) -> Path:
        return self._paths.compile / package.name

    def _remove_sources(self) -> None:
        if self._paths.compile.is_dir():
            for path in self._paths.compile.iterdir():
                files.remove_tree(path)


def _failure(status: int | None, stdout: Path, stderr: Path) -> str:
    """Return the error message for a failed packaging script, with the end of its output."""
    return f"Command exited with {status}; {_quote('stdout', stdout)}, {_quote('stderr', stderr)}"


def _quote(name: str, path: Path) -> str:
    """Return the end of a program's output, starting at the beginning of a line if possible, with a title that says
    whether the output was truncated.

    The Go agent instead omits the first line even if nothing was truncated.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        text = os.pread(file.fileno(), QUOTED_BYTES, max(0, size - QUOTED_BYTES))
    if size <= QUOTED_BYTES:
        return f"{name.capitalize()}: {text.decode(errors='replace')}"
    # Start at the beginning of a line if one begins in the first quarter. Otherwise, start at least at the beginning of
    # a character.
    text = text[text.find(b"\n", 0, QUOTED_BYTES // 4) + 1 :]
    return f"Truncated {name}: {text.decode(errors='replace').lstrip(chr(0xFFFD))}"
