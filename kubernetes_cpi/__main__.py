"""Entry point: read one request from standard input, write one response to standard output, and log to standard
error.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import Final, NoReturn

ALLOCATIONS_BEFORE_COLLECTION: Final = 100_000
"""Threshold of the garbage collector. The imports allocate fewer objects and keep all of them, so no collection runs
during them.
"""


def take_stdout() -> int:
    """Reserve standard output for the response, and redirect output of libraries and child processes to standard
    error.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - stays open until the process exits
    response = os.dup(1)
    os.dup2(sys.stderr.fileno(), 1)
    sys.stdout = sys.stderr
    return response


def run() -> NoReturn:
    """Run the CPI as the whole process.

    ``python -c`` is used instead of ``-m`` because it starts without ``runpy`` and its imports.
    """
    gc.set_threshold(ALLOCATIONS_BEFORE_COLLECTION)
    main()
    # The response is already written, and a regular interpreter shutdown would take longer than a whole `has_vm` call.
    os._exit(0)


COMMANDS: Final = ("doctor", "leftovers")
"""Commands for operators. Without one of them, the program serves a request of a Director."""


def main() -> None:
    if sys.argv[1:2] and sys.argv[1] in COMMANDS:
        from kubernetes_cpi import commands

        sys.exit(commands.run(sys.argv[1:]))
    response = take_stdout()
    from kubernetes_cpi import door

    request = b"" if sys.stdin is None else sys.stdin.buffer.read()
    data = door.answer(request, sys.argv[1:])
    while data:
        data = data[os.write(response, data) :]


if __name__ == "__main__":
    run()
