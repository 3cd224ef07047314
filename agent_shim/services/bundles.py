"""Installs bundles, which are versions of jobs and packages, and links the versions in use.

A bundle is ``data/jobs/<job>/<digest>`` or ``data/packages/<package>/<digest>``. It is in use while a link in ``jobs``
or ``packages`` points to it. The layout, modes and owners match those of the Go agent
(agent/applier/bundlecollection/), so that either agent can take over from the other. A bundle gets its final name only
once it is complete and synced to disk. It is renamed before it is removed, so a directory with a bundle's name is
always complete, unless it is the target of a compilation (:meth:`Bundles.create`).
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from agent_shim.bulk import protocol, workers
from agent_shim.bulk.modes import DIRECTORY_MODE
from agent_shim.bulk.protocol import BlobRef
from agent_shim.core.digest import MultipleDigest
from agent_shim.core.errors import ActionError, DigestError, HostError, errors_as
from agent_shim.core.paths import Paths
from agent_shim.core.settings import Blobstore
from agent_shim.host import files

Kind = Literal["job", "package"]

MAX_SMALL_BYTES: Final = files.MAX_FILE_BYTES
"""Maximum size of a blob that is read into memory. DNS records for ten thousand instances take up half of this."""


class Bundle(msgspec.Struct, frozen=True):
    """A version of a job or package, with the archive that contains it."""

    kind: Kind
    name: str
    version: str
    source: BlobRef = BlobRef()


def checked_name(kind: str, name: str) -> str:
    """Return ``name`` if it is a plain directory name, otherwise raise ``ActionError``."""
    # 200 bytes leave room for the suffix of a temporary name (``files.sibling``).
    if not name.isprintable() or "/" in name or ".." in name or name[:1] in ("", ".", "-") or len(name.encode()) > 200:
        raise ActionError(f"cannot use {name[:100]!r} as the name of a {kind}")
    return name


class Bundles:
    """All bundles below one base directory. Methods raise ``ActionError``. Callers must not change bundles
    concurrently.
    """

    def __init__(self, paths: Paths, execute: protocol.Execute = workers.execute) -> None:
        self._paths = paths
        self._execute = execute
        self._installed: dict[Kind, Path] = {"job": paths.data_jobs, "package": paths.data_packages}
        self._links: dict[Kind, Path] = {"job": paths.jobs, "package": paths.packages}

    def path(self, bundle: Bundle) -> Path:
        """Return the path of a bundle, whether it is installed or not. The directory's name is the sha1 of the version
        and the digest.

        For a package compiled on this instance, the name is the sha1 of the version alone (models/job.go,
        models/package.go). Raises ``ActionError`` for an invalid name or version.
        """
        name = checked_name(bundle.kind, bundle.name)
        if not bundle.version:
            raise ActionError(f"cannot install the {bundle.kind} {name}: it has no version")
        text = bundle.version
        if bundle.source.digest:
            text += f"-{MultipleDigest.parse(bundle.source.digest)}"
        return self._installed[bundle.kind] / name / hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    async def install(
        self, wanted: Sequence[Bundle], store: Blobstore, parallel: int, *, doing: str = "Preparing {0.kind} {0.name}"
    ) -> None:
        """Fetch and unpack the bundles in ``wanted`` that are missing, ``parallel`` archives at a time.

        If some fail, the others are kept, and ``ActionError`` is raised for the first failed bundle in the order
        of ``wanted``. Its message is ``doing``, formatted with the bundle, followed by the reason.
        """
        paths = {self.path(bundle): bundle for bundle in wanted}
        missing = await asyncio.to_thread(lambda: {path: paths[path] for path in paths if not path.is_dir()})
        if not missing:
            return
        targets = [
            protocol.UnpackTarget(bundle.kind, bundle.name, str(path), bundle.source)
            for path, bundle in missing.items()
        ]
        try:
            done = await self._execute(protocol.Install(str(self._paths.base), store, parallel, targets))
        except BaseException:
            # Remove unfinished bundles, which a worker leaves behind only if it is killed.
            with suppress(ActionError):
                await self._in_thread(files.sweep, {path.parent for path in missing})
            raise
        for (path, bundle), outcome in zip(missing.items(), done.outcomes, strict=True):
            if outcome.error:
                with suppress(OSError):  # fails if there are other versions of the bundle
                    await asyncio.to_thread(path.parent.rmdir)
                raise ActionError(f"{doing.format(bundle)}: {outcome.error}")

    async def activate(self, jobs: Sequence[Bundle], packages: Sequence[Bundle]) -> None:
        """Link exactly the bundles in ``jobs`` and ``packages``, and remove all other bundles. Link every package into
        every job, and create the jobs' directories (:meth:`make_job_dirs`).
        """
        await self._in_thread(self._link_all, jobs, packages)
        await self._in_thread(self._keep_only, "job", jobs)
        await self._in_thread(self._keep_only, "package", packages)
        # Install the wrapper again, because a removed bpm bundle may have contained it.
        await self._in_thread(install_bpm_wrapper, self._paths)
        await self._in_thread(self._make_job_dirs, [job.name for job in jobs])

    def missing(self, wanted: Iterable[Bundle]) -> list[Bundle]:
        """Return the bundles in ``wanted`` that are not installed."""
        return [bundle for bundle in wanted if not self.path(bundle).is_dir()]

    async def link(self, jobs: Sequence[Bundle], packages: Sequence[Bundle]) -> None:
        """Link the bundles in ``jobs`` and ``packages``, and link every package into every job. Links to other bundles
        remain.
        """
        await self._in_thread(self._link_all, jobs, packages)

    async def activate_packages(self, packages: Sequence[Bundle], spared: Iterable[str] = ()) -> None:
        """Link exactly the bundles in ``packages``, and remove all other packages. Also remove everything else from the
        ``packages`` directory, except for the names in ``spared``.

        Compilations use this, so that a packaging script sees only what it is allowed to depend on. Jobs are not
        changed.
        """
        await self._in_thread(self._activate, "package", packages)
        await self._in_thread(self._keep_only, "package", packages)
        await self._in_thread(self._remove_strays, {*spared, *(package.name for package in packages)})

    async def create(self, bundle: Bundle) -> Path:
        """Create and link an empty bundle directory for a compilation to fill, and return its path. The contents that
        an earlier compilation left in the directory are removed.

        The directory cannot be mistaken for an installed bundle, because its name is computed without a digest.
        """
        path = self.path(bundle)
        await self._in_thread(self._create, bundle, path)
        return path

    async def make_job_dirs(self, names: Iterable[str]) -> None:
        """Create the jobs' log, run and data directories. Existing directories are not changed (models/job.go)."""
        await self._in_thread(self._make_job_dirs, [checked_name("job", name) for name in names])

    # --- received blobs -----------------------------------------------------------------------------------------------

    async def keep_blob(self, blob_id: str, digest: str, content: bytes) -> None:
        """Store the payload of ``upload_blob`` for a later install (agent/action/upload_blob.go). Raises
        ``DigestError`` if it does not match ``digest``.
        """
        path = self._paths.sensitive_blobs / protocol.checked_blob_id(blob_id)
        expected = MultipleDigest.parse(digest)
        try:
            await asyncio.to_thread(expected.verify, content)
        except DigestError as exc:
            raise DigestError(f"Payload corrupted. Checksum mismatch. Expected '{expected}': {exc}") from exc
        with errors_as("Opening blob store file", HostError):
            await asyncio.to_thread(files.write_atomic, path, content, mode=0o640)

    async def delete_source(self, blob_id: str) -> None:
        """Delete the blob from which a bundle was installed, if it is stored on this machine (cascading_blobstore.go).
        Blobs on a blobstore server are not deleted. Does nothing if ``blob_id`` is "".
        """
        if not blob_id:
            return
        protocol.checked_blob_id(blob_id)
        for directory in (self._paths.sensitive_blobs, self._paths.blobs):
            if await asyncio.to_thread((directory / blob_id).is_file):
                await self._in_thread(files.remove_tree, directory / blob_id)
                return

    async def fetch_small(self, source: BlobRef, store: Blobstore) -> bytes:
        """Return the verified content of a blob. Raises ``ActionError`` if it exceeds ``MAX_SMALL_BYTES``."""
        temp = files.sibling(self._paths.tmp / "blob")
        try:
            await self._execute(protocol.Get(str(self._paths.base), store, source, str(temp)))
            if (size := (await asyncio.to_thread(temp.stat)).st_size) > MAX_SMALL_BYTES:
                raise ActionError(f"cannot use the blob: it has {size} bytes, the limit is {MAX_SMALL_BYTES}")
            return await asyncio.to_thread(temp.read_bytes)
        except OSError as exc:
            raise ActionError(f"cannot read {temp}: {exc.strerror}") from exc
        finally:
            temp.unlink(missing_ok=True)  # not in a thread, because a second cancellation could interrupt the await

    async def sweep(self) -> None:
        """Remove incomplete bundles and temporary files that earlier agents left behind."""
        await self._in_thread(self._sweep)

    # --- disk access in a thread --------------------------------------------------------------------------------------

    async def _in_thread(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a blocking function in a thread, and convert ``OSError`` to ``ActionError``."""
        try:
            await asyncio.to_thread(function, *arguments)
        except OSError as exc:
            raise ActionError(str(exc)) from exc

    def _sweep(self) -> None:
        """Do the blocking part of :meth:`sweep`."""
        parents = [path for top in self._installed.values() for path in top.glob("*") if not path.is_symlink()]
        files.sweep([self._paths.jobs, self._paths.packages, self._paths.tmp, *parents])

    def _link_all(self, jobs: Sequence[Bundle], packages: Sequence[Bundle]) -> None:
        """Do the blocking part of :meth:`link`, and install the bpm wrapper."""
        self._activate("package", packages)
        self._activate("job", jobs)
        # Link all of the spec's packages into each job, as the Go agent does, and not only the packages that the job
        # lists.
        wanted, installed = {package.name: self.path(package) for package in packages}, self._paths.data_packages
        for job in jobs:
            links = self.path(job) / "packages"
            files.make_dir(links, DIRECTORY_MODE["package"], self._paths.shared_owner)
            for link in links.iterdir():
                if link.is_symlink() and link.name not in wanted and link.readlink().is_relative_to(installed):
                    link.unlink()
            for name, path in wanted.items():
                files.swap_link(path, links / name)
        install_bpm_wrapper(self._paths)

    def _activate(self, kind: Kind, bundles: Sequence[Bundle]) -> None:
        """Link bundles of one kind into ``jobs`` or ``packages``. Raises ``ActionError`` if one is not installed."""
        links = self._links[kind]
        files.make_dir(links, DIRECTORY_MODE[kind], self._paths.shared_owner)
        for bundle in bundles:
            if not (path := self.path(bundle)).is_dir():
                raise ActionError(f"cannot use the {kind} {bundle.name}: bundle must be installed")
            files.swap_link(path, links / bundle.name)

    def _keep_only(self, kind: Kind, bundles: Sequence[Bundle]) -> None:
        """Remove all installed bundles of ``kind``, except ``bundles``."""
        wanted = {self.path(bundle) for bundle in bundles}
        for path in self._installed[kind].glob("*/*"):
            if path not in wanted and not path.parent.is_symlink() and not files.is_leftover(path.name):
                self._uninstall(kind, path)

    def _uninstall(self, kind: Kind, path: Path) -> None:
        """Remove the link to a bundle, then rename and remove the bundle. A bundle in an image layer, which cannot be
        renamed, is removed under its own name.
        """
        link = self._links[kind] / path.parent.name
        if link.is_symlink() and link.readlink() == path:
            link.unlink()
        aside = files.sibling(path)
        try:
            path.rename(aside)
        except OSError as exc:
            if exc.errno != errno.EXDEV:  # a directory that belongs to an image layer cannot be renamed
                raise files.failed(f"remove {path}", exc) from exc
            aside = path
        files.remove_tree(aside)
        with suppress(OSError):  # fails if there are other versions of the bundle
            path.parent.rmdir()

    def _remove_strays(self, wanted: Collection[str]) -> None:
        """Remove everything from the ``packages`` directory except for the names in ``wanted``."""
        for path in self._paths.packages.iterdir():
            if path.name not in wanted:
                files.remove_tree(path)

    def _make_job_dirs(self, names: Iterable[str]) -> None:
        """Do the blocking part of :meth:`make_job_dirs`. A link or file at one of the paths is moved away."""
        for path in (top / name for name in names for top in (self._paths.log, self._paths.run, self._paths.data)):
            if os.path.lexists(path) and (path.is_symlink() or not path.is_dir()):
                files.move_away(path)  # a link in sys/run would redirect scripts that run as root
            if not os.path.lexists(path):
                files.make_dir(path, 0o770, self._paths.shared_owner)

    def _create(self, bundle: Bundle, path: Path) -> None:
        """Do the blocking part of :meth:`create`. ``path`` is the bundle's path."""
        if path.exists():
            self._uninstall(bundle.kind, path)
        for directory in (path.parent, path):
            files.make_dir(directory, DIRECTORY_MODE[bundle.kind], self._paths.shared_owner)
        self._activate(bundle.kind, [bundle])


BPM: Final = "bpm"
"""Name of the ``bpm`` job and package, which the agent itself replaces."""


def install_bpm_wrapper(paths: Paths) -> None:
    """Install the agent's own ``bpm`` at the path that scripts call, even if a release contains bpm."""
    source_root = str(Path(__file__).parents[2])
    # Unlike -m, this command does not import site and runpy, so the program starts twice as fast.
    code = f"import sys; sys.path.insert(0, {source_root!r}); from agent_shim.cli.bpm import main; sys.exit(main())"
    launcher = (
        "#!/bin/sh\n"
        "# agent-shim in place of bpm: a client of the running agent.\n"
        f'export BPM_BOSH_ROOT="${{BPM_BOSH_ROOT:-{paths.base}}}"\n'
        f'exec {shlex.quote(sys.executable)} -I -S -c {shlex.quote(code)} "$@"\n'
    )
    for directory in (paths.jobs, paths.packages):
        path = directory / BPM / "bin/bpm"
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        files.write_atomic(path, launcher.encode(), mode=0o755, if_changed=True)
