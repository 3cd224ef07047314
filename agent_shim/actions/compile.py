"""Compiles packages for the Director, usually on a dedicated compilation instance."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

import msgspec

from agent_shim.actions.agent import Agent
from agent_shim.actions.compilation import Compilation
from agent_shim.actions.dispatch import Mode, action
from agent_shim.actions.jobs import bundles_of
from agent_shim.bulk.protocol import BlobRef, Done
from agent_shim.core import events
from agent_shim.core.errors import ActionError, ShimError, errors_as
from agent_shim.core.spec import ApplySpec
from agent_shim.core.wire import DigestText
from agent_shim.services.bundles import Bundle, Bundles
from agent_shim.services.compiler import Package

T = TypeVar("T")


class Dependency(msgspec.Struct, frozen=True):
    """A compiled package that the compilation needs. If it has no signed URL, it is fetched from the blobstore."""

    name: str = ""
    version: str = ""
    sha1: DigestText = ""
    blobstore_id: str = ""
    package_get_signed_url: str = ""
    blobstore_headers: dict[str, str] = {}


class SignedPackage(msgspec.Struct, frozen=True):
    """Argument of ``compile_package_with_signed_url``. The headers are used for downloading the source and for
    uploading the result.
    """

    package_get_signed_url: str = ""
    upload_signed_url: str = ""
    digest: DigestText = ""
    name: str = ""
    version: str = ""
    blobstore_headers: dict[str, str] = {}
    deps: dict[str, Dependency] = {}


@action("compile_package", Mode.TASK)
async def compile_package(
    agent: Agent,
    cancelled: asyncio.Event,
    blob_id: str,
    digest: DigestText,
    name: str,
    version: str,
    dependencies: dict[str, Dependency],
) -> dict[str, Any]:
    """Compile a package from the blobstore and store the result there (agent/action/compile_package.go)."""
    package = Package(name, version, BlobRef(blob_id, digest=digest))
    done = await _compile(agent, cancelled, package, dependencies)
    return {"result": {"blobstore_id": done.blob_id, "sha1": done.sha1}}


@action("compile_package_with_signed_url", Mode.TASK)
async def compile_package_with_signed_url(
    agent: Agent, cancelled: asyncio.Event, request: SignedPackage
) -> dict[str, Any]:
    """Compile a package, using signed URLs for the source and the result
    (agent/action/compile_package_with_signed_url.go).

    The reply has no blob id, because only the Director knows it.
    """
    headers = request.blobstore_headers
    source = BlobRef(signed_url=request.package_get_signed_url, headers=headers, digest=request.digest)
    package = Package(request.name, request.version, source, request.upload_signed_url, headers)
    done = await _compile(agent, cancelled, package, request.deps)
    return {"result": {"sha1": f"{done.sha1};sha512:{done.sha512}"}}


async def _compile(
    agent: Agent, cancelled: asyncio.Event, package: Package, dependencies: Mapping[str, Dependency]
) -> Done:
    """Compile a package unless the task is cancelled, and clean up in any case."""
    settings = agent.settings.current
    in_use = packages_of_jobs(agent.spec.current, agent.bundles)
    parallel = settings.source.env.bosh.parallel
    compilation = Compilation(agent.bundles, agent.compiler, settings.blobstore, in_use, parallel)

    with errors_as(f"Compiling package {package.name}", ShimError):
        needed = [_bundle(dependency) for dependency in dependencies.values()]
        try:
            work = compilation.compile(package, needed, lambda step: agent.tasks.report(f"{package.name}: {step}"))
            return await _unless_cancelled(cancelled, work)
        finally:
            await compilation.clean()


def packages_of_jobs(spec: ApplySpec, bundles: Bundles) -> list[Bundle]:
    """Return the installed packages that this instance's jobs use, which a compilation must not remove. Packages that
    are not installed are left out, because they cannot be linked.
    """
    packages = bundles_of(spec)[1] if spec.jobs else []
    missing = bundles.missing(packages)
    return [package for package in packages if package not in missing]


def _bundle(needed: Dependency) -> Bundle:
    """Convert a dependency in a request to a bundle that can be installed."""
    source = BlobRef(needed.blobstore_id, needed.package_get_signed_url, needed.blobstore_headers, needed.sha1)
    return Bundle("package", needed.name, needed.version, source)


async def _unless_cancelled(cancelled: asyncio.Event, work: Awaitable[T]) -> T:
    """Return the result of ``work``.

    If ``cancelled`` is set before the work has finished, cancel the work, wait until it has stopped, and raise
    ``ActionError``.
    """
    working = asyncio.ensure_future(work)
    try:
        await events.ended_before(cancelled, working)
    finally:
        if working.cancel():  # still running, because ``cancelled`` was set or because the caller is being cancelled
            await asyncio.wait({working})
    try:
        return working.result()
    except asyncio.CancelledError:
        raise ActionError("cancelled") from None
