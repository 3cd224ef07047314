"""Entry point: read one request from standard input, write one response to standard output, and log to standard
error.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import Final, NoReturn

ALLOCATIONS_BEFORE_COLLECTION: Final = 100_000
"""Number of allocations that triggers a garbage collection. It is high enough that none runs during the imports, whose
objects nearly all stay in use.
"""


def take_stdout() -> int:
    """Redirect standard output to standard error, so that output from libraries and child processes cannot end up in
    the response. Return a descriptor of the original standard output for writing the response.
    """
    if sys.stderr is None:  # The caller has closed descriptor 2.
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - stays open until the process exits
    response = os.dup(1)
    os.dup2(sys.stderr.fileno(), 1)
    sys.stdout = sys.stderr
    return response


def run() -> NoReturn:
    """Run the CPI and exit the process.

    The CPI job calls this function with ``python -c``, because ``python -m`` would also import ``runpy`` and its
    dependencies.
    """
    gc.set_threshold(ALLOCATIONS_BEFORE_COLLECTION)
    main()
    # Skip the interpreter's shutdown, because it would take longer than a whole `has_vm` call. The response is already
    # written.
    os._exit(0)


COMMANDS: Final = ("doctor", "leftovers")
"""Commands for operators. Without a command, the program serves one request from a Director."""


def main() -> None:
    """Run an operator's command such as ``doctor``, or else answer the CPI request on standard input."""
    if sys.argv[1:2] and sys.argv[1] in COMMANDS:
        from kubernetes_cpi import commands

        sys.exit(commands.run(sys.argv[1:]))
    response = take_stdout()
    from kubernetes_cpi import endpoint

    request = b"" if sys.stdin is None else sys.stdin.buffer.read()
    data = endpoint.answer(request, sys.argv[1:])
    while data:
        data = data[os.write(response, data) :]


if __name__ == "__main__":
    run()
