"""Small installs without a worker, and what still gets one."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from agent_shim.core.paths import Paths
from agent_shim.core.settings import Blobstore
from agent_shim.daemon import small_installs
from agent_shim.daemon.small_installs import MAX_MEMBERS, MAX_PACKED_BYTES, MAX_TARGETS, MAX_UNPACKED_BYTES
from agent_shim.host import worker_client
from agent_shim.host.worker_client import BlobRef, Done, Install, Request, Target

DUMMY = Blobstore()


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


async def test_many_and_remote_ones_go_to_a_worker(paths: Paths, asked: Asked) -> None:
    """The agent itself fetches nothing over the network."""
    many = [target(paths, {"file": b"x"}, f"p{number}") for number in range(MAX_TARGETS + 1)]
    remote = BlobRef(signed_url="http://127.0.0.1:1/blob", digest="0")
    away = Target("package", "q", str(paths.data_packages / "q/1"), remote)

    assert await installed(paths, *many) == [""] * len(many)
    assert asked.count == 1
    assert "Failed to download blob" in (await installed(paths, away))[0]
    assert asked.count == 2


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
