"""Tests that vitals are valid whatever the kernel reports, and are not delayed by a disk that does not respond."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_shim.core.paths import Paths
from agent_shim.host import clock
from agent_shim.host.host_stats import CpuTimes, Memory
from agent_shim.services import vitals
from agent_shim.services.vitals import Vitals

STAT = "cpu 300 0 100 500 100 0 0 0 0 0\n"
MEMINFO = "MemTotal: 2048000 kB\nMemFree: 512000 kB\nMemAvailable: 1024000 kB\nSwapTotal: 1000 kB\nSwapFree: 750 kB\n"
LOAD = "0.39 0.51 0.48 1/2 3\n"


def write(proc: Path, **files: str | bytes) -> Path:
    """Write files below ``proc``. Two underscores in a name stand for a slash."""
    for name, content in files.items():
        path = proc / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    return proc


def stat_of_init(start_ticks: int) -> str:
    return f"1 (init) S 0 1 1 0 -1 0 0 0 0 0 1 1 0 0 20 0 1 0 {start_ticks} 0 0 0\n"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    begun = int((clock.boot_time() - 100) * clock.TICKS)
    return write(tmp_path / "proc", stat=STAT, meminfo=MEMINFO, loadavg=LOAD, **{"1__stat": stat_of_init(begun)})


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    paths = Paths(tmp_path)
    paths.data.mkdir()
    paths.store.mkdir()
    return paths


async def test_vitals_have_the_members_and_formats_of_a_heartbeat(paths: Paths, proc: Path) -> None:
    sample = await Vitals(paths, lambda: True, proc=proc).sample()

    assert sample.pop("uptime") in ({"secs": 100}, {"secs": 101})
    disks = sample.pop("disk")
    assert set(disks) == {"system", "ephemeral", "persistent"}
    assert all(re.fullmatch("[0-9]+", text) for disk in disks.values() for text in disk.values())
    assert sample == {
        "cpu": {"user": "30.0", "sys": "10.0", "wait": "10.0"},
        "mem": {"kb": "1024000", "percent": "50"},
        "swap": {"kb": "250", "percent": "25"},
        "load": ["0.39", "0.51", "0.48"],
    }


async def test_cpu_vitals_are_averaged_over_ten_seconds(
    paths: Paths, proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(clock, "boot_time", lambda: now)
    taken = Vitals(paths, lambda: False, proc=proc)
    await taken.sample()
    write(proc, stat="cpu 400 50 100 550 100 0 0 0 0 0\n")
    now += 9.9
    early = await taken.sample()
    now += 0.1
    late = await taken.sample()

    assert early["cpu"] == {"user": "30.0", "sys": "10.0", "wait": "10.0"}
    assert late["cpu"] == {"user": "75.0", "sys": "0.0", "wait": "0.0"}


async def test_container_vitals_are_relative_to_the_container_limits(paths: Paths, proc: Path, tmp_path: Path) -> None:
    """The machine's figures must not be reported, because they include other containers."""
    top = write(
        tmp_path / "cgroup",
        **{
            "memory.max": str(512000 * 1024),
            "memory.current": str(384000 * 1024),
            "memory.stat": f"inactive_file {256000 * 1024}\n",
            "memory.swap.max": "0",
            "memory.swap.current": "0",
            "cpu.max": "10000 100000",
            "cpu.stat": "user_usec 5000000\nsystem_usec 1000000\n",
        },
    )
    write(proc, self__cgroup="0::/\n", self__mountinfo=f"31 23 0:28 / {top} ro - cgroup2 cgroup rw\n")

    sample = await Vitals(paths, lambda: False, proc=proc).sample()

    assert sample["mem"] == {"kb": "128000", "percent": "25"}
    assert sample["swap"] == {"kb": "0", "percent": "0"}
    assert float(sample["cpu"]["user"]) == pytest.approx(50, abs=1)
    assert float(sample["cpu"]["sys"]) == pytest.approx(10, abs=1)
    assert sample["cpu"]["wait"] == "0.0"


async def test_persistent_disk_vitals_are_reported_only_while_a_disk_is_mounted(paths: Paths, proc: Path) -> None:
    """The store directory exists even without a disk, but then it is part of another file system, whose usage must not
    be reported.
    """
    mounted = False
    taken = Vitals(paths, lambda: mounted, proc=proc)

    assert set((await taken.sample())["disk"]) == {"system", "ephemeral"}
    mounted = True
    assert "persistent" in (await taken.sample())["disk"]


async def test_dynamic_disks_have_metrics_but_no_vitals(paths: Paths, proc: Path, tmp_path: Path) -> None:
    """The Director accepts only three members of ``disk``."""
    places = {"disk-d": tmp_path, "disk-gone": tmp_path / "gone"}
    taken = Vitals(paths, lambda: False, lambda: places, proc=proc)

    assert set((await taken.sample())["disk"]) == {"system", "ephemeral"}
    assert set(taken.figures().disks) == {"system", "ephemeral", "disk-d"}


async def test_vitals_omit_a_missing_disk(tmp_path: Path, proc: Path) -> None:
    sample = await Vitals(Paths(tmp_path / "none"), lambda: True, proc=proc).sample()

    assert set(sample["disk"]) == {"system"}


async def test_hanging_disk_does_not_delay_vitals(paths: Paths, proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, asked, real = threading.Event(), [], os.statvfs

    def statvfs(path: Path) -> os.statvfs_result:
        if path == paths.store:
            asked.append(path)
            answers.wait(20)
        return real(path)

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr(vitals, "DISK_TIMEOUT_S", 1)
    taken = Vitals(paths, lambda: True, proc=proc)
    try:
        first, second = await taken.sample(), await taken.sample()
        assert (set(first["disk"]), set(second["disk"])) == ({"system", "ephemeral"},) * 2
        assert asked == [paths.store]
    finally:
        answers.set()
    monkeypatch.setattr(vitals, "DISK_TIMEOUT_S", 10)

    assert set((await taken.sample())["disk"]) == {"system", "ephemeral", "persistent"}


@pytest.mark.parametrize("start_ticks", [10**15, 10**400, -5])
async def test_vitals_never_contain_an_uptime_of_zero(paths: Paths, proc: Path, start_ticks: int) -> None:
    """Because of lxcfs or a wrong clock, PID 1 may seem to have started in the future. In that case, the uptime is
    unknown, so ``uptime`` is empty.
    """
    write(proc, **{"1__stat": stat_of_init(start_ticks)})

    uptime = (await Vitals(paths, lambda: False, proc=proc).sample())["uptime"]

    assert uptime == {} if start_ticks == 10**15 else uptime["secs"] > 0


async def test_vitals_contain_the_uptime_of_the_machine_if_pid_1_is_hidden(paths: Paths, proc: Path) -> None:
    (proc / "1/stat").unlink()

    uptime = (await Vitals(paths, lambda: False, proc=proc).sample())["uptime"]

    assert abs(uptime["secs"] - clock.boot_time()) < 2


@pytest.mark.parametrize(("missing", "member"), [("stat", "cpu"), ("meminfo", "mem"), ("loadavg", "load")])
async def test_missing_proc_file_does_not_affect_other_vitals(
    paths: Paths, proc: Path, missing: str, member: str
) -> None:
    (proc / missing).unlink()

    sample = await Vitals(paths, lambda: False, proc=proc).sample()

    gone = {"mem", "swap"} if member == "mem" else {member}
    assert set(sample) == {"cpu", "mem", "swap", "load", "disk", "uptime"} - gone


def check(sample: dict[str, Any]) -> None:
    """Check the types and ranges that the bosh CLI and the Health Monitor need."""
    for group, form in (("cpu", r"[0-9]{1,3}\.[0-9]"), ("mem", "[0-9]+"), ("swap", "[0-9]+")):
        for text in sample.get(group, {}).values():
            assert re.fullmatch(form, text), sample
    for disk in sample.get("disk", {}).values():
        assert re.fullmatch("[0-9]+", disk["percent"] + disk["inode_percent"])
    assert all(re.fullmatch(r"[0-9]+\.[0-9]{2}", text) for text in sample.get("load", ["0.00"]))
    secs = sample["uptime"].get("secs", 1)
    assert type(secs) is int
    assert secs > 0


numbers = st.integers(-(10**25), 10**25).map(str) | st.floats().map(str) | st.text(max_size=4)
rows = st.lists(numbers, max_size=25).map(" ".join)
names = st.sampled_from(["MemTotal", "MemAvailable", "MemFree", "SwapTotal", "SwapFree"])
meminfos = st.lists(st.tuples(names, numbers).map("{0[0]}: {0[1]} kB".format)).map("\n".join)


@given(
    stat=st.tuples(rows, rows).map("cpu {0[0]}\ncpu {0[1]}".format) | st.text(),
    meminfo=meminfos | st.text(),
    loadavg=rows,
    init=rows.map("1 (x) {}".format) | st.binary(),
    limits=st.tuples(numbers, numbers, numbers, rows, rows, rows),
)
def test_vitals_have_valid_types_for_any_kernel_figures(
    tmp_path_factory: pytest.TempPathFactory,
    stat: str,
    meminfo: str,
    loadavg: str,
    init: str | bytes,
    limits: tuple[str, ...],
) -> None:
    base = tmp_path_factory.getbasetemp() / "any"
    proc = write(base / "proc", stat=stat, meminfo=meminfo, loadavg=loadavg, **{"1__stat": init})
    files = ("memory.max", "memory.current", "memory.swap.current", "cpu.max", "memory.stat", "cpu.stat")
    labels = {"memory.stat": "inactive_file ", "cpu.stat": "user_usec 5\nsystem_usec "}
    top = write(
        base / "cgroup", **{name: labels.get(name, "") + text for name, text in zip(files, limits, strict=True)}
    )
    write(proc, self__cgroup="0::/\n", self__mountinfo=f"31 23 0:28 / {top} ro - cgroup2 cgroup rw\n")

    check(asyncio.run(Vitals(Paths(base), lambda: False, proc=proc).sample()))


async def test_disk_vitals_are_measured_for_each_sample(
    paths: Paths, proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    real = os.statvfs

    def statvfs(path: Path) -> os.statvfs_result:
        asked.append(path)
        return real(path)

    monkeypatch.setattr(os, "statvfs", statvfs)
    taken = Vitals(paths, lambda: False, proc=proc)
    await taken.sample()
    await taken.sample()

    assert sorted(asked) == sorted([Path("/"), paths.data] * 2)


@pytest.mark.parametrize(
    ("blocks", "free", "files", "files_free", "percent", "inode_percent"),
    [(1000, 745, 200, 198, "26", "1"), (0, 0, 0, 0, "0", "0"), (10, 20, 10, 20, "0", "0"), (9, 0, 9, 0, "100", "100")],
)
def test_disk_usage_counts_reserved_space_as_free(
    blocks: int, free: int, files: int, files_free: int, percent: str, inode_percent: str
) -> None:
    usage = os.statvfs_result((4096, 4096, blocks, free, 0, files, files_free, 0, 0, 255))

    assert vitals.disk_vitals(usage) == {"percent": percent, "inode_percent": inode_percent}


def test_cpu_vitals_are_zero_if_the_counters_decrease() -> None:
    """Counters can decrease when the container moves to another machine or its quota changes."""
    assert vitals.shares(CpuTimes(9, 9, 9, 90), CpuTimes(1, 1, 1, 10)) == {"user": "0.0", "sys": "0.0", "wait": "0.0"}


@given(*[st.builds(CpuTimes, *[st.floats(0, 1e15)] * 4)] * 2)
def test_cpu_shares_are_between_0_and_100_percent(before: CpuTimes, after: CpuTimes) -> None:
    check({"cpu": vitals.shares(before, after), "uptime": {}})


@given(st.builds(Memory, *[st.integers(0, 2**63)] * 4))
def test_memory_usage_is_between_0_and_100_percent(memory: Memory) -> None:
    found = vitals.memory_vitals(memory)

    check({**found, "uptime": {}})
    assert max(int(found["mem"]["percent"]), int(found["swap"]["percent"])) <= 100


async def test_vitals_of_the_real_machine_are_complete(tmp_path: Path) -> None:
    sample = await Vitals(Paths(tmp_path), lambda: False).sample()

    check(sample)
    assert set(sample) == {"cpu", "mem", "swap", "load", "disk", "uptime"}
