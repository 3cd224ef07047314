"""Compiles a package without disturbing the packages that jobs use. The Director's compile actions and ``bosh-agent
compile`` share this code.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from agent_shim.bulk.protocol import Done
from agent_shim.core.errors import ActionError
from agent_shim.core.settings import Blobstore
from agent_shim.services.bundles import BPM, Bundle, Bundles
from agent_shim.services.compiler import Compiler, Package

logger = logging.getLogger(__name__)


class Compilation(msgspec.Struct, frozen=True):
    """Compiles packages from ``store`` and uploads the results to it. ``in_use`` are the packages that jobs use; they
    stay active.
    """

    bundles: Bundles
    compiler: Compiler
    store: Blobstore
    in_use: Sequence[Bundle] = ()
    parallel: int = 1
    """Maximum number of concurrent dependency downloads."""

    async def compile(self, package: Package, dependencies: Sequence[Bundle], report: Callable[[str], None]) -> Done:
        """Compile a package. Meanwhile, ``packages`` contains only ``dependencies``, the package itself and the
        packages ``in_use``.

        Everything else is removed from ``packages`` first, because a packaging script that reads ``packages/golang-*``
        would silently use whatever version it finds there. Unlike the Go agent, this keeps the packages that jobs use.
        ``report`` is called with the name of each step. Returns the blob id and the digests of the result. Raises
        ``ActionError``. Call :meth:`clean` afterwards.
        """
        target = Bundle("package", package.name, package.version)
        self._refuse_other_versions([*dependencies, target])
        await self._activate()  # as in the Go agent, free the disk space of other packages before downloading
        report("fetching dependencies")
        doing = "Installing dependent package: '{0.name}'"  # begins the error message, as in the Go agent
        await self.bundles.install(dependencies, self.store, self.parallel, doing=doing)
        await self._activate(dependencies)
        return await self.compiler.compile(package, await self.bundles.create(target), self.store, report)

    async def clean(self) -> None:
        """Remove the source and the dependencies to free disk space. A failure is only logged, because the compiled
        package is not affected, and the next compilation would fail with the same error.
        """
        for remove in (self.compiler.clean, self._activate):
            try:
                await remove()
            except ActionError as exc:
                logger.warning("cannot clean up after compiling: %s", exc)

    async def _activate(self, dependencies: Sequence[Bundle] = ()) -> None:
        """Activate the packages in use and ``dependencies``, and no others. If jobs use any packages, ``bpm`` stays
        active too, because job scripts expect it.
        """
        spared = (BPM,) if self.in_use else ()
        await self.bundles.activate_packages([*self.in_use, *dependencies], spared)

    def _refuse_other_versions(self, wanted: Sequence[Bundle]) -> None:
        """Raise ``ActionError`` if jobs use another version of a ``wanted`` package, because ``packages`` can contain
        only one version of each.
        """
        used_by_jobs = {bundle.name: self.bundles.path(bundle) for bundle in self.in_use}
        for bundle in wanted:
            if bundle.name in used_by_jobs and used_by_jobs[bundle.name] != self.bundles.path(bundle):
                why = f"jobs of this instance use another version of package {bundle.name}"
                raise ActionError(f"cannot compile here: {why} (compile it on an instance without jobs)")
