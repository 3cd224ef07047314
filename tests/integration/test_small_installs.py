"""Small installs without a worker, and what still gets one."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import io
import os
import signal
import tarfile
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec
import pytest

from agent_shim.core.paths import Paths
from agent_shim.core.settings import Blobstore
from agent_shim.daemon import small_installs
from agent_shim.daemon.small_installs import (
    MAX_DOWNLOADED_BYTES,
    MAX_MEMBERS,
    MAX_PACKED_BYTES,
    MAX_TARGETS,
    MAX_UNPACKED_BYTES,
)
from agent_shim.host import worker_client
from agent_shim.host.worker_client import BlobRef, Done, Install, Request, Target
from agent_shim_demo.pki import Authority
from tests.support import http
from tests.support.http import Server, http_server

DUMMY = Blobstore()


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


class Asked:
    """Requests that reached a worker, a real one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._work = worker_client.work
        monkeypatch.setattr(worker_client, "work", self.work)

    async def work(self, request: Request) -> Done:
        self.count += 1
        return await self._work(request)


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    paths = Paths(tmp_path / "vcap")
    for directory in (paths.tmp, paths.blobs, paths.sensitive_blobs, paths.data_packages):
        directory.mkdir(parents=True)
    return paths


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with http_server() as server:
        yield server


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


def target(paths: Paths, members: Mapping[str, bytes], name: str = "p", kind: str = "package") -> Target:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for path, data in members.items():
            info = tarfile.TarInfo(f"./{path}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    blob = gzip.compress(out.getvalue(), mtime=0)
    (paths.sensitive_blobs / name).write_bytes(blob)
    digest = hashlib.sha1(blob, usedforsecurity=False).hexdigest()
    there = paths.data_packages / name / "1"
    return Target("job" if kind == "job" else "package", name, str(there), BlobRef(name, digest=digest))


async def installed(paths: Paths, *targets: Target) -> list[str]:
    """The errors; and nothing unfinished is left."""
    done = await small_installs.work(paths, Install(str(paths.base), DUMMY, 5, list(targets)))
    assert not list(paths.data_packages.rglob(".*.tmp-*"))
    return [outcome.error for outcome in done.outcomes]


async def test_a_small_one_needs_no_worker(paths: Paths, asked: Asked) -> None:
    """Neither a package nor a job."""
    wanted = [target(paths, {"bin/x": b"1"}), target(paths, {"web/monit": b"2"}, "web", "job")]

    assert await installed(paths, *wanted) == ["", ""]
    assert asked.count == 0
    assert Path(wanted[0].path, "bin/x").read_bytes() == b"1"
    assert Path(wanted[1].path, "monit").read_bytes() == b"2"


@pytest.mark.parametrize(
    "members",
    [
        {"noise": os.urandom(MAX_PACKED_BYTES)},
        {"zeros": bytes(MAX_UNPACKED_BYTES + 1)},
        {f"f{number}": b"" for number in range(MAX_MEMBERS + 1)},
    ],
    ids=["packed", "unpacked", "members"],
)
async def test_beyond_a_limit_a_worker_does_it(paths: Paths, asked: Asked, members: Mapping[str, bytes]) -> None:
    """All of it, also if the limit shows in the middle."""
    wanted = [target(paths, {"file": b"x"}, "small"), target(paths, members)]

    assert await installed(paths, *wanted) == ["", ""]
    assert asked.count == 1
    assert all(len(list(Path(each.path).iterdir())) for each in wanted)


async def test_extended_headers_of_many_records_are_read_by_a_worker(paths: Paths, asked: Asked) -> None:
    """A blob of a few kilobytes has hundreds of thousands of them, which would slow the event loop for seconds."""
    wanted = target(paths, {}, "p")
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, 8 * 12 * 1024
    tar = header.tobuf(tarfile.USTAR_FORMAT) + b"8 abc=d\n" * (12 * 1024) + tarfile.TarInfo("./file").tobuf()
    blob = gzip.compress(tar + bytes(1024), mtime=0)
    (paths.sensitive_blobs / "p").write_bytes(blob)
    digest = hashlib.sha1(blob, usedforsecurity=False).hexdigest()

    assert await installed(paths, Target("package", "p", wanted.path, BlobRef("p", digest=digest))) == [""]
    assert asked.count == 1
    assert Path(wanted.path, "file").exists()


async def test_members_with_many_directories_above_them_are_unpacked_by_a_worker(paths: Paths, asked: Asked) -> None:
    """A blob of a kilobyte makes tens of thousands of directories."""
    wanted = target(paths, {f"{number}/{'d/' * 200}file": b"" for number in range(10)})

    assert await installed(paths, wanted) == [""]
    assert asked.count == 1


async def test_many_go_to_a_worker(paths: Paths, asked: Asked) -> None:
    many = [target(paths, {"file": b"x"}, f"p{number}") for number in range(MAX_TARGETS + 1)]

    assert await installed(paths, *many) == [""] * len(many)
    assert asked.count == 1


def remote(paths: Paths, server: Server, size: int = 1, ca: str = "") -> tuple[Target, Blobstore]:
    """A package that only the server has, with a signed URL; and the blobstore."""
    local = target(paths, {"file": os.urandom(size)})
    blob = (paths.sensitive_blobs / "p").read_bytes()
    (paths.sensitive_blobs / "p").unlink()
    server.blobs = {"/blob": blob, f"/{hashlib.sha1(b'p').hexdigest()[:2]}/p": blob}
    options = {"endpoint": server.url, "user": "u", "password": "secret", "tls": {"cert": {"ca": ca}}}
    ref = BlobRef(signed_url=f"{server.url}/blob?signature=%2f", digest=local.source.digest)
    return msgspec.structs.replace(local, source=ref), Blobstore("dav", options)


@pytest.mark.parametrize("planted", ["lease", "link"])
async def test_a_job_that_owns_a_local_store_holds_no_install(
    paths: Paths, asked: Asked, tmp_path: Path, planted: str
) -> None:
    """An open waits for 45 s on a file under a lease of its owner."""
    wanted = target(paths, {"file": b"content"})
    store = tmp_path / "store"
    store.mkdir()
    (paths.sensitive_blobs / "p").rename(store / ("p" if planted == "lease" else "other"))
    if planted == "link":
        (store / "p").symlink_to("other")
    request = Install(str(paths.base), Blobstore("local", {"blobstore_path": str(store)}), 5, [wanted])
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # what the owner of a lease gets
    with (store / "p").open("rb+") as owner:
        if planted == "lease":
            fcntl.fcntl(owner.fileno(), fcntl.F_SETLEASE, fcntl.F_WRLCK)
        begun_at = time.monotonic()
        done = await small_installs.work(paths, request)
    signal.signal(signal.SIGIO, before)

    assert time.monotonic() - begun_at < 30
    assert asked.count == 1
    assert "cannot open" in done.outcomes[0].error


@pytest.mark.parametrize("is_signed", [True, False])
@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_small_one_of_a_server_needs_no_worker(
    paths: Paths, asked: Asked, tmp_path: Path, scheme: str, is_signed: bool
) -> None:
    """Two targets of one blob are fetched once."""
    authority = Authority("blobstore-ca")
    async with http_server(tmp_path, authority.server() if scheme == "https" else None) as server:
        wanted, store = remote(paths, server, ca=authority.ca)
        if not is_signed:
            server.user = "u:secret"
            wanted = msgspec.structs.replace(wanted, source=BlobRef("p", digest=wanted.source.digest))
        twin = msgspec.structs.replace(wanted, path=str(paths.data_packages / "twin/1"))
        done = await small_installs.work(paths, Install(str(paths.base), store, 5, [wanted, twin]))

    assert [outcome.error for outcome in done.outcomes] == ["", ""]
    assert asked.count == 0
    assert Path(wanted.path, "file").read_bytes() == Path(twin.path, "file").read_bytes()
    assert len(server.requests) == 1


async def test_a_server_that_is_not_trusted_gets_no_request(paths: Paths, asked: Asked, tmp_path: Path) -> None:
    """The worker says so."""
    async with http_server(tmp_path, Authority("another").server()) as server:
        wanted, store = remote(paths, server, ca=Authority("blobstore-ca").ca)
        source = BlobRef("p", digest=wanted.source.digest)
        request = Install(str(paths.base), store, 5, [msgspec.structs.replace(wanted, source=source)])
        done = await small_installs.work(paths, request)

    assert "its certificate is not trusted" in done.outcomes[0].error
    assert asked.count == 1
    assert server.requests == []


@pytest.mark.parametrize(
    "plan", ["404", http.HALF, http.SILENT, "redirect:/blob", http.ENDLESS, http.WRONG, http.ENCODED]
)
async def test_a_worker_repeats_what_is_not_plain(
    paths: Paths, asked: Asked, server: Server, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its redirects and retries."""
    monkeypatch.setattr(small_installs, "DOWNLOAD_TIMEOUT_S", 0.5)
    wanted, store = remote(paths, server)
    server.plan = [plan]
    done = await small_installs.work(paths, Install(str(paths.base), store, 5, [wanted]))

    assert [outcome.error for outcome in done.outcomes] == [""]
    assert asked.count == 1


async def test_a_large_one_of_a_server_is_left_to_a_worker(paths: Paths, asked: Asked, server: Server) -> None:
    wanted, store = remote(paths, server, MAX_DOWNLOADED_BYTES + 1)
    done = await small_installs.work(paths, Install(str(paths.base), store, 5, [wanted]))

    assert [outcome.error for outcome in done.outcomes] == [""]
    assert asked.count == 1


async def test_an_error_is_that_of_the_worker(paths: Paths, asked: Asked) -> None:
    """A wrong digest, and no archive."""
    wrong = target(paths, {"file": b"x"}, "wrong")
    (paths.sensitive_blobs / "wrong").write_bytes(b"something else")
    text = target(paths, {}, "text")
    (paths.sensitive_blobs / "text").write_bytes(b"x" * 600)
    digest = hashlib.sha1(b"x" * 600, usedforsecurity=False).hexdigest()
    text = Target("package", "text", text.path, BlobRef("text", digest=digest))
    request = Install(str(paths.base), DUMMY, 5, [wrong, text])

    here = await small_installs.work(paths, request)

    assert asked.count == 1
    assert here == await worker_client.work(request)
    assert all(outcome.error for outcome in here.outcomes)
