"""Entry point: one request on standard input, one response on standard output, the log on standard error."""

from __future__ import annotations

import os
import sys


def take_stdout() -> int:
    """Reserve standard output for the response: output of libraries and children goes to standard error."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process runs
    response = os.dup(1)
    os.dup2(sys.stderr.fileno(), 1)
    sys.stdout = sys.stderr
    return response


def main() -> None:
    response = take_stdout()
    from kubernetes_cpi import door

    request = b"" if sys.stdin is None else sys.stdin.buffer.read()
    data = door.answer(request, sys.argv[1:])
    while data:
        data = data[os.write(response, data) :]


if __name__ == "__main__":
    main()
