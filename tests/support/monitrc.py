"""monit's control file and the one of its mails, as stemcells ship them (bosh_monit/assets, bosh_go_agent/assets).

And monit's state file.
"""

from __future__ import annotations

import struct
from pathlib import Path

MONIT = Path("/var/vcap/monit")
STATE = struct.Struct("256s4iQ")
"""A service in the state file of monit 5.2.5 (state.c)."""


def monitored(state: Path) -> dict[str, int]:
    """Content of a state file, by service: 0 is not monitored."""
    rows = STATE.iter_unpack(state.read_bytes()[4:])
    return {fields[0].rstrip(b"\0").decode(): fields[4] for fields in rows}


def control(monit: Path = MONIT, *, cycle: int = 10, http: str = "", run: Path = MONIT, is_whole: bool = False) -> str:
    """The control file. ``monit`` has log, state and files of jobs, ``run`` the pidfile and the id.

    ``http`` replaces port 2822 of the machine without a password. A stemcell's ``is_whole``: monit refuses its first
    ``include`` without a file.
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
    """Mails to the Go agent at ``port``, which wait in a directory of ``monit``."""
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
