"""Commands for operators: ``python -m kubernetes_cpi doctor`` and ``leftovers``."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Sequence
from typing import Final

from kubernetes_cpi import config as configuration
from kubernetes_cpi import doctor, leftovers, log, records, session
from kubernetes_cpi.errors import CpiError

CONFIG: Final = "configuration as JSON (the job has it in /var/vcap/jobs/kubernetes_cpi/config/cpi.json)"


def run(arguments: Sequence[str]) -> int:
    """Run the command in ``arguments`` and return its exit code.

    The code is 1 if the command fails, if ``doctor`` reports something ``WRONG``, or if ``leftovers`` finds any
    leftovers and ``--delete`` is not set. Otherwise, the code is 0.
    """
    parser = argparse.ArgumentParser(prog="python -m kubernetes_cpi")
    commands = parser.add_subparsers(dest="command", required=True)
    examine = commands.add_parser("doctor", help="list what cluster, namespace and account allow; creates nothing")
    search = commands.add_parser(
        "leftovers",
        help="list objects of VMs, disks and snapshots that the Director does not know. The Director is queried with "
        "the bosh CLI, which needs the login of an admin",
    )
    search.add_argument("--delete", action="store_true", help="delete the VMs; refused while the Director runs a task")
    for one in (examine, search):
        one.add_argument("--config", default="", help=CONFIG)
    given = parser.parse_args(arguments)
    log.reset()
    try:
        # Only ``leftovers`` needs the Director's UUID, because it lists only the objects of that Director.
        context = {"director_uuid": records.director() if given.command == "leftovers" else ""}
        with contextlib.closing(session.opened(configuration.load(given.config, {}), context)) as opened:
            return _doctor(opened) if given.command == "doctor" else _leftovers(opened, given.delete)
    except CpiError as exc:
        log.say(f"{exc}")
        return 1


def _doctor(opened: session.Session) -> int:
    """Print the findings. Return 1 if one of them is ``WRONG``."""
    states = set()
    # Suppress the log, which would list every call to the cluster.
    with contextlib.redirect_stderr(io.StringIO()):
        for one in doctor.findings(opened):
            states.add(one.state)
            _write(f"{one.state:8} {one.subject:20} {one.text}")
            if one.change:
                _write(f"{'':29} change: {one.change}")
    return int(doctor.WRONG in states)


def _leftovers(opened: session.Session, is_deleting: bool) -> int:
    """Print the unknown VMs, disks and snapshots. Return 1 if there are any. If ``is_deleting`` is set, delete the VMs
    and return 0.
    """
    # Suppress the log, which would list every call to the cluster.
    with contextlib.redirect_stderr(io.StringIO()):
        found = leftovers.unknown(opened, is_deleting=is_deleting)
        for one in found:
            _write(f"{one.cid}: {', '.join(one.objects)}")
        for line in leftovers.remove(opened, found) if is_deleting else ():
            _write(line)
    return int(bool(found) and not is_deleting)


def _write(text: str) -> None:
    sys.stdout.write(log.redacted(text) + "\n")
    sys.stdout.flush()
