"""Parser for start and stop programs in monit files that call bpm. Does no I/O."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

_BPM: Final = ("/jobs/bpm/bin/bpm", "/packages/bpm/bin/bpm")
"""Ends of the paths under which releases call bpm."""
_FLAG: Final = r"(?:-p\0|-p=?|--process\0|--process=)"
_ARGUMENTS: Final = rf"(?:{_FLAG}(?P<before>[^\0]+)\0)?(?P<job>[^-\0][^\0]*)(?:\0{_FLAG}(?P<after>[^\0]+))?"
"""Matches the arguments of ``bpm start`` and ``bpm stop``, joined with NUL."""


class BpmCall(msgspec.Struct, frozen=True):
    """A call ``bpm start JOB -p PROCESS`` or ``bpm stop JOB -p PROCESS``."""

    verb: Literal["start", "stop"]
    job: str
    process: str


def bpm_call(argv: Sequence[str]) -> BpmCall | None:
    """Parse a bpm start or stop command. Return None for any other command. Without ``-p``, the process is named after
    the job.
    """
    if len(argv) < 3 or not argv[0].endswith(_BPM) or argv[1] not in ("start", "stop"):
        return None
    found = re.fullmatch(_ARGUMENTS, "\0".join(argv[2:]))
    verb: Literal["start", "stop"] = "start" if argv[1] == "start" else "stop"
    return BpmCall(verb, found["job"], found["before"] or found["after"] or found["job"]) if found else None


def bpm_label(job: str, process: str) -> str:
    """Return the label of the keepers that run a bpm.yml process."""
    return f"bpm/{job}/{process}"
