"""Tests reading information about processes from ``/proc``."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from agent_shim.host import proc
from tests.support import descriptors

LINE = (
    "%s S 7 41 40 0 -1 4194560 1 2 3 4 11 22 33 44 20 0 1 0 98765 1000000 250 18446744073709551615 1 1 0 0 0 0 0 0 0\n"
)


@pytest.mark.parametrize("name", ["(cat)", "(a b)", "(a) S 1 (b)", "()", "(tmux: server)", "())"])
def test_process_name_does_not_shift_the_stat_fields(name: str) -> None:
    """A process may have any name, including one with spaces and parentheses."""
    stat = proc.parse((LINE % f"41 {name}").encode())

    assert stat == proc.Stat(41, "S", 7, 41, 40, 33, 98765, 250 * proc.PAGE_KB, threads=1, reaped_ticks=77)


@pytest.mark.parametrize(("state", "is_alive"), [("R", True), ("S", True), ("D", True), ("T", True), ("Z", False)])
def test_zombie_is_not_alive(state: str, is_alive: bool) -> None:
    assert proc.Stat(1, state, 0, 1, 1, 0, 0, 0).is_alive is is_alive


def test_process_table_agrees_with_the_stat_of_a_single_process() -> None:
    own = proc.stat(os.getpid())

    assert own is not None
    assert own.parent == os.getppid()
    assert proc.table()[os.getpid()].identity == own.identity


def test_reading_a_missing_process_gives_empty_values() -> None:
    beyond = 2**22 + 1

    assert proc.stat(beyond) is None
    assert proc.command_line(beyond) == ""
    assert proc.open_files(beyond) == 0
    assert not proc.has_our_root(beyond)


def test_command_line_is_joined_with_spaces() -> None:
    """monit matches patterns against command lines in this form."""
    assert proc.command_line(os.getpid()) == " ".join(sys.orig_argv)


@pytest.mark.parametrize("read", [proc.stat, proc.below, proc.command_line, lambda _: proc.table()])
def test_reading_a_process_fails_if_no_descriptor_is_free(read: Callable[[int], object]) -> None:
    """The caller would take an empty result to mean that the process has exited."""
    with descriptors.none_free(), pytest.raises(OSError, match="Too many open files"):
        read(os.getpid())


@pytest.mark.parametrize(
    ("parents", "roots", "found"),
    [
        ({2: 1, 3: 2, 4: 2, 5: 1}, [2], {2, 3, 4}),
        ({2: 1, 3: 2}, [3], {3}),
        ({2: 1, 3: 1}, [2, 3], {2, 3}),
        ({2: 1}, [], set()),
        ({2: 3, 3: 2}, [2], {2, 3}),
    ],
)
def test_process_descendants_are_found(parents: Mapping[int, int], roots: list[int], found: set[int]) -> None:
    """The search includes all generations, and ends even if reused pids cause a cycle."""
    processes = {pid: proc.Stat(pid, "S", parent, 0, 0, 0, 0, 0) for pid, parent in parents.items()}

    assert proc.descent(proc.children(processes), roots) == found


def test_incarnation_is_stable_for_the_lifetime_of_the_container() -> None:
    """The incarnation does not change between two reads, and begins with the kernel's boot id."""
    assert proc.incarnation() == proc.incarnation()
    assert proc.incarnation().startswith(Path("/proc/sys/kernel/random/boot_id").read_text().strip() + "/")


def test_incarnation_differs_in_a_container_with_a_reused_namespace_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reuses namespace numbers, but the first process in a new namespace has a different start time."""
    first = proc.stat(os.getpid())
    assert first is not None
    before = proc.incarnation()
    monkeypatch.setattr(proc, "stat", lambda pid: first if pid == 1 else None)

    assert proc.incarnation() != before
    assert proc.incarnation().rpartition("/")[0] == before.rpartition("/")[0]


def test_process_table_above_the_limit_is_not_read() -> None:
    found = proc.small_table(1 << 22)
    assert found is not None
    assert os.getpid() in found
    assert proc.small_table(len(found) // 2) is None


def test_memory_map_lists_only_files() -> None:
    maps = b"""00400000-00452000 r-xp 00000000 08:02 173521 /usr/bin/a b
00e03000-00e24000 rw-p 00000000 00:00 0 [heap]
35b1800000-35b1820000 r-xp 00000000 08:02 135522

7f5-7f6 r--s 00000000 08:02 1 /lib/x.so (deleted)
7f7-7f8 r--s 00000000 08:02 1 /lib/x\ry"""

    assert list(proc.parse_maps(maps)) == ["/usr/bin/a b", "/lib/x.so (deleted)", "/lib/x\ry"]


@pytest.mark.parametrize(
    ("line", "is_alive"),
    [(LINE.replace(" S ", " Z ", 1), False), (LINE.replace(" S ", " Z ", 1).replace(" 20 0 1 ", " 20 0 2 "), True)],
)
def test_process_whose_main_thread_has_exited_is_alive_while_other_threads_run(line: str, is_alive: bool) -> None:
    assert proc.parse((line % "41 (a)").encode()).is_alive is is_alive


def test_open_files_are_counted_even_if_the_kernel_reports_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Linux 6.2, the size of ``/proc/PID/fd`` is always zero, so the entries in this directory are counted."""
    scandir, descriptors = os.scandir, len(list(Path("/proc/self/fd").iterdir())) - 1
    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", lambda _: SimpleNamespace(st_size=0))
        patched.setattr(
            os, "scandir", lambda path: [*scandir(path)][:-1]
        )  # This leaves out the descriptor of the listing itself.
        found = proc.open_files(os.getpid())

    assert found == descriptors


def test_memory_mappings_count_as_uses_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mapped"
    path.write_bytes(b"x")
    with path.open("rb") as file:
        kept = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
    # Python's mmap object also keeps a descriptor, so the result contains more than the mapping.
    found = proc.uses([os.getpid()], lambda wanted: wanted == str(path), {tmp_path.stat().st_dev})
    kept.close()

    assert proc.Use("map", str(path)) in found[os.getpid()]


def test_cgroup_path_may_contain_colons_and_carriage_returns() -> None:
    found = proc.parse_groups("4:cpu,cpuacct:/a:b/c\n0::/d:e\r1:memory:/f\n")

    assert found == {"cpu": "/a:b/c", "cpuacct": "/a:b/c", "": "/d:e\r1:memory:/f"}


def test_all_processes_are_read_even_if_this_exceeds_the_timeout_for_a_single_process() -> None:
    """On a busy machine, reading hundreds of processes takes longer than the time allowed for reading a single one."""

    def work(pid: int) -> int:
        time.sleep(1.2 * proc.READ_TIMEOUT_S / 20)
        return pid

    assert proc.of_each(range(20), work) == {pid: pid for pid in range(20)}


def test_hanging_proc_reader_does_not_delay_exit() -> None:
    """The reader runs in a daemon thread, for which the interpreter does not wait at exit."""
    found = proc.of_each([1], lambda _: threading.current_thread().daemon)

    assert found == {1: True}


def test_number_of_reported_open_files_is_limited(tmp_path: Path) -> None:
    """The number is limited because a job may have a million files open on its disk."""
    with contextlib.ExitStack() as opened:
        for number in range(100):
            opened.enter_context((tmp_path / str(number)).open("w"))
        found = proc.uses([os.getpid()], lambda path: path.startswith(str(tmp_path)), {tmp_path.stat().st_dev})

    assert len(found[os.getpid()]) == proc.MAX_USES


@pytest.mark.parametrize("parent", [40, 41])
def test_ancestor_search_finds_nothing_if_hidepid_hides_the_parent(
    monkeypatch: pytest.MonkeyPatch, parent: int
) -> None:
    """With the ``hidepid`` mount option, an agent without root cannot see other users' processes."""
    shown = {50: proc.Stat(50, "S", parent, 50, 50, 0, 9, 0), 41: proc.Stat(41, "S", 40, 41, 41, 0, 8, 0)}
    monkeypatch.setattr(proc, "stat", shown.get)

    assert proc.nearest((50, 9), [7]) is None
