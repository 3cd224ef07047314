"""Tests how the container's limits and usage are read, using files that imitate cgroup hierarchies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_shim.host import cgroups, host_stats, mounts

MIB = 1024 * 1024
HOST = host_stats.Memory(total=1000 * MIB, used=900 * MIB, swap_total=100 * MIB, swap_used=50 * MIB)
NO_LIMIT = "9223372036854771712"


def write(directory: Path, files: Mapping[str, object]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name).write_text(f"{content}\n")


def version_2(top: Path, *below: str) -> cgroups.Cgroup:
    """Return a unified hierarchy mounted at ``top``, with the process in the innermost of the cgroups ``below``."""
    levels = [top]
    for name in below:
        levels.append(levels[-1] / name)
    hierarchy = cgroups.Hierarchy(2, tuple(reversed(levels)))
    return cgroups.Cgroup(hierarchy, hierarchy, hierarchy)


def version_1(top: Path) -> cgroups.Cgroup:
    """Return separate hierarchies with a single level, as Docker shows them."""
    return cgroups.Cgroup(
        *(cgroups.Hierarchy(1, (top / controller,)) for controller in ("memory", "cpu", "cpuacct")),
    )


def test_memory_is_read_from_cgroup_v2(tmp_path: Path) -> None:
    """The lowest limit applies, even if it is set on a parent. Inactive page cache does not count as used."""
    write(tmp_path, {"memory.max": 600 * MIB, "memory.current": 500 * MIB})
    write(
        tmp_path / "pod",
        {
            "memory.max": 200 * MIB,
            "memory.current": 150 * MIB,
            "memory.stat": f"anon 7\ninactive_file {50 * MIB}\nactive_file 9",
            "memory.swap.max": 20 * MIB,
            "memory.swap.current": 5 * MIB,
        },
    )
    write(tmp_path / "pod/agent", {"memory.max": "max", "memory.current": MIB})

    found = cgroups.memory(version_2(tmp_path, "pod", "agent"), HOST)

    assert found == host_stats.Memory(200 * MIB, 100 * MIB, 20 * MIB, 5 * MIB)
    assert cgroups.memory_total(version_2(tmp_path, "pod", "agent"), HOST.total) == 200 * MIB
    assert cgroups.memory_total(version_2(tmp_path), 500 * MIB) == 500 * MIB
    assert cgroups.memory_total(cgroups.Cgroup(), 500 * MIB) == 500 * MIB


def test_memory_is_read_from_cgroup_v1(tmp_path: Path) -> None:
    """The version 1 counter contains memory and swap together, so memory usage is subtracted from it to get swap
    usage.
    """
    write(
        tmp_path / "memory",
        {
            "memory.limit_in_bytes": 200 * MIB,
            "memory.usage_in_bytes": 150 * MIB,
            "memory.stat": f"inactive_file 1\ntotal_inactive_file {50 * MIB}",
            "memory.memsw.limit_in_bytes": 230 * MIB,
            "memory.memsw.usage_in_bytes": 160 * MIB,
        },
    )

    found = cgroups.memory(version_1(tmp_path), HOST)

    assert found == host_stats.Memory(200 * MIB, 100 * MIB, 30 * MIB, 10 * MIB)
    write(
        tmp_path / "memory",
        {
            "memory.stat": f"total_inactive_file {170 * MIB}",
            "memory.memsw.limit_in_bytes": 190 * MIB,
            "memory.memsw.usage_in_bytes": 140 * MIB,
        },
    )
    assert cgroups.memory(version_1(tmp_path), HOST) == host_stats.Memory(200 * MIB, 0, 0, 0)
    (tmp_path / "memory" / "memory.memsw.usage_in_bytes").unlink()
    assert cgroups.memory(version_1(tmp_path), HOST) == host_stats.Memory(200 * MIB, 0, 0, 0)
    (tmp_path / "memory" / "memory.usage_in_bytes").unlink()
    assert cgroups.memory(version_1(tmp_path), HOST) is None


@pytest.mark.parametrize("limit", ["max", NO_LIMIT, str(1000 * MIB), "0", "-1", "", "nonsense"])
def test_container_memory_is_unknown_without_a_limit_below_the_machine_memory(tmp_path: Path, limit: str) -> None:
    """Without a limit, the usage of the agent's own cgroup would be misleading."""
    write(tmp_path, {"memory.max": limit, "memory.current": 5})

    assert cgroups.memory(version_2(tmp_path), HOST) is None


def test_container_with_unlimited_swap_reports_the_swap_of_the_machine(tmp_path: Path) -> None:
    """If ``memory.swap.max`` contains ``max``, the container may use all of the machine's swap. If the cgroup has no
    ``memory.swap`` files, the container has no swap.
    """
    write(tmp_path, {"memory.max": MIB, "memory.current": 5})
    without = cgroups.memory(version_2(tmp_path), HOST)
    write(tmp_path, {"memory.swap.max": "max", "memory.swap.current": 300 * MIB})
    unlimited = cgroups.memory(version_2(tmp_path), HOST)

    assert without == host_stats.Memory(MIB, 5, 0, 0)
    assert unlimited == host_stats.Memory(MIB, 5, 100 * MIB, 100 * MIB)


def test_cpu_quota_is_read_from_cgroup_v2(tmp_path: Path) -> None:
    write(tmp_path, {"cpu.max": "max 100000", "cpu.stat": "usage_usec 9\nuser_usec 9\nsystem_usec 9"})
    write(tmp_path / "pod", {"cpu.max": "50000 100000", "cpu.stat": "user_usec 3000000\nsystem_usec 500000"})

    assert cgroups.cpu_times(version_2(tmp_path, "pod"), 20.0) == host_stats.CpuTimes(3.0, 0.5, 0.0, 10.0)
    assert cgroups.cpu_times(version_2(tmp_path, "pod"), -1.0) == host_stats.CpuTimes(3.0, 0.5, 0.0, 0.0)


def test_cpu_quota_is_read_from_cgroup_v1(tmp_path: Path) -> None:
    """In version 1, quota and usage are in different hierarchies."""
    write(tmp_path / "cpu", {"cpu.cfs_quota_us": 50000, "cpu.cfs_period_us": 100000})
    write(tmp_path / "cpuacct", {"cpuacct.usage_user": 3 * 10**9, "cpuacct.usage_sys": 5 * 10**8})

    assert cgroups.cpu_times(version_1(tmp_path), 20.0) == host_stats.CpuTimes(3.0, 0.5, 0.0, 10.0)


def test_lowest_cpu_quota_applies(tmp_path: Path) -> None:
    """Usage is read at the level that has the lowest quota, even in version 1, where usage is in another hierarchy."""
    for level, quota, used in [("", 80000, 9), ("pod", 20000, 5), ("pod/agent", -1, 1)]:
        write(tmp_path / "cpu" / level, {"cpu.cfs_quota_us": quota, "cpu.cfs_period_us": 100000})
        write(tmp_path / "cpuacct" / level, {"cpuacct.usage_user": used * 10**9, "cpuacct.usage_sys": 0})
    cpu, cpuacct = (
        cgroups.Hierarchy(1, tuple(tmp_path / name / level for level in ("pod/agent", "pod", "")))
        for name in ("cpu", "cpuacct")
    )

    assert cgroups.cpu_times(cgroups.Cgroup(None, cpu, cpuacct), 10.0) == host_stats.CpuTimes(5.0, 0.0, 0.0, 2.0)


@pytest.mark.parametrize(
    "quota", ["max 100000", f"{100000 * (os.cpu_count() or 1)} 100000", "0 0", "5 0", "5", "", "a b"]
)
def test_container_cpu_is_unknown_without_a_quota_below_the_number_of_cpus(tmp_path: Path, quota: str) -> None:
    """Without a quota, jobs can use all of the machine's CPUs."""
    write(tmp_path, {"cpu.max": quota, "cpu.stat": "user_usec 1\nsystem_usec 1"})

    assert cgroups.cpu_times(version_2(tmp_path), 20.0) is None


def test_oom_kills_are_counted(tmp_path: Path) -> None:
    """In version 2, the counter includes nested cgroups. If there is no counter, the count is unknown (None)."""
    write(tmp_path, {"memory.max": MIB, "memory.events": "low 0\noom 4\noom_kill 3\noom_group_kill 0"})
    write(tmp_path / "leaf", {"memory.events": "oom_kill 0"})
    write(tmp_path / "memory", {"memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2"})

    assert cgroups.oom_kills(version_2(tmp_path, "leaf"), HOST.total) == 3
    assert cgroups.oom_kills(version_1(tmp_path), HOST.total) == 2
    assert cgroups.oom_kills(version_2(tmp_path / "none"), HOST.total) is None
    assert cgroups.oom_kills(cgroups.Cgroup(), HOST.total) is None


def test_oom_group_is_disabled_only_in_the_cgroup_of_the_container(tmp_path: Path) -> None:
    """In a nested cgroup, the setting is kept, because the operator chose it, for example with ``OOMPolicy=kill`` in a
    systemd unit.

    A machine's root cgroup does not have this setting.
    """
    write(tmp_path / "leaf", {"memory.oom.group": "1\n"})
    assert cgroups.oom_group(version_2(tmp_path, "leaf")) is None
    write(tmp_path, {"memory.oom.group": "1\n"})
    assert cgroups.oom_group(version_2(tmp_path, "leaf")) == tmp_path / "memory.oom.group"
    assert cgroups.end_oom_group(version_2(tmp_path, "leaf"))
    assert (tmp_path / "memory.oom.group").read_text() == "0"
    assert not cgroups.end_oom_group(version_2(tmp_path, "leaf"))
    assert (tmp_path / "leaf/memory.oom.group").read_text().strip() == "1"


def test_oom_group_is_found_in_the_host_cgroup_namespace(tmp_path: Path) -> None:
    """containerd leaves privileged containers in the host's cgroup namespace, where the top is the machine's root
    cgroup. The container's cgroup is the one that also contains PID 1.
    """
    write(tmp_path / "leaf", {"memory.oom.group": "1\n", "cgroup.procs": "1\n17\n"})

    assert cgroups.oom_group(version_2(tmp_path, "leaf")) == tmp_path / "leaf/memory.oom.group"
    assert cgroups.end_oom_group(version_2(tmp_path, "leaf"))
    assert (tmp_path / "leaf/memory.oom.group").read_text() == "0"


UNIFIED = b"31 23 0:28 / /sys/fs/cgroup ro - cgroup2 cgroup rw,nsdelegate\n"
UNIFIED_OF_POD = b"31 23 0:28 /kubepods/pod1 /sys/fs/cgroup ro - cgroup2 cgroup rw\n"
SPLIT = b"""32 31 0:29 /docker/1 /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 /docker/1 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
"""
TOP = "/sys/fs/cgroup"


@pytest.mark.parametrize(
    ("membership", "table", "version", "memory", "cpu"),
    [
        ("0::/\n", UNIFIED, 2, [TOP], [TOP]),
        ("0::/a/b\n", UNIFIED, 2, [f"{TOP}/a/b", f"{TOP}/a", TOP], [f"{TOP}/a/b", f"{TOP}/a", TOP]),
        ("0::/kubepods/pod1/c\n", UNIFIED_OF_POD, 2, [f"{TOP}/c", TOP], [f"{TOP}/c", TOP]),
        ("0::/../../elsewhere\n", UNIFIED, 2, [TOP], [TOP]),
        ("4:memory:/docker/1\n2:cpu,cpuacct:/docker/1\n0::/\n", SPLIT, 1, [f"{TOP}/memory"], [f"{TOP}/cpu,cpuacct"]),
        ("4:memory:/other\n2:cpu,cpuacct:/docker/1\n", SPLIT, 1, [f"{TOP}/memory"], [f"{TOP}/cpu,cpuacct"]),
    ],
)
def test_own_cgroup_is_found(membership: str, table: bytes, version: int, memory: list[str], cpu: list[str]) -> None:
    """The result lists the levels from the process's own cgroup up to the mount point.

    If the process's own cgroup is not mounted, the list begins with the nearest level that is.
    """
    found = cgroups.parse_membership(membership, mounts.parse(table))

    assert found.memory == cgroups.Hierarchy(version, tuple(map(Path, memory)))
    assert found.cpu == cgroups.Hierarchy(version, tuple(map(Path, cpu)))


def test_last_of_several_mounts_on_a_mount_point_is_the_cgroup_hierarchy() -> None:
    """In systemd mode, Podman mounts the container's cgroup over the host's hierarchy at the same mount point."""
    table = mounts.parse(
        b"30 20 0:26 / /cg/memory rw - cgroup cgroup rw,memory\n"
        b"31 30 0:26 /pod/c /cg/memory rw - cgroup cgroup rw,memory\n"
    )

    found = cgroups.parse_membership("4:memory:/pod/c/agent\n", table)

    assert found.memory == cgroups.Hierarchy(1, (Path("/cg/memory/agent"), Path("/cg/memory")))


def test_cgroup_contains_this_process_only_if_the_kernel_lists_it(tmp_path: Path) -> None:
    write(tmp_path / "ours", {"cgroup.procs": f"1\n{os.getpid()}\n"})
    write(tmp_path / "others", {"cgroup.procs": "1\n"})

    assert cgroups.contains_this_process(cgroups.Hierarchy(1, (tmp_path / "ours",)))
    assert not cgroups.contains_this_process(cgroups.Hierarchy(1, (tmp_path / "others",)))
    assert not cgroups.contains_this_process(cgroups.Hierarchy(1, (tmp_path / "absent",)))


def test_this_process_is_found_after_the_first_page_of_a_cgroup_with_many_processes(tmp_path: Path) -> None:
    """The kernel returns a list of pids one page at a time. To imitate this, the test uses a pipe that holds only
    one page.
    """
    pids = tmp_path / "cgroup.procs"
    os.mkfifo(pids)

    def list_pids() -> None:
        with pids.open("wb", buffering=0) as pipe:
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 4096)
            pipe.write(b"1\n" * 2048)
            pipe.write(f"{os.getpid()}\n".encode())

    with ThreadPoolExecutor(1) as kernel:
        kernel.submit(list_pids)
        assert cgroups.contains_this_process(cgroups.Hierarchy(2, (tmp_path,)))


def test_container_without_a_mounted_hierarchy_has_no_cgroup() -> None:
    """Without a cgroup, the container's memory and CPU usage are unknown."""
    assert cgroups.parse_membership("0::/\n", []) == cgroups.Cgroup()
    assert cgroups.memory(cgroups.Cgroup(), HOST) is None
    assert cgroups.cpu_times(cgroups.Cgroup(), 5.0) is None


@given(st.text())
def test_any_cgroup_membership_text_can_be_parsed(text: str) -> None:
    cgroups.parse_membership(text, mounts.parse(UNIFIED + SPLIT))


def test_cgroup_of_this_machine_can_be_read() -> None:
    """The real files must give a valid result on any machine, with or without limits."""
    host = host_stats.memory()
    found = cgroups.memory(cgroups.find(), host)

    assert found is None or found.used >= 0
    assert cgroups.find(Path("/absent")) == cgroups.Cgroup()


def test_cpu_time_is_reported_with_or_without_a_quota(tmp_path: Path) -> None:
    """CPU time is read at the level that has a quota or, if there is none, at the process's own level."""
    write(tmp_path / "pod", {"cpu.max": "max 100000", "cpu.stat": "user_usec 3000000\nsystem_usec 1000000"})
    write(tmp_path, {"cpu.stat": "user_usec 9000000\nsystem_usec 9000000"})

    assert cgroups.cpu_used(version_2(tmp_path, "pod")) == (3.0, 1.0)
    assert cgroups.processors(version_2(tmp_path, "pod")) is None
    write(tmp_path, {"cpu.max": "50000 100000"})
    assert cgroups.cpu_used(version_2(tmp_path, "pod")) == (9.0, 9.0)
    assert cgroups.processors(version_2(tmp_path, "pod")) == 0.5
    assert cgroups.cpu_used(cgroups.Cgroup()) is None
