"""Runs this project's agent. The first argument is the interval in seconds at which its supervisor checks services."""

from __future__ import annotations

import sys

from agent_shim.cli.main import main as command
from agent_shim.edges.alerts import Alerts
from agent_shim.supervisor.ownership.process_finder import Timing
from agent_shim.supervisor.supervisor import Supervisor


def main() -> None:
    cycle = float(sys.argv.pop(1))
    if cycle != Timing().cycle and Supervisor.__init__.__kwdefaults__ and Alerts.__init__.__kwdefaults__:
        Alerts.__init__.__kwdefaults__["quiet"] = cycle
        Supervisor.__init__.__kwdefaults__["timing"] = Timing(cycle=cycle, settle=cycle)
    sys.exit(command())
