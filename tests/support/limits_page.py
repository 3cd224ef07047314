"""Generates the table of limits for docs/configuration.md from the values of the constants."""

from __future__ import annotations

import importlib
from typing import Final

from agent_shim import __name__ as package

LIMITS: Final = (
    ("a reply over NATS", "core.wire.MAX_REPLY_BYTES", "it is cut, or replaced by an error, as by the Go agent"),
    ("bytes that wait for a slow NATS server", "edges.bus.link.MAX_BACKLOG_BYTES", "publishing fails"),
    ("requests in progress", "edges.bus.nats.MAX_REQUESTS", "further ones are dropped and counted"),
    ("memory of requests in progress", "edges.bus.nats.MAX_REQUEST_BYTES", "further ones are dropped and counted"),
    ("polls of a task that are held", "actions.tasks.MAX_HELD", "further ones are answered at once"),
    ("tasks that wait for the running one", "actions.tasks.MAX_WAITING", "further requests are refused"),
    ("memory of the requests of these tasks", "actions.tasks.MAX_WAITING_BYTES", "further requests are refused"),
    ("results of tasks that are remembered", "actions.tasks.MAX_OUTCOME_BYTES", "the oldest are forgotten"),
    ("alerts that wait for the bus", "edges.alerts.MAX_QUEUED", "the oldest is dropped and counted"),
    ("connections to port 9190", "edges.http_server.MAX_CONNECTIONS", "the oldest of the busiest address is closed"),
    ("a request to port 9190", "edges.http_server.MAX_REQUEST_BYTES", "it is refused"),
    ("a request over the control socket", "edges.control_server.MAX_REQUEST_BYTES", "it is refused"),
    ("DNS records of `sync_dns`", "services.bundles.MAX_SMALL_BYTES", "the request fails"),
    ("free space that downloads must leave", "bulk.transfer.RESERVE_BYTES", "the download fails"),
    ("age of an archive of `bosh logs`", "services.logs.archives.MAX_AGE_S", "it is removed"),
    ("files that `--job-logs` follows", "services.logs.tail.MAX_FILES", "each job has an equal share of them"),
    ("levels of directories for `--job-logs`", "services.logs.tail.MAX_DEPTH", "files below are not followed"),
    ("levels of directories for rotation", "services.logs.rotation.MAX_DEPTH", "files below are not rotated"),
    ("a monit file", "supervisor.monit.parser.MAX_BYTES", "its job is failing, with the error in `status`"),
    ("monit files of a job", "supervisor.plan.MAX_FILES", "the job is failing, with the error in `status`"),
    ("a `bpm.yml`", "supervisor.bpm.config.MAX_BYTES", "its processes do not start"),
    ("output of a start or stop program", "supervisor.ctl_programs.MAX_OUTPUT_BYTES", "its beginning is cut off"),
    ("log lines that wait for a reader", "core.log.MAX_WAITING_BYTES", "further ones are dropped and counted"),
)
"""The limited quantity, the constant with its limit, and what happens beyond the limit."""


def table() -> str:
    """Return the table with a row for each limit."""
    rows = [f"| {subject} | {shown(constant)} | {beyond} |" for subject, constant, beyond in LIMITS]
    return "\n".join(["| | limit | what happens beyond it |", "|---|---|---|", *rows, ""])


def shown(constant: str) -> str:
    """Return a constant's value with the unit, which is the last part of its name."""
    module, _, name = constant.rpartition(".")
    value = getattr(importlib.import_module(f"{package}.{module}"), name)
    if name.endswith("_BYTES"):
        return f"{value >> 20} MiB" if value >= 1 << 20 else f"{value >> 10} KiB"
    return f"{value / 3600:g} h" if name.endswith("_S") else f"{value:,}".replace(",", " ")
