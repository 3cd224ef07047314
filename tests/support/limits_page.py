"""Generates the table of limits for docs/configuration.md from the constants' values."""

from __future__ import annotations

import importlib
from typing import Final

from agent_shim import __name__ as package

LIMITS: Final = (
    (
        "size of a reply over NATS",
        "core.wire.MAX_REPLY_BYTES",
        "it is shortened or replaced with an error, as under the Go agent",
    ),
    ("outgoing data waiting for a slow NATS server", "edges.bus.link.MAX_BACKLOG_BYTES", "publishing fails"),
    ("requests in progress", "edges.bus.nats.MAX_REQUESTS", "further requests are dropped and counted"),
    (
        "`get_task` requests that wait briefly for their task to finish",
        "actions.tasks.MAX_HELD",
        "further requests are answered immediately",
    ),
    ("tasks waiting for the running task", "actions.tasks.MAX_WAITING", "further requests are rejected"),
    ("total size of stored task results", "actions.tasks.MAX_OUTCOME_BYTES", "the oldest results are deleted"),
    ("alerts waiting for the bus", "edges.alerts.MAX_QUEUED", "the oldest alert is dropped and counted"),
    (
        "connections to port 9190",
        "edges.http_server.MAX_CONNECTIONS",
        "the client address with the most connections loses its oldest one",
    ),
    ("size of a request to port 9190", "edges.http_server.MAX_REQUEST_BYTES", "it is rejected"),
    ("size of a request over the control socket", "edges.control_server.MAX_REQUEST_BYTES", "it is rejected"),
    ("size of the DNS records in `sync_dns`", "services.bundles.MAX_SMALL_BYTES", "the request fails"),
    ("free disk space that downloads must leave", "bulk.transfer.RESERVE_BYTES", "the download fails"),
    ("age of an archive for `bosh logs`", "services.logs.archives.MAX_AGE_S", "the archive is removed"),
    ("files that `--job-logs` follows", "services.logs.tail.MAX_FILES", "each job gets an equal share of the files"),
    ("depth of log directories for `--job-logs`", "services.logs.tail.MAX_DEPTH", "deeper files are not followed"),
    ("depth of log directories for rotation", "services.logs.rotation.MAX_DEPTH", "deeper files are not rotated"),
    ("size of a monit file", "supervisor.monit.parser.MAX_BYTES", "the job is failing, and `status` shows the error"),
    ("size of a `bpm.yml`", "supervisor.bpm.config.MAX_BYTES", "the processes in it do not start"),
    ("stored output of a start or stop program", "supervisor.ctl_programs.MAX_OUTPUT_BYTES", "only the end is kept"),
    (
        "total size of log lines waiting for a reader",
        "core.log.MAX_WAITING_BYTES",
        "further lines are dropped and counted",
    ),
)
"""For each limit: the quantity that is limited, the name of the constant that contains the limit, and what happens when
the limit is exceeded.
"""


def table() -> str:
    """Return the table with a row for each limit."""
    rows = [f"| {subject} | {shown(constant)} | {beyond} |" for subject, constant, beyond in LIMITS]
    return "\n".join(["| what is limited | limit | what happens beyond it |", "|---|---|---|", *rows, ""])


def shown(constant: str) -> str:
    """Return a constant's value with its unit, which is derived from the end of the constant's name."""
    module, _, name = constant.rpartition(".")
    value = getattr(importlib.import_module(f"{package}.{module}"), name)
    if name.endswith("_BYTES"):
        return f"{value >> 20} MiB" if value >= 1 << 20 else f"{value >> 10} KiB"
    return f"{value / 3600:g} h" if name.endswith("_S") else f"{value:,}".replace(",", " ")
