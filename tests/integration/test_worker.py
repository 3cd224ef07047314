"""Tests the worker process: its actions, the files left behind if it fails or is killed, and how it keeps secrets."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gzip
import hashlib
import io
import os
import random
import re
import resource
import signal
import stat
import subprocess
import sys
import tarfile
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest

from agent_shim.bulk import install as installs
from agent_shim.bulk import protocol, worker, workers
from agent_shim.bulk.protocol import (
    BlobRef,
    CopyTree,
    Get,
    Install,
    Outcome,
    Pack,
    Put,
    Request,
    Tree,
    UnpackTarget,
)
from agent_shim.core.errors import ActionError
from agent_shim.core.paths import Paths
from agent_shim.core.settings import Blobstore
from agent_shim.host import files, process
from tests.support import http
from tests.support.http import BlobServer
from tests.support.programs import is_alive, number_in
from tests.support.waiting import until

DUMMY = Blobstore()
CANARY = "c4n4ry"


def tgz(
    members: Mapping[str, bytes], *, mode: int = 0o644, compress: Callable[[bytes], bytes] = gzip.compress
) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.mtime = len(data), mode, 1_600_000_000
            tar.addfile(info, io.BytesIO(data))
    return compress(out.getvalue())


def sha1(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


def store_local_blob(paths: Paths, data: bytes) -> BlobRef:
    """Store ``data`` as a local blob, and return a reference to the blob."""
    blob_id = str(uuid.uuid4())
    (paths.blobs / blob_id).write_bytes(data)
    return BlobRef(blob_id, digest=sha1(data))


def package(paths: Paths, name: str, source: BlobRef) -> UnpackTarget:
    return UnpackTarget("package", name, str(paths.data_packages / name / "digest"), source)


def files_under(path: Path) -> dict[str, tuple[int, bytes]]:
    """Return the mode and content of each file under a directory."""
    found = sorted(path.rglob("*"))
    return {str(p.relative_to(path)): (stat.S_IMODE(p.stat().st_mode), p.read_bytes()) for p in found if p.is_file()}


def leftovers(paths: Paths) -> list[Path]:
    return [path for path in paths.base.rglob("*") if files.is_leftover(path.name)]


async def install(paths: Paths, *targets: UnpackTarget, parallel: int = 5, store: Blobstore = DUMMY) -> list[Outcome]:
    return (await workers.execute(Install(str(paths.base), store, parallel, list(targets)))).outcomes


# --- install ----------------------------------------------------------------------------------------------------------


async def test_worker_unpacks_jobs_packages_and_sources(paths: Paths) -> None:
    templates = store_local_blob(
        paths,
        tgz({"./web/monit": b"m", "./web/bin/run": b"r", "./web/bin/sub/x": b"x", "./db/bin/drain": b"d"}, mode=0o604),
    )
    compiled = store_local_blob(paths, tgz({"./bin/tool": b"t"}, mode=0o4755))
    source = store_local_blob(paths, tgz({"./packaging": b"p"}, compress=bytes))
    web, db = (UnpackTarget("job", name, str(paths.data_jobs / name / "d"), templates) for name in ("web", "db"))
    outcomes = await install(
        paths,
        web,
        package(paths, "tool", compiled),
        db,
        UnpackTarget("source", "src", str(paths.compile / "src"), source),
    )

    assert outcomes == [Outcome(), Outcome(), Outcome(), Outcome(compressed=False, newest=1_600_000_000)]
    assert files_under(paths.data_jobs) == {
        "db/d/bin/drain": (0o750, b"d"),
        "web/d/bin/run": (0o750, b"r"),
        "web/d/bin/sub/x": (0o750, b"x"),
        "web/d/monit": (0o640, b"m"),
    }
    assert files_under(paths.data_packages) == {"tool/digest/bin/tool": (0o4755, b"t")}
    assert files_under(paths.compile) == {"src/packaging": (0o644, b"p")}
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in paths.data_jobs.rglob("*") if path.is_dir()}
    assert modes == {"web": 0o750, "db": 0o750, "d": 0o750, "bin": 0o750, "sub": 0o750}
    for path in (paths.data_packages / "tool", paths.data_packages / "tool" / "digest", paths.compile / "src"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o755
    assert leftovers(paths) == []


async def test_worker_fetches_an_archive_with_several_jobs_once(paths: Paths, server: BlobServer) -> None:
    """The Director renders all of an instance's jobs into one archive."""
    data = tgz({f"job{number}/monit": b"m" for number in range(8)})
    server.blobs["/templates"] = data
    source = BlobRef(signed_url=f"{server.url}/templates?sig=x", digest=sha1(data))
    names = [f"job{number}" for number in range(8)]
    outcomes = await install(
        paths, *(UnpackTarget("job", name, str(paths.data_jobs / name / "d"), source) for name in names)
    )

    assert outcomes == [Outcome()] * 8
    assert len(server.requests) == 1
    assert len(files_under(paths.data_jobs)) == 8


@pytest.mark.parametrize("parallel", [1, 3, 0])
async def test_worker_runs_a_limited_number_of_transfers_in_parallel(
    paths: Paths, server: BlobServer, parallel: int
) -> None:
    data = tgz({"a": b"a"})
    server.delay = 0.05
    targets = []
    for number in range(6):
        server.blobs[f"/{number}"] = data
        targets.append(package(paths, f"p{number}", BlobRef(signed_url=f"{server.url}/{number}", digest=sha1(data))))
    outcomes = await install(paths, *targets, parallel=parallel)

    assert outcomes == [Outcome()] * 6
    assert server.busiest == max(parallel, 1)


async def test_failed_bundle_does_not_affect_other_bundles_in_the_same_worker(paths: Paths) -> None:
    good = store_local_blob(paths, tgz({"a": b"a"}))
    evil = store_local_blob(paths, tgz({"../../evil": b"x"}))
    missing = BlobRef("missing", digest="00")
    wrong = BlobRef(good.blob_id, digest="00")
    outcomes = await install(
        paths,
        package(paths, "evil", evil),
        package(paths, "good", good),
        package(paths, "missing", missing),
        package(paths, "wrong", wrong),
        UnpackTarget("job", "web", str(paths.data_jobs / "web" / "d"), good),
        UnpackTarget("job", "db", str(paths.data_jobs / "db" / "d"), missing),
        UnpackTarget("source", "src", str(paths.compile / "src"), missing),
    )

    mismatch = f"Expected stream to have digest '00' but was '{good.digest}'"
    nowhere = "Getting blob from inner blobstore: cannot get missing: the blobstore is a dummy"
    assert [outcome.error for outcome in outcomes] == [
        "Installing package directory: cannot unpack the archive: '../../evil': it is not a path inside the archive",
        "",
        f"Fetching package blob: {nowhere}",
        f"Fetching package blob: Checking blob '{good.blob_id}': {mismatch}",
        "Installing job bundle: Detecting prefix of package files: no file with prefix 'web' found",
        f"Getting job source from blobstore: {nowhere}",
        nowhere,
    ]
    assert list(files_under(paths.data_packages)) == ["good/digest/a"]
    assert leftovers(paths) == []


@pytest.mark.attack("a blobstore redirects endlessly or to a file, or stalls")
async def test_stalled_blobstore_fails_all_downloads_after_one_timeout(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If each download waited for its own timeout, the agent would wait two minutes for each package, of which there
    may be hundreds.
    """
    monkeypatch.setattr(installs, "PATIENCE_S", 0.0)
    good = store_local_blob(paths, tgz({"a": b"a"}))
    targets = [package(paths, "first", good), package(paths, "missing", BlobRef("missing", digest="00"))]
    targets += [package(paths, f"p{number}", BlobRef(f"missing{number}", digest="00")) for number in range(20)]

    done = await worker.execute(Install(str(paths.base), DUMMY, 1, targets), [])

    assert done.outcomes[0].error == ""
    assert "cannot get missing" in done.outcomes[1].error
    assert done.outcomes[2:] == [installs.UNREACHED] * 20
    assert (paths.data_packages / "first/digest/a").exists()


async def test_worker_keeps_a_concurrently_installed_bundle_and_replaces_sources(
    paths: Paths,
) -> None:
    """A bundle that another worker has installed has the same content, but sources may be left over from an interrupted
    compilation.
    """
    for place in (paths.data_packages / "p" / "digest", paths.compile / "src"):
        place.mkdir(parents=True)
        (place / "theirs").touch()
    ours = store_local_blob(paths, tgz({"ours": b""}))
    outcomes = await install(
        paths, package(paths, "p", ours), UnpackTarget("source", "src", str(paths.compile / "src"), ours)
    )

    assert [outcome.error for outcome in outcomes] == ["", ""]
    assert list(files_under(paths.data_packages)) == ["p/digest/theirs"]
    assert list(files_under(paths.compile)) == ["src/ours"]
    assert leftovers(paths) == []


@pytest.mark.attack("a job replaces a blob in its local blobstore with a link")
@pytest.mark.parametrize("planted", ["lease", "link"])
async def test_local_blob_that_is_leased_or_a_link_is_refused_without_blocking(
    paths: Paths, tmp_path: Path, planted: str
) -> None:
    """If a job holds a lease (fcntl) on a blob, opening the blob would block for up to 45 s, so the worker rejects the
    blob.
    """
    source, store = store_local_blob(paths, tgz({"file": b"content"})), tmp_path / "store"
    store.mkdir()
    (paths.blobs / source.blob_id).rename(store / (source.blob_id if planted == "lease" else "other"))
    if planted == "link":
        (store / source.blob_id).symlink_to("other")
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # The kernel sends this signal to the lease holder.
    with (store / source.blob_id).open("rb+") as owner:
        if planted == "lease":
            fcntl.fcntl(owner.fileno(), fcntl.F_SETLEASE, fcntl.F_WRLCK)
        begun_at = time.monotonic()
        (outcome,) = await install(
            paths, package(paths, "p", source), store=Blobstore("local", {"blobstore_path": str(store)})
        )
    signal.signal(signal.SIGIO, before)

    assert time.monotonic() - begun_at < 30
    assert "cannot open" in outcome.error


# --- other requests ---------------------------------------------------------------------------------------------------


@pytest.mark.attack("a blobstore redirects endlessly or to a file, or stalls")
@pytest.mark.slow
async def test_stalled_download_is_abandoned_and_retried(paths: Paths, server: BlobServer) -> None:
    """The test uses the real timeouts. The server first stalls in the middle of the blob and then sends it very
    slowly.
    """
    store = Blobstore("dav", {"endpoint": server.url})
    data = os.urandom(200_000)
    server.blobs = {f"/{hashlib.sha1(b'b').hexdigest()[:2]}/b": data}
    server.plan = [http.STALL, http.DRIBBLE]
    target = paths.tmp / "file"
    async with asyncio.timeout(110):
        await workers.execute(Get(str(paths.base), store, BlobRef("b", digest=sha1(data)), str(target)))

    assert target.read_bytes() == data
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda base: Get(base, DUMMY, BlobRef("missing", digest="00"), f"{base}/file"),
        lambda base: Get(base, DUMMY, BlobRef(digest="00"), f"{base}/file"),
        lambda base: Put(base, Blobstore("local", {"blobstore_path": f"{base}/store"}), f"{base}/missing"),
        lambda base: Put(base, Blobstore("local"), "/etc/passwd"),
        lambda base: Pack([Tree(f"{base}/missing")], f"{base}/file"),
        lambda base: Pack([Tree(base)], f"{base}/missing/file"),
        lambda base: CopyTree(f"{base}/missing", f"{base}/copy", []),
    ],
)
async def test_failed_worker_action_reports_the_error_and_leaves_no_files(
    paths: Paths, make: Callable[[str], Request]
) -> None:
    with pytest.raises(ActionError):
        await workers.execute(make(str(paths.base)))

    assert [path for path in paths.base.rglob("*") if path.is_file()] == []


async def test_cancelled_log_upload_is_counted_as_failed_and_can_be_repeated(
    paths: Paths, tmp_path: Path, server: BlobServer, started: list[process.Process]
) -> None:
    (tmp_path / "logs").mkdir()
    path, told = paths.tmp / "logs.tgz", list[str]()
    put = Put(str(paths.base), DUMMY, str(path), f"{server.url}/new")
    server.plan = [http.SILENT]
    pack = Pack([Tree(str(tmp_path / "logs"))], str(path), put=put)
    working = asyncio.create_task(workers.execute(pack, report=lambda step: told.append(step.phase)))
    await until(lambda: "uploading" in told and bool(server.requests))
    before = workers.transfers.counts["put", "failed"]
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working

    assert told == ["uploading"]
    assert len(started) == 1
    assert not started[0].is_alive
    assert workers.transfers.counts["put", "failed"] == before + 1
    assert (await workers.execute(pack)).put_error == ""
    assert server.blobs["/new"] == path.read_bytes()


@pytest.mark.parametrize("what", ["archive", "file"])
async def test_worker_error_names_a_full_disk_and_its_free_space(paths: Paths, tmp_path: Path, what: str) -> None:
    data = os.urandom(500_000)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/log").write_bytes(data)
    path = paths.tmp / "new"
    request: Request = Pack([Tree(str(tmp_path / "logs"))], str(path))
    if what == "file":
        request = Get(str(paths.base), DUMMY, store_local_blob(paths, data), str(path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(ActionError, match=rf"^cannot write {path}: File too large, \d+ MiB are free$"):
            await workers.execute(request)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert list(paths.tmp.iterdir()) == []


# --- termination ------------------------------------------------------------------------------------------------------


async def start_stalled_install(
    paths: Paths, server: BlobServer, started: list[process.Process]
) -> asyncio.Task[list[Outcome]]:
    """Start installing two packages whose downloads both stall. Return the task."""
    data = tgz({"a": os.urandom(100_000)})
    server.blobs = {"/one": data, "/two": data}
    server.plan = [http.STALL, http.STALL]
    targets = [
        package(paths, name, BlobRef(signed_url=f"{server.url}/{name}?{CANARY}", digest=sha1(data)))
        for name in ("one", "two")
    ]
    task = asyncio.create_task(install(paths, *targets))
    await until(lambda: len(server.requests) >= 2)
    assert len(started) == 1
    return task


async def test_worker_terminated_while_unpacking_removes_its_files(
    paths: Paths, started: list[process.Process]
) -> None:
    """Unpacking runs in a thread, which cannot be cancelled. The thread stops because the file that it reads is
    closed.
    """
    source = store_local_blob(paths, tgz({f"f{number}": os.urandom(2000) for number in range(5000)}, compress=bytes))
    task = asyncio.create_task(install(paths, package(paths, "p", source)))
    await until(lambda: leftovers(paths))
    started[0].send(signal.SIGTERM)
    with contextlib.suppress(ActionError):
        await task

    assert leftovers(paths) == []
    assert len(files_under(paths.data_packages)) in (0, 5000)


@pytest.mark.attack("a worker gets an invalid request, sends an invalid response, or is killed")
async def test_worker_killed_at_any_moment_leaves_no_partial_bundle(
    paths: Paths, started: list[process.Process]
) -> None:
    sources = [
        store_local_blob(paths, tgz({f"f{n}": os.urandom(3000) for n in range(150)}, compress=bytes)) for _ in range(3)
    ]
    chance = random.Random(7)
    for _ in range(12):
        task = asyncio.create_task(install(paths, *(package(paths, f"p{n}", ref) for n, ref in enumerate(sources))))
        await asyncio.sleep(0.05)
        await asyncio.sleep(chance.random() * 0.15)
        started[-1].send(signal.SIGKILL)
        with contextlib.suppress(ActionError):
            await task
        for bundle in paths.data_packages.glob("*/digest"):
            assert len(files_under(bundle)) == 150
            files.remove_tree(bundle)

    outcomes = await install(paths, *(package(paths, f"p{n}", ref) for n, ref in enumerate(sources)))
    assert outcomes == [Outcome(compressed=False)] * 3


async def test_killed_worker_leaves_no_partial_archive(
    paths: Paths, started: list[process.Process], tmp_path: Path
) -> None:
    """A partial archive may be large, and would otherwise stay on the disk until the next boot."""
    (tmp_path / "logs").mkdir()
    with (tmp_path / "logs/large").open("wb") as sparse:
        sparse.truncate(16 << 30)
    packing = asyncio.create_task(workers.execute(Pack([Tree(str(tmp_path / "logs"))], str(paths.tmp / "logs.tgz"))))
    await until(lambda: leftovers(paths))
    started[0].send(signal.SIGKILL)
    with pytest.raises(ActionError, match="the worker was killed by SIGKILL"):
        await packing

    assert leftovers(paths) == []


async def test_files_left_by_the_blobstore_command_of_a_killed_worker_are_removed(
    paths: Paths, started: list[process.Process]
) -> None:
    paths.bosh_bin.mkdir(parents=True)
    command, others = paths.bosh_bin / "bosh-blobstore-x", files.sibling(protocol.scratch(paths, 1))
    command.write_text('#!/bin/sh\necho $$ >"$5"\nexec sleep 600\n')
    command.chmod(0o755)
    paths.bosh_etc.mkdir(parents=True)
    others.touch()
    get = Get(str(paths.base), Blobstore("x"), BlobRef("b", digest="00"), str(paths.tmp / "file"))
    getting = asyncio.create_task(workers.execute(get))
    pid = await until(lambda: next((n for path in paths.tmp.glob(".*/blob") if (n := number_in(path))), None))
    started[0].send(signal.SIGKILL)
    try:
        with pytest.raises(ActionError, match="the worker was killed by SIGKILL"):
            await getting
    finally:
        os.kill(pid, signal.SIGKILL)

    assert leftovers(paths) == [others]


async def test_worker_exits_when_its_parent_exits(paths: Paths, server: BlobServer, tmp_path: Path) -> None:
    """If the agent is killed, nobody needs the worker's result any more."""
    server.plan = [http.SILENT]
    program = f"""
import asyncio
from agent_shim.bulk import protocol, workers
from agent_shim.host import process
from agent_shim.core.settings import Blobstore
spawn = process.spawn
def spy(*arguments, **options):
    worker = spawn(*arguments, **options)
    print(worker.pid, flush=True)
    return worker
process.spawn = spy
source = protocol.BlobRef(signed_url="{server.url}/b", digest="00")
asyncio.run(workers.execute(protocol.Get("{paths.base}", Blobstore(), source, "{tmp_path}/file")))
"""
    parent = await asyncio.to_thread(
        subprocess.Popen, [sys.executable, "-c", program], stdout=subprocess.PIPE, process_group=0
    )
    assert parent.stdout is not None
    worker = int(await asyncio.to_thread(parent.stdout.readline))
    await until(lambda: server.requests)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    await until(lambda: not is_alive(worker))

    assert not (tmp_path / "file").exists()


class Guess(msgspec.Struct, tag=True):
    password: str


@pytest.mark.attack("a worker gets an invalid request, sends an invalid response, or is killed")
async def test_invalid_worker_request_is_reported_without_its_text() -> None:
    """The exception's message could quote a secret from the request."""
    with pytest.raises(ActionError) as caught:
        await workers.execute(Guess(CANARY))  # type: ignore[arg-type]

    assert str(caught.value).startswith(
        'cannot finish the work: the worker ended with code 1: msgspec.ValidationError in File "'
    )
    assert CANARY not in str(caught.value)


# --- secrets ----------------------------------------------------------------------------------------------------------


@pytest.mark.attack("a job searches for the agent's keys and settings")
async def test_worker_has_no_secrets_in_arguments_environment_or_files(
    paths: Paths, server: BlobServer, started: list[process.Process]
) -> None:
    task = await start_stalled_install(paths, server, started)
    seen = Path(f"/proc/{started[0].pid}")
    told = [(seen / name).read_bytes() for name in ("cmdline", "environ")]
    written = [path.read_bytes() for path in paths.base.rglob("*") if path.is_file()]
    limits = (seen / "limits").read_text()
    score = (seen / "oom_score_adj").read_text()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert not started[0].is_alive
    assert leftovers(paths) == []
    assert not any(CANARY.encode() in text for text in told + written)
    assert re.search(r"Max core file size +1 +1 ", limits)
    assert score == "500\n"


def test_worker_does_not_lower_an_inherited_oom_score() -> None:
    """The agent in a Burstable pod may have an OOM score of 990. If its worker had a lower score, the kernel would kill
    the agent first.
    """
    code = (
        "import os; from pathlib import Path; from agent_shim.bulk import worker; "
        "score = Path('/proc/self/oom_score_adj'); score.write_text('990'); worker.become_worker(os.getppid()); "
        "print(score.read_text())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "990"


@pytest.mark.attack("a reader finds arguments, values or signed URLs in an audit record or an error")
async def test_failed_worker_transfer_is_reported_without_secrets(paths: Paths, server: BlobServer) -> None:
    server.plan = ["403"]
    (paths.tmp / "file").write_bytes(b"data")
    url = f"http://me:{CANARY}@{server.host}/b?sig={CANARY}"
    with pytest.raises(ActionError) as caught:
        await workers.execute(Put(str(paths.base), DUMMY, str(paths.tmp / "file"), url))

    assert str(caught.value) == f"Error executing PUT, response was 403 from {server.host}"
    assert CANARY not in repr(BlobRef(signed_url=url))
