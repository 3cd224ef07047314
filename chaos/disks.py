"""D: disks, blobs and files."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agent_shim.demo.director import RpcRemoteError
from benchmarks.world import AGENT
from chaos.cases import case
from chaos.stand import CannotInjectError, Stand, expect, injecting, small


async def refused(stand: Stand, method: str, *arguments: Any) -> str:
    """The error that an action ends with."""
    try:
        await stand.world.run(method, *arguments)
    except RpcRemoteError as exc:
        return str(exc)
    expect(False, f"{method} was not refused")
    return ""


@case("D-03", "errors of reading, writing and syncing; then the kernel makes the data read-only", is_long=True)
async def broken_disk(stand: Stand) -> str:
    with loop_device(stand, 200) as device:
        await stand.boot()
        await stand.deploy(2)
        stand.remember()
        stand.involved = None
        errors = []
        faults = (("fsync:error=EIO", "fdatasync:error=EIO"), ("write:error=EIO:when=2+",))
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
        expect(state["job_state"] == "running" and stand.live() == jobs, "the jobs do not go on")
        raised = len(stand.alerts()) - alerts
        expect(raised <= 1, f"{raised} alerts")
        told = " / ".join(error.rpartition(": ")[2] for error in errors)
        return f"refused: {told}; a heartbeat within {beat:.0f} s; each apply complete once the disk is well"


@contextmanager
def loop_device(stand: Stand, megabytes: int) -> Iterator[str]:
    """The agent's data on a file system that the kernel makes read-only after an error; the name of its device."""
    place, image = stand.world.base / "data", stand.world.scratch / "data.img"
    place.mkdir(parents=True)
    with image.open("wb") as file:
        file.truncate(megabytes << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    done = subprocess.run(["mount", "-o", "loop,errors=remount-ro", str(image), str(place)], check=False)
    if done.returncode:
        raise CannotInjectError("needs root, a loop device and ext4")
    try:
        source = subprocess.run(["findmnt", "-no", "SOURCE", str(place)], check=True, capture_output=True, text=True)
        yield source.stdout.strip().rpartition("/")[2]
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@case("D-05", "blobs that are cut, changed or missing")
async def bad_blobs(stand: Stand) -> str:
    await stand.boot()
    await stand.deploy(1)
    stand.remember()
    spec = stand.world.spec(1, 1, 1 << 20, version="2")
    blob = stand.world.store / "package0-2"
    good = blob.read_bytes()
    errors = []
    for content in (good[:-1000], good[:-1] + bytes([good[-1] ^ 1]), b"", None):
        if content is None:
            blob.unlink()
        else:
            blob.write_bytes(content)
        errors.append(await refused(stand, "apply", spec))
        expect(not (stand.world.base / "packages/package0").exists(), "a wrong package was put in place")
    blob.write_bytes(good)
    await stand.world.run("apply", spec)
    stand.involved = None
    return f"{len(errors)} kinds refused, the right one is taken afterwards"


async def _until_it_fits(stand: Stand, *, inodes: int = 0) -> str:
    """Apply what does not fit, look, make room, apply again; ``inodes`` are those left, if there is a limit."""
    await stand.boot()
    data = stand.world.base / "data"
    if inodes:
        told = os.statvfs(data)
        limit = told.f_files - told.f_ffree + inodes
        subprocess.run(["mount", "-o", f"remount,nr_inodes={limit}", str(data)], check=True)
    stand.remember()
    stand.involved = None
    errors = set()
    for megabytes in (8, 4, 2):
        spec = stand.world.spec(1, 8, megabytes << 20, version=f"v{megabytes}")
        error = await refused(stand, "apply", spec)
        errors.add(error.rpartition(": ")[2])
        beat = await stand.call("get_state", "full")
        expect("vitals" in beat, "no vitals")
        left = list(data.rglob("*.tmp-*"))
        expect(not left, f"left behind: {left[:3]}")
    subprocess.run(["mount", "-o", "remount,size=400m,nr_inodes=100k", str(data)], check=True)
    await stand.world.run("apply", spec)
    return f"refused: {' / '.join(sorted(errors))}; applied once there was room"


@case("D-01", "no space left while an apply unpacks")
async def no_space(stand: Stand) -> str:
    with small(stand, "size=12m"):
        return await _until_it_fits(stand)


@case("D-02", "no inodes left while an apply unpacks")
async def no_inodes(stand: Stand) -> str:
    with small(stand, "size=400m"):
        return await _until_it_fits(stand, inodes=8)


def _hostile() -> dict[str, bytes]:
    """Archives that want out."""
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


@case("D-06", "hostile archives")
async def hostile(stand: Stand) -> str:
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
        expect(not escaped and not os.path.exists("/tmp/agent-shim-chaos-escaped"), f"{name}: something got out")
    stand.involved = None
    return f"{told} kinds refused, nothing outside"


@case("D-07", "logs that grow, rotate and vanish while they are fetched", scale="400 files, 400 MB", is_long=True)
async def moving_logs(stand: Stand) -> str:
    await stand.boot()
    await stand.deploy(1)
    logs = stand.world.base / "data/sys/log/job0"
    logs.mkdir(parents=True, exist_ok=True)
    for number in range(400):
        (logs / f"{number}.log").write_bytes(os.urandom(1000) * 1000)
    (logs / "loop.log").symlink_to("loop.log")
    os.mkfifo(logs / "fifo.log")
    stand.remember()
    moving = True

    async def move() -> None:
        number = 0
        while moving:
            await asyncio.sleep(0.005)
            (logs / f"{number % 400}.log").unlink(missing_ok=True)
            with (logs / f"{(number + 7) % 400}.log").open("ab") as file:
                file.write(b"more\n" * 1000)
            number += 1

    mover = asyncio.create_task(move())
    begun_at = time.monotonic()
    result = await stand.world.director.run(AGENT, "fetch_logs", "job", [])
    took = time.monotonic() - begun_at
    moving = False
    await mover
    blob = stand.world.store / result["blobstore_id"]
    with tarfile.open(blob) as tar:
        names = {name.rpartition("/")[2] for name in tar.getnames()}
    count = len(names)
    expect(count > 100, f"only {count} members of logs of which most are always there")
    expect("fifo.log" not in names, "a FIFO is packed")
    return f"{count} members in {took:.1f} s"


@case("D-10", "the hosts file is a mount, then a read-only one")
async def mounted_hosts(stand: Stand) -> str:
    if os.geteuid() != 0:
        raise CannotInjectError("needs root for a mount")
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
            expect(answer == "synced", str(answer))
            kept = json.loads((stand.world.base / "instance/dns/records.json").read_bytes())
            expect(kept == records, f"records of version {version} are not there")
    finally:
        subprocess.run(["umount", str(hosts)], check=True)
    text = own.read_text()
    expect("10.0.0.1 neighbour1" in text and "neighbour2" not in text, "the mounted file is not as expected")
    return "written in place; the read-only one stays, and bosh-dns has the new records all the same"
