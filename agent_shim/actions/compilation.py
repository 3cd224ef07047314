"""Compiling one package among the packages in use: for the Director, and for ``bosh-agent compile`` without one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agent_shim.core.errors import ActionError
from agent_shim.core.settings import Blobstore
from agent_shim.host.worker_client import Done
from agent_shim.services.bundles import BPM, Bundle, Bundles
from agent_shim.services.compiler import Compiler, Package

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Compilation:
    """Compiles packages of ``store`` into it; ``in_use`` are the packages of jobs, which stay in use."""

    bundles: Bundles
    compiler: Compiler
    store: Blobstore
    in_use: Sequence[Bundle] = ()
    parallel: int = 1
    """Dependencies that are fetched at the same time."""

    async def compile(self, package: Package, dependencies: Sequence[Bundle], report: Callable[[str], None]) -> Done:
        """Compile with ``dependencies``, the package itself and ``in_use`` in ``packages``, and nothing else.

        Packaging scripts read ``packages/golang-*``: any other version there would be taken without a word. The Go
        agent removes the packages of jobs, too. ``report`` is told each step. Returns the id of the blob and its
        digests; raises ``ActionError``. :meth:`clean` has to follow.
        """
        target = Bundle("package", package.name, package.version)
        self._refuse_other_versions([*dependencies, target])
        await self._activate()
        report("fetching dependencies")
        doing = "Installing dependent package: '{0.name}'"
        await self.bundles.install(dependencies, self.store, self.parallel, doing=doing)
        await self._activate(dependencies)
        return await self.compiler.compile(package, await self.bundles.create(target), self.store, report)

    async def clean(self) -> None:
        """Give back the room on the disk. A failure here says nothing of the package; the next compilation tells it."""
        for remove in (self.compiler.clean, self._activate):
            try:
                await remove()
            except ActionError as exc:
                logger.warning("cannot clean up after compiling: %s", exc)

    async def _activate(self, dependencies: Sequence[Bundle] = ()) -> None:
        """Scripts of jobs look for ``bpm`` beside their packages: it stays as long as these."""
        spared = (BPM,) if self.in_use else ()
        await self.bundles.activate_packages([*self.in_use, *dependencies], spared)

    def _refuse_other_versions(self, wanted: Sequence[Bundle]) -> None:
        """Raise ``ActionError`` where a name in ``packages`` would have to mean something else to jobs here."""
        of_jobs = {bundle.name: bundle.directory for bundle in self.in_use}
        for bundle in wanted:
            if bundle.name in of_jobs and of_jobs[bundle.name] != bundle.directory:
                raise ActionError(
                    f"cannot compile here: jobs of this instance use another version of package {bundle.name} "
                    "(compile it on an instance without jobs)"
                )
