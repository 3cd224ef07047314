"""Tests which DNS records are accepted, how they are stored, and how the hosts file is written from them."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest

from agent_shim.core.errors import ActionError
from agent_shim.core.paths import Paths
from agent_shim.host import files, mounts
from agent_shim.services.dns import Dns

AGENT = "agent-1"
LOOPBACK = "127.0.0.1"


def blob(version: int = 3, *records: list[str]) -> bytes:
    known = records or (["10.0.0.1", "id.web.net.dep.bosh"], ["fd00::1", "id2.web.net.dep.bosh"])
    return json.dumps({"version": version, "records": known, "record_keys": ["id"], "aliases": {}}).encode()


class CountingBlobstore:
    """A blobstore that returns a blob and counts the requests."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.fetched = 0

    async def __call__(self) -> bytes:
        self.fetched += 1
        await asyncio.sleep(0)
        return self.raw


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(tmp_path)


@pytest.fixture
def dns(paths: Paths) -> Dns:
    return Dns(paths)


def hosts(paths: Paths) -> str:
    return (paths.etc / "hosts").read_text()


@pytest.mark.parametrize("stored", [b"", b"{", b'{"version":"9"}', b"[]", b"\xff", b'{"version":-5}', None])
async def test_unreadable_dns_records_are_replaced(dns: Dns, paths: Paths, stored: bytes | None) -> None:
    paths.dns_records.parent.mkdir(parents=True)
    if stored is not None:
        paths.dns_records.write_bytes(stored)
    await dns.sync(0, CountingBlobstore(blob(0)), agent_id=AGENT)

    assert paths.dns_records.read_bytes() == blob(0)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (blob(4), "version from unpacked dns blob does not match version supplied by director"),
        (b'{"records":[]}', "version from unpacked dns blob does not match version supplied by director"),
        (b"no json", "unmarshalling DNS records: "),
        (b"null", "unmarshalling DNS records: "),
        (b'{"version":"3"}', "unmarshalling DNS records: "),
        (b'{"version":3,"records":["\xff"]', "unmarshalling DNS records: "),
    ],
)
async def test_invalid_dns_blob_leaves_records_and_hosts_unchanged(
    dns: Dns, paths: Paths, raw: bytes, text: str
) -> None:
    with pytest.raises(ActionError) as failed:
        await dns.sync(3, CountingBlobstore(raw), agent_id=AGENT)

    assert str(failed.value).startswith(text)
    assert not paths.dns_records.exists()
    assert not (paths.etc / "hosts").exists()


async def test_sync_dns_succeeds_if_the_hosts_file_cannot_be_written(
    dns: Dns, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records are stored for bosh-dns. The Director expects no more than that."""
    real = files.write_atomic

    def refuse(path: Path, data: bytes, *, mode: int = 0o644, owner: str | None = None) -> None:
        if path.name == "hosts":
            raise OSError(30, "Read-only file system")
        real(path, data, mode=mode, owner=owner)

    monkeypatch.setattr(files, "write_atomic", refuse)
    await dns.sync(3, CountingBlobstore(blob()), agent_id=AGENT)

    assert paths.dns_records.read_bytes() == blob()


async def test_sync_dns_fails_if_the_records_cannot_be_written(dns: Dns, paths: Paths) -> None:
    """Without an error, the Director would assume that the instance has this version of the records."""
    paths.instance.write_text("in the way")

    with pytest.raises(ActionError, match=r"^saving local DNS state: cannot make the directory .*instance: "):
        await dns.sync(3, CountingBlobstore(blob()), agent_id=AGENT)

    assert not (paths.etc / "hosts").exists()


@pytest.mark.parametrize("records", [b"7", b"null", b'[["10.0.0.1",5]]', b'"\\n"', b'[["\xff","a"]]'])
async def test_dns_records_in_an_unknown_format_are_stored_for_bosh_dns(dns: Dns, paths: Paths, records: bytes) -> None:
    """A newer Director may use another format. Such records are stored, but left out of the hosts file."""
    raw = b'{"version":3,"records":' + records + b"}"
    await dns.sync(3, CountingBlobstore(raw), agent_id=AGENT)

    assert paths.dns_records.read_bytes() == raw


async def test_concurrent_dns_syncs_fetch_once(dns: Dns) -> None:
    first, second = CountingBlobstore(blob()), CountingBlobstore(blob())
    await asyncio.gather(dns.sync(3, first, agent_id=AGENT), dns.sync(3, second, agent_id=AGENT))

    assert first.fetched + second.fetched == 1


async def test_hanging_dns_fetch_does_not_delay_a_request_for_stored_records(dns: Dns) -> None:
    await dns.sync(3, CountingBlobstore(blob()), agent_id=AGENT)
    never = asyncio.Event()

    async def hang() -> bytes:
        await never.wait()
        return b""

    hanging = asyncio.create_task(dns.sync(4, hang, agent_id=AGENT))
    await asyncio.sleep(0.02)
    async with asyncio.timeout(60):
        await dns.sync(3, hang, agent_id=AGENT)

    assert not hanging.done()
    hanging.cancel()


async def test_hosts_file_keeps_only_the_line_that_names_the_host(dns: Dns, paths: Paths) -> None:
    own = f"10.9.9.9\t{socket.gethostname()}.ns {socket.gethostname()}"
    paths.etc.mkdir()
    stale = f"10.0.0.9 old.bosh\n10.0.0.8 x # {socket.gethostname()}\n"
    (paths.etc / "hosts").write_text(f"# by the kubelet\n{stale}{own}\n")
    await dns.sync(3, CountingBlobstore(blob()), agent_id=AGENT)
    await dns.sync(4, CountingBlobstore(blob(4)), agent_id=AGENT)

    assert hosts(paths).count(own) == 1
    assert "old.bosh" not in hosts(paths)
    assert "10.0.0.8" not in hosts(paths)


async def test_agent_id_equal_to_the_host_name_resolves_only_to_loopback(dns: Dns, paths: Paths) -> None:
    paths.etc.mkdir()
    (paths.etc / "hosts").write_text(f"10.9.9.9 {socket.gethostname()}\n")
    await dns.sync(3, CountingBlobstore(blob()), agent_id=socket.gethostname())

    assert resolve(hosts(paths), socket.gethostname()) == [LOOPBACK, "::1"]


async def test_many_dns_records_do_not_block_the_event_loop(dns: Dns, paths: Paths) -> None:
    known = [[f"10.{i >> 16}.{i >> 8 & 255}.{i & 255}", f"{i:036}.web.net.deployment.bosh"] for i in range(30_000)]
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.005)

    ticking = asyncio.create_task(tick())
    await dns.sync(3, CountingBlobstore(blob(3, *known)), agent_id=AGENT)
    ticking.cancel()

    assert hosts(paths).count("\n") == 30_008
    assert ticks > 3


# --- after a restart --------------------------------------------------------------------------------------------------


async def test_hosts_file_is_unchanged_before_the_first_records(dns: Dns, paths: Paths) -> None:
    assert not await dns.restore(AGENT)
    assert not (paths.etc / "hosts").exists()


@pytest.mark.parametrize("stored", [b"", b"{", b'{"version":3,"records":7}', b'{"version":3,"records":[["\xff","a"]]}'])
async def test_unreadable_dns_records_are_an_error_at_boot(dns: Dns, paths: Paths, stored: bytes) -> None:
    paths.dns_records.parent.mkdir(parents=True)
    paths.dns_records.write_bytes(stored)
    paths.etc.mkdir()
    (paths.etc / "hosts").write_text("as it is")

    with pytest.raises(
        ActionError, match=r"^(cannot read .*records\.json: |.*hosts holds no names of other instances: )"
    ):
        await dns.restore(AGENT)

    assert hosts(paths) == "as it is"


# --- the container's own names ----------------------------------------------------------------------------------------


def resolve(text: str, name: str) -> list[str]:
    """Return the addresses that a hosts file has for a name."""
    lines = [line.partition("#")[0].split() for line in text.splitlines()]
    return [line[0] for line in lines if name in line[1:]]


@pytest.mark.parametrize(
    ("text", "host_name"),
    [
        (None, [LOOPBACK]),
        ("", [LOOPBACK]),
        ("# 127.0.0.1 localhost HOST\n", [LOOPBACK]),
        ("10.9.9.9 HOST\n", ["10.9.9.9"]),
        ("127.0.0.1 localhost\n", [LOOPBACK]),
    ],
)
async def test_localhost_and_host_name_resolve_before_the_first_records(
    dns: Dns, paths: Paths, text: str | None, host_name: list[str]
) -> None:
    """Some CPIs unmount the container runtime's hosts file. The file that is then visible is empty or belongs to
    another machine.
    """
    if text is not None:
        paths.etc.mkdir()
        (paths.etc / "hosts").write_text(text.replace("HOST", socket.gethostname()))

    await dns.name_self(AGENT)

    assert resolve(hosts(paths), "localhost") == [LOOPBACK, "::1"]
    assert resolve(hosts(paths), socket.gethostname()) == host_name
    assert resolve(hosts(paths), AGENT) == [LOOPBACK, "::1"]


async def test_hosts_file_records_survive_an_agent_restart(dns: Dns, paths: Paths) -> None:
    await dns.sync(3, CountingBlobstore(blob()), agent_id=AGENT)
    before = (paths.etc / "hosts").stat()

    await Dns(paths).name_self(AGENT)

    after = (paths.etc / "hosts").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("text", ["", "10.9.9.9 HOST", "127.0.0.1\tlocalhost\n", "fd00::9 db\n"])
async def test_mounted_hosts_file_is_extended_and_keeps_its_lines(
    dns: Dns, paths: Paths, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    text = text.replace("HOST", socket.gethostname())
    paths.etc.mkdir()
    (paths.etc / "hosts").write_text(text)
    monkeypatch.setattr(mounts, "is_mount_point", lambda path: path == paths.etc / "hosts")

    await dns.name_self(AGENT)
    completed = hosts(paths)
    await dns.name_self(AGENT)

    assert completed.startswith(text)
    assert hosts(paths) == completed
    assert resolve(completed, "localhost") == ([LOOPBACK] if "localhost" in text else [LOOPBACK, "::1"])
    assert len(resolve(completed, socket.gethostname())) == 1


async def test_dns_sync_keeps_localhost_and_the_host_name(
    dns: Dns, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("web-0", "localhost"):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        await dns.sync(3, CountingBlobstore(blob(3)), agent_id=AGENT)
        for version in (4, 5):
            paths.dns_records.unlink()
            await dns.sync(version, CountingBlobstore(blob(version)), agent_id=AGENT)
        text = hosts(paths)

        assert resolve(text, "localhost") == [LOOPBACK, "::1"]
        assert resolve(text, name)[0] == LOOPBACK
        assert len(text.splitlines()) == len(set(text.splitlines()))
