"""Chaos cases in group D, which is about disks, blobs and files."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from agent_shim.core.paths import Paths
from agent_shim.demo.director import RpcRemoteError
from agent_shim.demo.release import archive
from agent_shim.services.logs.archives import REMARKS
from tests.chaos.case import case
from tests.support.instance import AGENT
from tests.support.kills import Told, changes, places_of_state, sweep, tidied, tracing
from tests.support.stand import (
    CannotInjectError,
    NotHeldError,
    Stand,
    at_most,
    expect,
    injecting,
    refused,
    small,
    unmounted_after,
    until,
)
from tests.support.volumes import fill, fingerprint, holding, mount_ext4


@case("D-03", "reads, writes and syncs fail, then the kernel makes the data disk read-only", is_long=True)
async def test_apply_is_refused_but_jobs_keep_running_while_the_disk_fails(stand: Stand) -> None:
    device = loop_device(stand, 200)
    await stand.boot()
    await stand.deploy(2)
    stand.remember()
    stand.omit("I2", "the case stops and starts the jobs")
    stand.omit("I17", "the data disk is read-only at the end")
    errors = []
    faults = (
        ("fsync:error=EIO", "fdatasync:error=EIO"),
        ("syncfs:error=EIO",),
        ("write:error=EIO:when=2+",),
        ("read:error=EIO:when=5+",),
    )
    for number, calls in enumerate(faults):
        spec = stand.world.spec(2, 2, 1 << 20, version=f"v{number}")
        async with injecting(stand, *calls):
            errors.append(await refused(stand, "apply", spec))
            await stand.call("ping", timeout=2)
        await stand.world.run("apply", spec)
    for method in ("stop", "start"):
        await stand.world.run(method)
    await stand.world.until_running()
    jobs, alerts = stand.live(), len(stand.alerts())
    Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("1")
    errors.append(await refused(stand, "apply", stand.world.spec(2, 2, 1 << 20, version="ro")))
    beat = await stand.heartbeat(31)
    state = await stand.call("get_state", "full")
    expect(
        state["job_state"] == "running" and stand.live() == jobs, "the jobs did not keep running on the read-only disk"
    )
    raised = len(stand.alerts()) - alerts
    expect(raised <= 1, f"the read-only disk caused {raised} alerts, but the limit is 1")
    await stand.stop()
    expect(not stand.live(), "jobs are still running after the stop")
    told = " / ".join(error.rpartition(": ")[2] for error in errors)
    stand.tell(f"refused: {told}; a heartbeat within {beat:.0f} s; each apply succeeded when the disk worked again")


def loop_device(stand: Stand, megabytes: int) -> str:
    """Put the agent's data on a file system that the kernel remounts read-only after an error. Return the file system's
    loop device.
    """
    place, image = stand.world.base / "data", stand.world.scratch / "data.img"
    place.mkdir(parents=True)
    with image.open("wb") as file:
        file.truncate(megabytes << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    done = subprocess.run(["mount", "-o", "loop,errors=remount-ro", str(image), str(place)], check=False)
    if done.returncode:
        raise CannotInjectError("needs root, a loop device and ext4")
    unmounted_after(stand, place)
    source = subprocess.run(["findmnt", "-no", "SOURCE", str(place)], check=True, capture_output=True, text=True)
    return source.stdout.strip().rpartition("/")[2]


@case(
    "D-05",
    "blobs are truncated, changed or missing",
    attack="a blobstore delivers a different blob than the one requested",
)
async def test_apply_refuses_incomplete_changed_and_missing_blobs(stand: Stand) -> None:
    await stand.boot()
    await stand.deploy(1)
    stand.remember()
    stand.involved = {"job0"}
    await stand.stop()
    spec = stand.world.spec(1, 1, 1 << 20, version="2")
    blob = stand.world.store / "package0-2"
    good = blob.read_bytes()
    errors = []
    # The second variant is a valid archive, but its digest is not the expected one.
    for content in (good[:-1000], archive({"content": b"another"}), b"", None):
        if content is None:
            blob.unlink()
        else:
            blob.write_bytes(content)
        errors.append(await refused(stand, "apply", spec))
        expect(not (stand.world.base / "packages/package0").exists(), "a wrong package was installed")
    blob.write_bytes(good)
    await stand.world.run("apply", spec)
    await stand.world.run("start")
    stand.tell(f"{len(errors)} kinds of wrong blobs were refused, and the right one was accepted afterwards")


async def _until_it_fits(stand: Stand, *, inodes: int = 0) -> str:
    """Apply packages that do not fit on the disk, check the error, free space, and apply them again.

    If ``inodes`` is not 0, only that many inodes are free.
    """
    await stand.boot()
    data = stand.world.base / "data"
    if inodes:
        told = os.statvfs(data)
        limit = told.f_files - told.f_ffree + inodes
        subprocess.run(["mount", "-o", f"remount,nr_inodes={limit}", str(data)], check=True)
    stand.remember()
    errors = set()
    for megabytes in (8, 4, 2):
        # Pack the blobs in a thread, because this process must keep answering the bus server's pings.
        spec = await asyncio.to_thread(stand.world.spec, 1, 8, megabytes << 20, version=f"v{megabytes}")
        error = await refused(stand, "apply", spec)
        expect("No space left on device" in error, f"the error does not say that there is no space: {error}")
        errors.add(error.rpartition(": ")[2])
        beat = await stand.call("get_state", "full")
        expect("vitals" in beat, "get_state returned no vitals")
        left = list(data.rglob("*.tmp-*"))
        expect(not left, f"the refused apply left temporary files behind: {left[:3]}")
    subprocess.run(["mount", "-o", "remount,size=400m,nr_inodes=100k", str(data)], check=True)
    await stand.world.run("apply", spec)
    return f"the apply was refused ({' / '.join(sorted(errors))}), and succeeded once space was free"


@case("D-01", "the disk runs out of space while an apply unpacks packages")
async def test_apply_that_runs_out_of_disk_space_can_be_repeated(stand: Stand) -> None:
    small(stand, "size=12m")
    stand.tell(await _until_it_fits(stand))


@case("D-02", "the disk runs out of inodes while an apply unpacks packages")
async def test_apply_that_runs_out_of_inodes_can_be_repeated(stand: Stand) -> None:
    small(stand, "size=400m")
    stand.tell(await _until_it_fits(stand, inodes=8))


def _hostile() -> dict[str, bytes]:
    """Return archives that try to write outside the directory into which they are unpacked."""
    made: dict[str, bytes] = {}

    def add(name: str, *members: tuple[tarfile.TarInfo, bytes]) -> None:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w:gz") as tar:
            for member, content in members:
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        made[name] = out.getvalue()

    def info(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
        one = tarfile.TarInfo(name)
        one.type, one.linkname, one.mode = kind, link, mode
        return one

    add("dots", (info("../../escaped"), b"x"))
    add("absolute", (info("/tmp/agent-shim-chaos-escaped"), b"x"))
    add("link then write", (info("l", tarfile.SYMTYPE, "/tmp"), b""), (info("l/agent-shim-chaos-escaped"), b"x"))
    add("hard link out", (info("h", tarfile.LNKTYPE, "/etc/passwd"), b""))
    add("device", (info("d", tarfile.CHRTYPE), b""))
    add("fifo", (info("f", tarfile.FIFOTYPE), b""))
    add("file as directory", (info("a"), b"x"), (info("a/b"), b"x"))
    made["cut"] = made["dots"][:-12]
    made["no archive"] = b"\x1f\x8b" + os.urandom(1000)
    return made


@case("D-06", "hostile archives", attack="a blobstore delivers an archive that writes outside its directory")
async def test_hostile_archives_are_refused(stand: Stand) -> None:
    await stand.boot()
    await stand.deploy(1)
    stand.remember()
    told = 0
    for number, (name, content) in enumerate(_hostile().items()):
        spec = stand.world.spec(1, 1, 1000, version=f"bad{number}")
        spec["packages"]["package0"] |= stand.world.blob(f"hostile-{number}", content)
        error = await refused(stand, "apply", spec)
        told += bool(error)
        escaped = list(stand.world.scratch.rglob("*escaped*"))
        expect(
            not escaped and not os.path.exists("/tmp/agent-shim-chaos-escaped"),
            f"the archive '{name}' wrote a file outside its directory",
        )
    expect(told == len(_hostile()), f"only {told} of {len(_hostile())} errors contain a reason")
    stand.tell(f"{told} kinds were refused, and nothing was written outside")


@case(
    "D-07",
    "logs that grow, rotate and vanish while they are fetched",
    scale="400 files, 200 MB",
    has_full=True,
    is_long=True,
)
async def test_logs_that_rotate_and_vanish_can_be_fetched(stand: Stand) -> None:
    await stand.boot()
    await stand.deploy(1)
    logs, count = stand.world.base / "data/sys/log/job0", stand.of(400, 20_000)
    logs.mkdir(parents=True, exist_ok=True)
    await asyncio.to_thread(_write_half_random, logs, count)
    (logs / "loop.log").symlink_to("loop.log")
    (logs / "out.log").symlink_to("/etc/passwd")
    os.mkfifo(logs / "fifo.log")
    stand.remember()
    before, watched = stand.size(), Watched()
    moving = asyncio.create_task(_move(logs, count))
    watching = asyncio.create_task(_watch(stand, watched))
    begun_at = time.monotonic()
    try:
        result = await stand.world.director.run(AGENT, "fetch_logs", "job", [])
    finally:
        took = time.monotonic() - begun_at
        for task in (moving, watching):
            task.cancel()
        await asyncio.wait([moving, watching])
    blob = stand.world.store / result["blobstore_id"]
    names, remarks = await asyncio.to_thread(_members, blob)
    size = blob.stat().st_size
    expect(took < 300, f"fetch_logs took {took:.0f} s, but the limit is 300 s")
    expect(len(names) > count * 0.6, f"the archive contains only {len(names)} of {count} logs")
    expect(not {"fifo.log", "out.log"} & names, "the archive contains a FIFO or a link to a file outside the directory")
    expect("vanished before it was read" in remarks, "the archive has no note about the logs that vanished")
    expect("leads out of the directory" in remarks, "the archive has no note about the link to a file outside")
    expect(watched.disk <= size, f"temporary files took {watched.disk >> 20} MiB for an archive of {size >> 20} MiB")
    grown = watched.memory - before.memory
    expect(grown < 30 << 20, f"the agent's memory grew by {grown >> 20} MiB, but the limit is 30")
    stand.tell(
        f"{len(names)} files in {took:.1f} s; {watched.disk >> 20} MiB of disk space for an archive of "
        f"{size >> 20} MiB; the agent's memory {grown / (1 << 20):+.1f} MiB, its worker's {watched.worker >> 20} MiB"
    )


def _write_half_random(logs: Path, count: int) -> None:
    """Create ``count`` files of half a megabyte each. Half of each file is random data."""
    line = b"all work and no play makes a dull log\n"
    for number in range(count):
        (logs / f"{number}.log").write_bytes(os.urandom(250_000) + line * (250_000 // len(line)))


async def _move(logs: Path, count: int) -> None:
    """Remove, rename and extend log files chosen at random, until cancelled."""
    chance = random.Random(7)
    while True:
        gone, moved, grown = (f"{chance.randrange(count)}.log" for _ in range(3))
        (logs / gone).unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            (logs / moved).rename(logs / f"{moved}.1")
        with (logs / grown).open("ab") as file:
            file.write(b"more\n" * 1000)
        await asyncio.sleep(0.005)


@dataclass
class Watched:
    """Peak sizes in bytes: resident memory of the agent and its worker, and files below ``data/tmp``."""

    memory: int = 0
    worker: int = 0
    disk: int = 0


async def _watch(stand: Stand, watched: Watched) -> None:
    """Record peak sizes until cancelled. Files in the blobstore are not counted, because the blobstore is usually on
    another machine.
    """
    while True:
        watched.memory = max(watched.memory, stand.size().memory)
        for child in Path(f"/proc/{stand.pid}/task/{stand.pid}/children").read_text().split():
            with suppress(OSError):
                if b"agent_shim.bulk.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                    pages = int(Path(f"/proc/{child}/statm").read_text().split()[1])
                    watched.worker = max(watched.worker, pages * os.sysconf("SC_PAGESIZE"))
        disk = 0
        for path in (stand.world.base / "data/tmp").rglob("*"):
            with suppress(OSError):
                disk += path.lstat().st_size if path.is_file() else 0
        watched.disk = max(watched.disk, disk)
        await asyncio.sleep(0.05)


def _members(archive: Path) -> tuple[set[str], str]:
    """Return the names of the files in a log archive, and the remarks about files that changed during packing."""
    with tarfile.open(archive) as tar:
        names, remarks = set(), ""
        for member in tar:
            name = member.name.rpartition("/")[2]
            if name == REMARKS and (file := tar.extractfile(member)):
                remarks = file.read().decode()
            names.add(name)
    return names, remarks


@case("D-10", "/etc/hosts is a mount, and then a read-only mount")
async def test_sync_dns_writes_a_mounted_hosts_file_in_place_and_tolerates_a_read_only_one(stand: Stand) -> None:
    if os.geteuid() != 0:
        raise CannotInjectError("needs root to mount a file")
    await stand.boot()
    stand.remember()
    hosts, own = stand.world.base / "etc/hosts", stand.world.scratch / "hosts"
    own.write_text("127.0.0.1 localhost\n")
    hosts.parent.mkdir(exist_ok=True)
    hosts.touch()
    subprocess.run(["mount", "--bind", str(own), str(hosts)], check=True)
    try:
        for version, options in ((1, "remount,bind,rw"), (2, "remount,bind,ro")):
            subprocess.run(["mount", "-o", options, str(hosts)], check=True)
            records = {"version": version, "records": [[f"10.0.0.{version}", f"neighbour{version}"]]}
            blob = stand.world.blob(f"dns{version}", json.dumps(records).encode())
            answer = await stand.call("sync_dns", blob["blobstore_id"], blob["sha1"], version)
            expect(answer == "synced", f"sync_dns returned {answer!r} instead of 'synced'")
            kept = json.loads((stand.world.base / "instance/dns/records.json").read_bytes())
            expect(kept == records, f"records.json does not contain the records of version {version}")
    finally:
        subprocess.run(["umount", str(hosts)], check=True)
    text = own.read_text()
    expect(
        "10.0.0.1 neighbour1" in text and "neighbour2" not in text,
        f"the mounted file should contain only the first neighbour, but is {text!r}",
    )
    stand.tell("it was written in place; the read-only file did not change, but bosh-dns got the new records")


WRITER = """
import os, sys, time
number, ends_at = 0, time.time() + float(sys.argv[2])
while time.time() < ends_at:
    out = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for _ in range(100):
        os.write(out, f"{number} {time.time():.3f} {'x' * 80}\\n".encode())
        number += 1
    os.close(out)
    time.sleep(0.01)
"""
"""A program that writes numbered lines with timestamps, about one megabyte per second, for a limited time."""


@case(
    "D-08",
    "rotation of 5 000 logs, a huge log, and a log in use",
    scale="1 GB instead of 50 GB",
    has_full=True,
    is_long=True,
)
async def test_log_rotation_limits_sizes_and_loses_few_lines_from_a_log_in_use(stand: Stand) -> None:
    big, total = stand.of(10**9, 50 * 10**9), stand.of(64 << 20, 1 << 30)
    if (free := shutil.disk_usage(stand.world.scratch).free) < big + 10**10:
        raise CannotInjectError(f"needs {big // 10**9 + 10} GB of free disk space, but there are only {free // 10**9}")
    stand.world.write_settings()
    options = json.loads(stand.world.config.read_text())
    options["AgentShim"]["logs"] = {"size": "1M", "keep": 50, "total": str(total), "period": 2}
    stand.world.config.write_text(json.dumps(options))
    logs = stand.world.base / "data/sys/log/job0"
    logs.mkdir(parents=True)
    await stand.boot()
    await stand.deploy(1)
    stand.remember()
    moving, many = logs / "moving.log", logs / "many"
    await asyncio.to_thread(_write_logs, stand.world.scratch / "many", big)
    writer = await asyncio.create_subprocess_exec(sys.executable, "-c", WRITER, str(moving), "40")
    (stand.world.scratch / "many").rename(many)

    def large() -> list[str]:
        return [path.name for path in many.glob("*.log") if path.stat().st_size > 1 << 20]

    took = await until(lambda: not large(), 30, "not all large logs were rotated")
    await stand.answers(1)
    await writer.wait()
    await stand.heartbeat(35)
    size = sum(path.stat().st_size for path in logs.rglob("*.gz"))
    expect(size <= total, f"the archives take {size >> 20} MiB, but the limit is {total >> 20}")
    kept = len(list(many.glob("*.log.1.gz")))
    expect(kept == 101, f"{kept} of 101 large logs have an archive")
    said = f"many/big.log was too large to keep: its first {big - total // 2} bytes are lost"
    expect(
        said in (stand.world.scratch / "agent.log").read_text(),
        "the agent's log does not say which part of the huge log is lost",
    )
    lost, window = _lost(moving)
    at_most(window, 1, "lines of {:.2f} s are lost")
    at_most(lost, 1000, "{} lines of the log in use are lost")
    archives = len(list(logs.glob("moving.log.*.gz")))
    expect(archives > 5, f"there are only {archives} archives of the log in use, which had 40 MB")
    told = f"the log in use has {archives} archives and lost {lost} lines, in at most {window * 1000:.0f} ms"
    stand.tell(f"large logs were rotated within {took:.0f} s; {total >> 21} MiB of the huge log were kept; {told}")


def _write_logs(logs: Path, big: int) -> None:
    """Write small logs, 100 logs that exceed the rotation limit, and one log of ``big`` bytes."""
    logs.mkdir()
    for number in range(5000):
        (logs / f"{number}.log").write_bytes(b"all work and no play\n" * (100_000 if number % 50 == 0 else 10))
    line = b"all work and no play makes a dull log\n" * 27_000
    with (logs / "big.log").open("wb") as file:
        while (left := big - file.tell()) > 0:
            file.write(line[:left])


def _lost(log: Path) -> tuple[int, float]:
    """Return the number of lines that are missing from a log and its archives, and the duration of the longest gap in
    seconds.
    """
    found = {}
    for path in log.parent.glob(f"{log.name}*"):
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        for line in text.splitlines():
            words = line.split()
            if len(words) == 3 and words[0].isdigit():
                found[int(words[0])] = float(words[1])
    numbers = sorted(found)
    gaps = [(later - one - 1, found[later] - found[one]) for one, later in pairwise(numbers) if later > one + 1]
    return sum(gap for gap, _ in gaps), max((time for _, time in gaps), default=0.0)


@case("D-09", "disks are busy, mounted twice, missing, or partly migrated", is_long=True)
async def test_busy_missing_and_half_migrated_disks_lose_no_files(stand: Stand) -> None:
    if os.geteuid() != 0:
        raise CannotInjectError("needs root to mount disks")
    scratch, base = stand.world.scratch, stand.world.base
    stand.after.callback(_unmount_below, scratch)
    places = {name: scratch / f"volume-{name}" for name in ("old", "new", "missing")}
    for name in ("old", "new"):
        mount_ext4(places[name], scratch / f"{name}.image", 128 << 20)
    stand.world.write_settings()
    document = json.loads(stand.world.source.read_text())
    document["disks"] = {"persistent": {name: {"path": str(path)} for name, path in places.items()}}
    stand.world.source.write_text(json.dumps(document))
    await stand.boot()

    for _ in range(2):
        await stand.world.run("mount_disk", "old")
    store = base / "store"
    mounted = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    [device] = [words[words.index("-") + 2] for words in mounted if words[4] == str(places["new"])]
    fill(store, as_root=True)
    (store / "big").write_bytes(os.urandom(40 << 20))
    await stand.deploy(3)
    stand.remember()
    missing = await refused(stand, "mount_disk", "missing")
    expect(str(places["missing"]) in missing, f"the error does not name the missing path: {missing}")
    with holding(store, "cwd") as holder:
        busy = await refused(stand, "unmount_disk", "old")
        expect(str(holder.pid) in busy, f"the error does not name the process that uses the disk: {busy}")
    expect(await listed(stand) == ["old"], "list_disk does not return only the busy disk")
    before = fingerprint(store)

    await stand.world.run("mount_disk", "new")
    kills = 0
    for pause in (0.05, 0.1, 0.2, 0.3, 0.5, 0.8):
        await stand.call("migrate_disk", "old", "new")
        await asyncio.sleep(pause)
        await stand.kill_agent()
        kills += 1
        await stand.answers(30)
        names = set(await listed(stand))
        expect(
            names in ({"old", "new"}, {"new"}, {"old"}),
            f"after a kill during the migration, list_disk returned {names}",
        )
        expect(
            fingerprint(store) == before,
            f"files changed when the agent was killed {pause} s after the start of a migration",
        )
        await stand.world.run("mount_disk", "new")
    await stand.world.run("migrate_disk", "old", "new")
    expect(fingerprint(store) == before, "the files on the new disk differ from those on the old one")
    for _ in range(2):
        await stand.world.run("unmount_disk", "old")
    expect(await listed(stand) == ["new"], "list_disk does not return only the new disk")
    stand.moved[str(store)] = device
    stand.tell(
        f"{kills} kills during a migration, {len(before)} files unchanged; errors name the process that uses the "
        "disk, and the missing path"
    )


async def listed(stand: Stand) -> list[str]:
    """Return the result of ``list_disk``."""
    names: list[str] = await stand.world.director.run(AGENT, "list_disk")
    return names


def _unmount_below(place: Path) -> None:
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for point in reversed([point for point in points if point.startswith(f"{place}/")]):
        subprocess.run(["umount", "--lazy", point], check=False)


@case(
    "D-11",
    "from some system call on, all writes of state fail with ENOSPC, EROFS or EIO; then the agent is killed, and the "
    "disk works again",
    scale="about every thirtieth call",
    has_full=True,
    is_long=True,
)
async def test_acknowledged_changes_survive_failed_state_writes(stand: Stand) -> None:
    await stand.boot()
    await stand.deploy(2)
    stand.remember()
    stand.omit("I2", "each round stops and starts the jobs")
    stand.omit("I12", "jobs that a refused stop ended start again")
    wrong, refused_methods = list[str](), set[str]()
    places = places_of_state(stand.world.base)
    stand.between = lambda: wrong.extend(stand.witness.documents())

    async def point(error: str, number: int) -> Told:
        version = f"{error}-{number}"
        async with tracing(stand.pid, number, error, places) as lines:
            answers = await _until_refused(stand, version)
            try:
                told: Told = json.loads(await asyncio.wait_for(lines.readline(), 0.1))
            except TimeoutError:
                return {}
            await stand.kill_agent()
            await until(lambda: len(stand.ends) == stand.expected_ends, 10, "the killed agent did not exit")
            await stand.answers(60)
        where = f"after {error} at each call from {told['call']} of {Path(told['path']).name} on"
        expect(not wrong, f"{where}: {'; '.join(wrong)}")
        await _hold(stand, answers, version, where)
        refused_methods.update(method for method, is_done in answers.items() if not is_done)
        for request in changes(stand, version):
            await stand.world.run(*request)
        await tidied(places, where)
        return told

    counts = []
    for error, step in (("ENOSPC", 29), ("EROFS", 31), ("EIO", 37)):
        count, last = await sweep(lambda name, error=error: point(error, int(name[1:])), stand.of(step, 1))  # type: ignore[misc]
        counts.append(f"{count} times {error}")
    stand.between = lambda: None
    await stand.world.until_running()
    told = f"{', '.join(counts)}, the last from call {last} on; {len(refused_methods)} of 6 actions were refused"
    stand.tell(f"{told}; confirmed changes were kept, and everything worked afterwards")


async def _until_refused(stand: Stand, version: str) -> dict[str, bool]:
    """Send a Director's requests until one is rejected. For each method, return whether the request succeeded."""
    answers: dict[str, bool] = {}
    for method, *arguments in changes(stand, version):
        try:
            await stand.world.run(method, *arguments)
        except RpcRemoteError:
            answers[method] = False
            break
        answers[method] = True
    return answers


async def _hold(stand: Stand, answers: Mapping[str, bool], version: str, where: str) -> None:
    """Check that the next agent has kept the effects of every successful action and reports the correct job state."""
    paths, state = Paths(stand.world.base), await stand.call("get_state")
    if answers.get("update_settings"):
        expect(version in paths.update_settings.read_text(), f"{where}: the settings are lost")
    if answers.get("add_persistent_disk") and "remove_persistent_disk" not in answers:
        expect(f"disk-{version}" in paths.disk_hints.read_text(), f"{where}: the added disk is lost")
    if answers.get("remove_persistent_disk"):
        expect(f"disk-{version}" not in paths.disk_hints.read_text(), f"{where}: the removed disk is there again")
    if answers.get("apply"):
        seen = state["configuration_hash"]
        expect(seen == version, f"{where}: get_state reports version {seen}, but {version} was applied")
    true = {("running", 2), ("stopped", 0)}
    # If a stop or start failed, "failing" without processes is also correct. The Go agent reports the same if the file
    # that marks the jobs as stopped is missing.
    if False in (answers.get("stop"), answers.get("start")):
        true.add(("failing", 0))
    try:
        async with asyncio.timeout(120):
            while (state["job_state"], len(stand.live())) not in true:
                await asyncio.sleep(0.05)
                state = await stand.call("get_state")
    except TimeoutError:
        found = f"job_state is {state['job_state']} and {len(stand.live())} of 2 jobs run"
        raise NotHeldError(f"{where}: {found}") from None
    if answers.get("start"):
        expect(state["job_state"] == "running", f"{where}: the started jobs do not run")
    elif answers.get("stop") and "start" not in answers:
        await asyncio.sleep(1)  # long enough for the agent to start the job if it were going to
        expect(state["job_state"] == "stopped" and not stand.live(), f"{where}: the stopped jobs run again")
