"""Checks that only ``host.proc`` reads other processes' files in ``/proc``, because such reads need limits."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from tests.support.source import Module, modules

OF_A_PROCESS = re.compile(r"(^|/)proc/?$|/proc/(\d|\{|%)")
"""Matches ``/proc`` itself and every path in the directory of a process, such as ``/proc/1/stat`` or
``/proc/{pid}/environ``.
"""

PLACES: Mapping[str, str] = {
    "host.proc": "reads other processes with limits",
    "host.sandbox_exec": "mounts /proc",
    "host.host_stats": "reads values of the machine, not of a process; tests replace the root directory",
    "host.pseudo_terminal": "opens a pseudo-terminal in the root directory of a process that an operator has named",
    "services.disks.mounting": "refuses /proc as the mount point of a disk",
    "supervisor.bpm_runner": "mounts /proc into the sandbox of a job",
}
"""Modules that are allowed to contain such a path, with the reasons."""


def texts(module: Module) -> Iterator[tuple[str, int]]:
    """Yield a module's string literals, except docstrings, with their line numbers. In f-strings, each inserted value
    becomes ``{``.
    """
    for node in module.nodes:
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "{" for part in node.values)
            yield "".join(map(str, parts)), node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
            yield node.value, node.lineno


def test_only_host_proc_reads_other_processes_files() -> None:
    """Reading another process's files requires limits, because its environment can be terabytes long, and it can make
    the read block forever.
    """
    others = [module for module in modules().values() if module.name not in PLACES]
    found = [(each.name, line, text) for each in others for text, line in texts(each) if OF_A_PROCESS.search(text)]

    assert found == []


def test_code_that_reads_other_processes_files_is_detected() -> None:
    for text in ("/proc", "/proc/", "/proc/1/comm", "/proc/{/environ"):
        assert OF_A_PROCESS.search(text)
    for text in ("/proc/self/fd/{", "/proc/net/route", "/proc/sys/fs", "/process", "/proc/stat"):
        assert not OF_A_PROCESS.search(text)
