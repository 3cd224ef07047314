"""Compiling packages, which the Director asks of machines that have nothing else to do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

import msgspec

from agent_shim.agent import Agent
from agent_shim.blobstore import BlobRef
from agent_shim.bundles import Bundle
from agent_shim.compiler import Package
from agent_shim.dispatch import Mode, action
from agent_shim.errors import ActionError, ShimError
from agent_shim.host.helper import Done

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Dependency(msgspec.Struct, frozen=True):
    """A compiled package that the one to compile needs; without a signed URL the id in the blobstore counts."""

    name: str = ""
    version: str = ""
    sha1: str = ""
    blobstore_id: str = ""
    package_get_signed_url: str = ""
    blobstore_headers: dict[str, str] = {}


class Signed(msgspec.Struct, frozen=True):
    """The argument of ``compile_package_with_signed_url``; the headers are those of source and result."""

    package_get_signed_url: str = ""
    upload_signed_url: str = ""
    digest: str = ""
    name: str = ""
    version: str = ""
    blobstore_headers: dict[str, str] = {}
    deps: dict[str, Dependency] = {}


@action("compile_package", Mode.TASK)
async def compile_package(
    agent: Agent,
    cancelled: asyncio.Event,
    blob_id: str,
    digest: str,
    name: str,
    version: str,
    dependencies: dict[str, Dependency],
) -> dict[str, Any]:
    """Compile a package from the blobstore into the blobstore (agent/action/compile_package.go)."""
    package = Package(name, version, BlobRef(blob_id, digest=digest))
    done = await _compiled(agent, cancelled, package, dependencies)
    return {"result": {"blobstore_id": done.blob_id, "sha1": done.sha1}}


@action("compile_package_with_signed_url", Mode.TASK)
async def compile_package_with_signed_url(agent: Agent, cancelled: asyncio.Event, request: Signed) -> dict[str, Any]:
    """The same from URL to URL; only the Director knows the id (agent/action/compile_package_with_signed_url.go)."""
    headers = request.blobstore_headers
    source = BlobRef(signed_url=request.package_get_signed_url, headers=headers, digest=request.digest)
    package = Package(request.name, request.version, source, request.upload_signed_url, headers)
    done = await _compiled(agent, cancelled, package, request.deps)
    return {"result": {"sha1": f"{done.sha1};sha512:{done.sha512}"}}


async def _compiled(
    agent: Agent, cancelled: asyncio.Event, package: Package, dependencies: Mapping[str, Dependency]
) -> Done:
    try:
        if agent.spec.current.jobs:
            jobs = ", ".join(agent.spec.current.job_names)
            raise ActionError(f"cannot compile on an instance with jobs ({jobs}): their packages would be removed")
        try:
            alone = _compiled_alone(agent, package, [_bundle(each) for each in dependencies.values()])
            return await _unless(cancelled, alone)
        finally:
            await _clean(agent)
    except ShimError as exc:
        raise ActionError(f"Compiling package {package.name}: {exc}") from exc


async def _compiled_alone(agent: Agent, package: Package, dependencies: list[Bundle]) -> Done:
    """With exactly the dependencies and the package itself in use.

    Packaging scripts read ``packages/golang-*``: any other version there would be taken without a word.
    """
    settings, bundles = agent.settings.current, agent.bundles

    def report(step: str) -> None:
        agent.tasks.report(f"{package.name}: {step}")

    await bundles.activate_packages([])
    report("fetching dependencies")
    parallel = settings.source.env.bosh.parallel
    doing = "Installing dependent package: '{0.name}'"
    await bundles.install(dependencies, settings.blobstore, parallel, doing=doing)
    await bundles.activate_packages(dependencies)
    target = await bundles.create(Bundle("package", package.name, package.version))
    return await agent.compiler.compile(package, target, settings.blobstore, report)


async def _clean(agent: Agent) -> None:
    """Give back the room on the disk. What fails here says nothing of the package, and the next one will tell."""
    for remove in (agent.compiler.clean, lambda: agent.bundles.activate_packages([])):
        try:
            await remove()
        except ActionError as exc:
            logger.warning("cannot clean up after compiling: %s", exc)


def _bundle(needed: Dependency) -> Bundle:
    source = BlobRef(needed.blobstore_id, needed.package_get_signed_url, needed.blobstore_headers, needed.sha1)
    return Bundle("package", needed.name, needed.version, source)


async def _unless(cancelled: asyncio.Event, work: Awaitable[T]) -> T:
    """The result of ``work``; when the event is set it is cancelled and, once it has ended, ``ActionError`` raised."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(cancelled.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        if working.cancel():
            await asyncio.wait({working})
    try:
        return working.result()
    except asyncio.CancelledError:
        raise ActionError("cancelled") from None
