"""``./dev chaos [CASE or pytest ARGUMENT]...``: run the cases, and write their rows into docs/reliability.md.

CASE is a case id or a group letter, such as ``C-01`` or ``N``. ``--into FILE`` selects another page. With
another agent (``--agent-command``), nothing is written unless ``--into`` is given. If started by root, the cases run in
a PID namespace with their own PID 1, and those marked ``guest`` run in a virtual machine.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.chaos.cases import CASES
from tests.chaos.scorecard import DOCUMENT, earlier, write
from tests.support import guest, namespaces

CASE: Final = re.compile(r"[CNSDRM](-\d\d)?")
GUEST_LIMIT_S: Final = 3 * 3600.0
MODULE: Final = "tests.chaos"


def main(words: Sequence[str]) -> int:
    """Run the cases on this machine, or in the virtual machine if they need it. Return pytest's exit code."""
    cases: list[str] = []
    arguments: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        is_case = CASE.fullmatch(word) and before != "-k"
        (cases if is_case else arguments).append(word)
    if cases:
        arguments += ["-k", " or ".join(case if "-" in case else f"{case}-" for case in cases)]
    if not {"--into", "--agent-command"} & set(arguments):
        arguments += ["--into", str(DOCUMENT)]
    if guest.is_here():
        return pytest(["-m", "guest", *arguments])
    codes = [pytest(["-m", "chaos and not guest", *arguments])]
    has_guest = any(one.guest for one in CASES.values() if not cases or one.id.startswith(tuple(cases)))
    if has_guest and "--agent-command" not in arguments and namespaces.INSIDE in os.environ:
        codes.append(in_guest(arguments))
    return max(0 if code == NOTHING else code for code in codes)


NOTHING: Final = 5
"""pytest's exit code if no test was selected."""


def pytest(arguments: Sequence[str]) -> int:
    """Run the cases one after the other. Return pytest's exit code."""
    argv = [sys.executable, "-m", "pytest", "-q", "--timeout=1800", "-o", "faulthandler_timeout=0", "tests/chaos"]
    # A test in a pytest-xdist worker may have started this module. The new pytest would behave like a worker if it
    # inherited pytest-xdist's variables.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return subprocess.run([*argv, *arguments], env=environment, check=False).returncode


def in_guest(arguments: Sequence[str]) -> int:
    """Run the selected cases that need their own kernel in a virtual machine, and write their rows."""
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", "tests/chaos", "-m", "guest", *arguments],
        capture_output=True,
        check=False,
    )
    if found.returncode:
        return found.returncode
    place = arguments.index("--into") + 1
    inner = [*arguments[:place], "/out/rows.md", *arguments[place + 1 :]]
    with tempfile.TemporaryDirectory() as name:
        rows = Path(name, "rows.md")
        try:
            code = guest.run(["python3", "-m", MODULE, *inner], Path(name), limit=GUEST_LIMIT_S)
        except (guest.GuestError, OSError) as exc:
            sys.stderr.write(f"cannot run the virtual machine: {exc}\n")
            return 1
        if rows.exists():
            write(Path(arguments[place]), earlier(rows.read_text()).values())
        return code


if __name__ == "__main__":
    if not guest.is_here() and "--collect-only" not in sys.argv:
        namespaces.enter(MODULE, sys.argv[1:])
    sys.exit(main(sys.argv[1:]))
