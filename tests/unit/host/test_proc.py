"""Readings of processes."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import sys
import threading
from collections.abc import Callable, Collection, Mapping
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
    """A process may have any name."""
    stat = proc.parse((LINE % f"41 {name}").encode())

    assert stat == proc.Stat(41, "S", 7, 41, 40, 33, 98765, 250 * proc.PAGE_KB, threads=1, reaped_ticks=77)


@pytest.mark.parametrize(("flags", "is_kernel"), [("4194560", False), ("2129984", True)])
def test_kernel_thread_is_recognized_by_its_flags(flags: str, is_kernel: bool) -> None:
    """A process whose session began outside its pid namespace has session 0 too, as below ``unshare``."""
    line = (LINE % "41 (a)").replace(" 40 ", " 0 ", 1).replace(" 4194560 ", f" {flags} ")

    assert proc.parse(line.encode()).session == 0
    assert proc.parse(line.encode()).is_kernel is is_kernel


@pytest.mark.parametrize(("state", "is_alive"), [("R", True), ("S", True), ("D", True), ("T", True), ("Z", False)])
def test_zombie_is_dead(state: str, is_alive: bool) -> None:
    """It only waits to be reaped."""
    assert proc.Stat(1, state, 0, 1, 1, 0, 0, 0).is_alive is is_alive


def test_process_table_agrees_with_a_single_read() -> None:
    """The table and a single look agree."""
    own = proc.stat(os.getpid())

    assert own is not None
    assert own.parent == os.getppid()
    assert proc.table()[os.getpid()].identity == own.identity


def test_missing_process_is_none_without_an_error() -> None:
    """A number without a process is no error, and its attributes are empty."""
    beyond = 2**22 + 1

    assert proc.stat(beyond) is None
    assert proc.command_line(beyond) == ""
    assert proc.variable(beyond, "PATH") is None
    assert proc.open_files(beyond) == 0
    assert not proc.has_our_root(beyond)


def test_command_line_is_joined_by_blanks() -> None:
    """monit matches it that way."""
    assert proc.command_line(os.getpid()) == " ".join(sys.orig_argv)


def test_environment_variable_is_the_initial_one() -> None:
    """A name is matched whole."""
    assert proc.variable(os.getpid(), "PATH")
    assert proc.variable(os.getpid(), "PAT") is None


def test_processes_are_read_and_listed_without_a_free_descriptor(caplog: pytest.LogCaptureFixture) -> None:
    """They would otherwise look exited."""
    proc.tell_shortage.cache_clear()
    before = proc.stat(os.getpid())
    with descriptors.none_free():
        found = [proc.stat(os.getpid()) for _ in range(3)]
        missing = proc.stat(1 << 22)
        again = proc.stat(os.getpid())
        listed = [proc.table().get(os.getpid()), (proc.small_table(100_000) or {}).get(os.getpid())]

    assert before is not None
    assert missing is None
    assert {one and one.identity for one in (*found, again, *listed)} == {before.identity}
    assert caplog.text.count("no free descriptor") == 1


def test_reading_environments_has_a_budget_per_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job can give each process a quarter of a megabyte of NULs. Beyond the budget, only the first page is read."""
    asked: list[int] = []

    def read(pid: int, _: str, limit: int) -> bytes:
        asked.append(limit)
        text = b"A=b\0MARK=web\0"
        return bytes(limit) if pid else text

    monkeypatch.setattr(proc, "read_memory", read)
    full = proc.MAX_PASS_BYTES // proc.MAX_ENVIRON_BYTES

    assert proc.variables([*range(1, full + 3), 0], "MARK")[0] == {0: "web"}
    assert asked == [proc.MAX_ENVIRON_BYTES] * full + [proc.MIN_ENVIRON_BYTES] * 3


@pytest.mark.parametrize(
    ("text", "value"),
    [(b"MARK=web", "web"), (b"A=MARK=x\0MARK=web\0B=c", "web"), (b"MARKS=web\0", None), (b"MARK=\0", ""), (b"", None)],
)
def test_environment_variable_is_found_between_nuls(
    monkeypatch: pytest.MonkeyPatch, text: bytes, value: str | None
) -> None:
    monkeypatch.setattr(proc, "read_memory", lambda *_: text)

    assert proc.variable(7, "MARK") == value


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
def test_descendants_of_a_process_are_found(parents: Mapping[int, int], roots: list[int], found: set[int]) -> None:
    """Children, grandchildren and so on are included. A cycle, which reused numbers can cause, ends."""
    processes = {pid: proc.Stat(pid, "S", parent, 0, 0, 0, 0, 0) for pid, parent in parents.items()}

    assert proc.descent(proc.children(processes), roots) == found


def test_incarnation_is_stable_for_the_lifetime_of_the_container() -> None:
    """It is the same for every query, and not empty on Linux."""
    assert proc.incarnation() == proc.incarnation()
    assert proc.incarnation().startswith(Path("/proc/sys/kernel/random/boot_id").read_text().strip() + "/")


def test_container_with_a_reused_namespace_number_is_a_different_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reuses free numbers. The first processes of the two have different ages."""
    first = proc.stat(os.getpid())
    assert first is not None
    before = proc.incarnation()
    monkeypatch.setattr(proc, "stat", lambda pid: first if pid == 1 else None)

    assert proc.incarnation() != before
    assert proc.incarnation().rpartition("/")[0] == before.rpartition("/")[0]


def test_census_finds_marked_processes() -> None:
    """A process that was started with a variable is found by its value."""
    found = proc.census("PATH")

    assert os.getpid() in found.marked[proc.variable(os.getpid(), "PATH") or ""]
    assert os.getpid() in found.children[os.getppid()]


def test_small_process_table_is_complete_or_none() -> None:
    found = proc.small_table(1 << 22)
    assert found is not None
    assert os.getpid() in found
    assert proc.small_table(len(found) // 2) is None


def test_only_mapped_files_count_as_mapped() -> None:
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
def test_process_without_its_main_thread_lives_while_others_do(line: str, is_alive: bool) -> None:
    assert proc.parse((line % "41 (a)").encode()).is_alive is is_alive


def test_open_files_are_counted_on_kernels_without_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Linux 6.2 the directory has no size."""
    scandir, descriptors = os.scandir, len(list(Path("/proc/self/fd").iterdir())) - 1
    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", lambda _: SimpleNamespace(st_size=0))
        patched.setattr(os, "scandir", lambda path: [*scandir(path)][:-1])  # without the one of the listing
        found = proc.open_files(os.getpid())

    assert found == descriptors


def test_mapped_file_is_in_use_after_it_was_closed(tmp_path: Path) -> None:
    path = tmp_path / "mapped"
    path.write_bytes(b"x")
    with path.open("rb") as file:
        kept = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
    # A mapping of Python's has a descriptor of its own.
    found = proc.uses([os.getpid()], lambda wanted: wanted == str(path), {tmp_path.stat().st_dev})
    kept.close()

    assert proc.Use("map", str(path)) in found[os.getpid()]


def test_cgroup_path_may_contain_colons_and_carriage_returns() -> None:
    found = proc.parse_groups("4:cpu,cpuacct:/a:b/c\n0::/d:e\r1:memory:/f\n")

    assert found == {"cpu": "/a:b/c", "cpuacct": "/a:b/c", "": "/d:e\r1:memory:/f"}


def test_last_pid_is_read_from_ns_last_pid_or_loadavg(monkeypatch: pytest.MonkeyPatch) -> None:
    assert proc.last_number() is not None
    texts = {"/proc/loadavg": "0.10 0.20 0.30 1/234 5678\n"}

    def read(path: Path) -> str:
        try:
            return texts[str(path)]
        except KeyError:
            raise FileNotFoundError from None

    monkeypatch.setattr(Path, "read_text", read)
    assert proc.last_number() == 5678

    texts["/proc/sys/kernel/ns_last_pid"] = "5679\n"
    assert proc.last_number() == 5679
    texts.clear()
    assert proc.last_number() is None


def test_census_lists_no_thread_that_starts_during_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc opens the number of each thread."""
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    real, last = proc.stat, proc.last_number()

    def stat(pid: int) -> proc.Stat | None:
        if thread.native_id is None:
            thread.start()
        return real(pid)

    monkeypatch.setattr(proc, "stat", stat)
    monkeypatch.setattr(proc, "last_number", lambda: thread.native_id or last)
    try:
        found = proc.census("MARK")
        assert real(thread.native_id or 0) is not None
    finally:
        over.set()
        thread.join()
    assert thread.native_id not in found.processes


def test_census_is_inconclusive_while_pids_wrap_around(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.chain([4_000_000], itertools.repeat(301))
    monkeypatch.setattr(proc, "last_number", lambda: next(numbers))

    assert proc.census("MARK").unread is None


def test_process_pass_that_advances_is_not_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine hundreds of processes take longer than the timeout for one."""
    looked_at: list[int] = []
    arrived, turn = threading.Semaphore(0), threading.Semaphore(0)

    class EndOfTime(threading.Event):
        """Each wait expires while the thread is at the next process, or returns once it has ended."""

        is_first = True

        def wait(self, timeout: float | None = None) -> bool:  # noqa: ARG002
            if not self.is_first:
                turn.release()
            self.is_first = False
            assert arrived.acquire(timeout=60)
            return self.is_set()

        def set(self) -> None:
            super().set()
            arrived.release()

    class Watched(proc.Pass[int]):
        def __init__(self, pids: Collection[int], work: Callable[[int], int]) -> None:
            super().__init__(pids, work)
            self.is_over = EndOfTime()

    def work(pid: int) -> int:
        looked_at.append(pid)
        arrived.release()
        assert turn.acquire(timeout=60)
        return pid

    monkeypatch.setattr(proc, "Pass", Watched)

    assert proc.of_each([1, 2, 3, 4], work) == {1: 1, 2: 2, 3: 3, 4: 4}
    assert looked_at == [1, 2, 3, 4]


def test_hanging_proc_reader_does_not_delay_exit() -> None:
    """Only a daemon thread is not waited for."""
    found = proc.of_each([1], lambda _: threading.current_thread().daemon)

    assert found == {1: True}


def test_number_of_reported_files_in_use_is_bounded(tmp_path: Path) -> None:
    """A job may have a million descriptors on its disk."""
    with contextlib.ExitStack() as opened:
        for number in range(100):
            opened.enter_context((tmp_path / str(number)).open("w"))
        found = proc.uses([os.getpid()], lambda path: path.startswith(str(tmp_path)), {tmp_path.stat().st_dev})

    assert len(found[os.getpid()]) == proc.MAX_USES
