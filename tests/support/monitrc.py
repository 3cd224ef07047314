"""Writes monit's control file and alert configuration as stemcells contain them, and reads monit's state file.

Source: bosh_monit/assets and bosh_go_agent/assets in the stemcell builder.
"""

from __future__ import annotations

import struct
from pathlib import Path

MONIT = Path("/var/vcap/monit")
STATE = struct.Struct("256s4iQ")
"""Layout of a service's entry in monit 5.2.5's state file (state.c)."""


def monitored(state: Path) -> dict[str, int]:
    """Return the monitoring state of each service in a state file. 0 means not monitored."""
    rows = STATE.iter_unpack(state.read_bytes()[4:])
    return {fields[0].rstrip(b"\0").decode(): fields[4] for fields in rows}


def control(monit: Path = MONIT, *, cycle: int = 10, http: str = "", run: Path = MONIT, is_whole: bool = False) -> str:
    """Return a control file like the one in stemcells.

    ``monit`` is the directory for monit's log, state and job files. ``run`` is the directory for its pidfile and id
    file.

    ``http`` replaces the statement for the HTTP interface, which by default is on port 2822 without a password. With
    ``is_whole``, the result also contains the first ``include`` and is exactly the file in stemcells. Without it, monit
    accepts the file even if there are no job files, because monit rejects an ``include`` that matches nothing.
    """
    others = f"include {monit}/*.monitrc" if is_whole else ""
    return f"""
set daemon {cycle}
set logfile {monit}/monit.log
set pidfile {run}/monit.pid
set idfile {run}/monit.id
set statefile {monit}/monit.state
set httpd {http or "port 2822 and use address 127.0.0.1 allow 127.0.0.1"}

{others}
include {monit}/job/*.monitrc
"""


def alerts(monit: Path = MONIT, port: int = 2825) -> str:
    """Return the configuration that makes monit send alerts to the Go agent at ``port``.

    monit queues alerts in a directory below ``monit``.
    """
    return f"""
set alert agent@local

set mailserver localhost port {port}
     with timeout 15 seconds

set eventqueue
    basedir {monit}/events
    slots 5000

set mail-format {{
  from: monit@localhost
  subject: Monit Alert
  message: Service: $SERVICE
  Event: $EVENT
  Action: $ACTION
  Date: $DATE
  Description: $DESCRIPTION
}}
"""
