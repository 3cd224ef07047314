"""Installs, starts and stops the deployed jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from agent_shim.actions.agent import Agent
from agent_shim.actions.dispatch import Mode, ProtocolVersion, action
from agent_shim.actions.state import record_health
from agent_shim.bulk.protocol import BlobRef
from agent_shim.core.errors import ActionError, HostError, ShimError, errors_as
from agent_shim.core.settings import Effective
from agent_shim.core.spec import ApplySpec
from agent_shim.host import guarded, network
from agent_shim.services.bundles import Bundle
from agent_shim.supervisor.monit import parser
from agent_shim.supervisor.supervisor import JobFile

ADDRESS: Final = ("ip", "netmask", "gateway")
"""Members of a dynamic network that the agent fills in."""


@action("prepare", Mode.TASK)
async def prepare(agent: Agent, wanted: ApplySpec) -> str:
    """Download and unpack the bundles for a later ``apply`` without enabling them (agent/action/prepare.go)."""
    with errors_as("Preparing apply spec", ShimError):
        await _install(agent, wanted)
    return "prepared"


@action("apply", Mode.TASK)
async def apply(agent: Agent, wanted: ApplySpec) -> str:
    """Make ``wanted`` the state of this instance (agent/action/apply.go).

    Downloads, verifies and unpacks all bundles before it changes anything that is running. A spec without a
    configuration hash is only stored, because the Director sends such a spec to initialize a new instance.
    """
    for package in wanted.packages.values():
        if not package.sha1:  # the Go agent does not check this until it has installed everything
            raise ActionError(f"Persisting apply spec: package {package.name}: no digests have been provided")
    return await deploy(agent, wanted)


async def deploy(agent: Agent, wanted: ApplySpec) -> str:
    """Apply a spec. Unlike ``apply``, accept packages without a digest if they are already installed, which they
    always are without a Director.
    """
    settings = agent.settings.current
    networks = _resolved(settings, agent.spec.current.networks, wanted.networks)
    wanted = msgspec.structs.replace(wanted, networks=networks)
    if wanted.configuration_hash:  # a new VM's first spec has no rendered templates, so there is nothing to install
        with errors_as("Applying", ShimError):
            jobs, packages = await _install(agent, wanted)
            # Stop supervising the services until ``start``, because their files are about to change.
            await agent.supervisor.forget()
            await agent.bundles.activate(jobs, packages)
    await agent.spec.save(wanted)
    await asyncio.to_thread(agent.spec.write_instance_files)
    # Save the supervisor's state. Without the saved state, an agent in a new container would assume that the jobs had
    # been running, and start them.
    with errors_as("Applying", HostError):
        await agent.supervisor.saved()
    return "applied"


async def _install(agent: Agent, wanted: ApplySpec) -> tuple[list[Bundle], list[Bundle]]:
    """Install a spec's jobs and packages. Return the jobs' bundles and the packages' bundles. If the archive with the
    jobs is stored on this machine, it is deleted afterwards.
    """
    settings = agent.settings.current
    jobs, packages = bundles_of(wanted)
    await agent.bundles.install([*jobs, *packages], settings.blobstore, settings.source.env.bosh.parallel)
    if wanted.rendered_templates_archive is not None:
        await agent.bundles.delete_source(wanted.rendered_templates_archive.blobstore_id)
    return jobs, packages


def bundles_of(wanted: ApplySpec) -> tuple[list[Bundle], list[Bundle]]:
    """Return a spec's jobs and packages as bundles. All jobs come from a single archive, the rendered templates."""
    archive = wanted.rendered_templates_archive
    jobs = []
    if archive is not None:
        source = BlobRef(blob_id=archive.blobstore_id, digest=archive.sha1 or "")
        jobs = [Bundle("job", template.name, template.version, source) for template in wanted.job.templates or []]
    packages = []
    for package in wanted.packages.values():
        source = BlobRef(package.blobstore_id, package.signed_url, package.blobstore_headers or {}, package.sha1)
        packages.append(Bundle("package", package.name, package.version, source))
    return jobs, packages


def _resolved(settings: Effective, applied: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the networks of a spec with the address, netmask and gateway of each dynamic network filled in. Everything
    else is left unchanged.

    An address is determined only once per VM (applyspec/concrete_v1_service.go) and then taken from ``applied``,
    because the Director would recreate an instance whose address changes. Addresses in ``wanted`` are replaced, because
    they may come from the previous VM.
    """
    resolved = dict(wanted)
    for name, members in wanted.items():
        # Like the Go agent, ignore a network that old versions of the CLI invented. It is not in the settings.
        if name == "local" and isinstance(members, dict) and members.get("ip") == "127.0.0.1":
            continue
        known = settings.source.networks.get(name)
        if known is None:
            raise ActionError(f"Resolving dynamic networks: Network '{name}' is not found in settings")
        if not known.is_dynamic or not isinstance(members, dict):
            continue
        reported = applied.get(name)
        if not isinstance(reported, dict) or not reported.get("ip"):
            is_ipv6 = known.prefix == "128"  # the prefix length of a single IPv6 address
            address = network.default_address(ipv6=is_ipv6)
            if address is None:
                raise ActionError(f"Resolving dynamic networks: cannot find the address of '{name}': no default route")
            reported = {"ip": address.ip, "netmask": address.netmask, "gateway": address.gateway}
        resolved[name] = {**members, **{key: reported[key] for key in ADDRESS if key in reported}}
    return resolved


def missing_files(agent: Agent) -> str:
    """Return an error message if files of the deployed jobs have been lost, for example because they were on a tmpfs.
    The message names one of the jobs or packages. Return "" if none are missing.
    """
    jobs, packages = bundles_of(agent.spec.current)
    gone = agent.bundles.missing([*jobs, *packages] if jobs else [])  # without jobs, nothing uses the packages
    if not gone:
        return ""
    return f"the files of {gone[0].kind} {gone[0].name} are gone, the Director has to apply its spec again"


@action("start", Mode.NOW)
async def start(agent: Agent) -> str:
    """Write the monit files and start all jobs without waiting (agent/action/start.go).

    Fails if job files are missing. Also fails if the persistent disk is not mounted, because the jobs would otherwise
    write to the directory under the mount point.
    """
    problem = missing_files(agent)
    if not problem:
        problem, job_files = await asyncio.gather(agent.disks.problem(), _monit_files(agent))
    if problem:
        raise ActionError(f"Starting Monitored Services: {problem}")
    await agent.supervisor.configure(job_files)
    with errors_as("Starting Monitored Services", HostError):
        await agent.supervisor.start()
    # The Director starts jobs only after their pre-start scripts have run. Record that the scripts have run, and start
    # any jobs that job recovery has held back until now.
    await agent.state_backup.prepared()
    agent.supervisor.end_hold()
    await record_health(agent)
    return "started"


async def _monit_files(agent: Agent) -> list[JobFile]:
    """Read the monit files of the jobs in the current spec."""
    with errors_as("Configuring jobs: cannot read the monit files"):
        return await asyncio.to_thread(monit_files, agent.paths.jobs, agent.spec.current.job_names)


def monit_files(jobs: Path, names: list[str]) -> list[JobFile]:
    """Read each job's ``monit`` and ``*.monit`` files, in the order of the spec (applier/jobs/rendered_job_applier.go).

    Reading stops just above the size limit, so that ``plan`` can reject a job whose file is too large.
    """
    found = []
    for job in names:
        directory = jobs / job
        paths = [path for path in [directory / "monit", *sorted(directory.glob("*.monit"))] if path.is_file()]
        for path in paths:
            label = "" if path.name == "monit" else path.name.removesuffix(".monit")
            text = guarded.head(path, parser.MAX_BYTES + 1).decode("utf-8", "replace")
            found.append(JobFile(job, label, text))
    return found


@action("stop", Mode.TASK)
async def stop(agent: Agent, protocol: ProtocolVersion) -> str:
    """Stop all jobs. From protocol version 3 on, wait until none of their processes are left (agent/action/stop.go)."""
    with errors_as("Stopping Monitored Services", ActionError, HostError):
        await agent.supervisor.stop(wait=protocol > 2)
    await record_health(agent)
    return "stopped"
