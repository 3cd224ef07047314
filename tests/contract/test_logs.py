"""Tests requests for logs: ``bundle_logs`` and ``remove_file`` (``a4`` in test names), ``fetch_logs`` (``a5``), and
``fetch_logs_with_signed_url`` (``a6``).
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import re
import stat
import tarfile
import uuid
from pathlib import Path
from typing import Any

import pytest

from agent_shim.bulk import protocol, workers
from agent_shim.services.logs import archives
from tests.contract.test_actions import store_of
from tests.support.http import http_server
from tests.support.world import LocalAgent, is_running
from tests.support.world import world as new_world

pytestmark = pytest.mark.slow

UNIX_DAY = 86400


@pytest.fixture(autouse=True)
def trees(world: LocalAgent) -> None:
    """Write a few files into the log directories that belong to the jobs, the agent and the system."""
    for place, names in (
        (world.paths.log, ["web/web.stdout.log", "web/sub/deep.log", "both"]),
        (world.paths.agent_log, ["current", "both"]),
        (world.paths.system_log, ["syslog", "audit/audit.log"]),
    ):
        for name in names:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(f"{name} of {place.name}\n")
    for name in ("current", "both"):
        (world.paths.agent_log / name).write_text(f"{name} of the agent\n")


def unpacked(data: bytes) -> dict[str, str]:
    """Map the name of each file in an archive to its content."""
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as tar:
        return {m.name: content.read().decode() for m in tar if (content := tar.extractfile(m)) is not None}


async def fetched(world: LocalAgent, kinds: str, filters: Any = None) -> dict[str, str]:
    """Run ``fetch_logs`` and return the files in the archive that it stores in the blobstore."""
    value = await world.value("fetch_logs", kinds, filters)
    assert set(value) == {"blobstore_id", "sha1"}
    assert str(uuid.UUID(value["blobstore_id"])) == value["blobstore_id"]
    data = (store_of(world) / value["blobstore_id"]).read_bytes()
    assert hashlib.sha1(data).hexdigest() == value["sha1"]
    assert scratch(world) == []
    return unpacked(data)


def scratch(world: LocalAgent) -> list[str]:
    """Return all remaining temporary files, except the directory for log bundles."""
    below = [path for path in world.paths.tmp.rglob("*") if path != world.paths.bundled_logs]
    return sorted(str(path.relative_to(world.paths.tmp)) for path in below)


JOB = {"./web/web.stdout.log", "./web/sub/deep.log", "./both"}
AGENT = {"./current", "./both"}
SYSTEM = {"./var/log/syslog", "./var/log/audit/audit.log"}


@pytest.mark.parametrize("filters", [None, [], ["**/*"]])
@pytest.mark.parametrize(
    ("kinds", "names"), [("job", JOB), ("agent", AGENT), ("system", SYSTEM), ("agent,job,system", JOB | AGENT | SYSTEM)]
)
async def test_a5_fetch_logs_packs_every_log_of_the_requested_kinds(
    world: LocalAgent, kinds: str, names: set[str], filters: Any
) -> None:
    assert set(await fetched(world, kinds, filters)) == names


async def test_a5_repeated_log_kind_is_packed_once(world: LocalAgent) -> None:
    blob = (await world.value("fetch_logs", ",".join(["system", *["job"] * 10_000]), []))["blobstore_id"]

    with tarfile.open(store_of(world) / blob) as tar:
        names = tar.getnames()
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("kinds", "text"),
    [("agent,job", "both of log\n"), ("job,agent", "both of the agent\n"), ("job,job", "both of log\n")],
)
async def test_a5_later_log_kind_overrides_files_with_the_same_name(world: LocalAgent, kinds: str, text: str) -> None:
    assert (await fetched(world, kinds))["./both"] == text


@pytest.mark.parametrize(
    ("filters", "names"),
    [
        (["web/*.log"], {"./web/web.stdout.log"}),
        (["web"], {"./web/web.stdout.log", "./web/sub/deep.log"}),
        (["**/deep.log", "nothing", "syslog"], {"./web/sub/deep.log", "./var/log/syslog"}),
        (["../../../../etc/passwd", "/etc/passwd"], set()),
    ],
)
async def test_a5_log_filters_apply_to_each_kind(world: LocalAgent, filters: list[str], names: set[str]) -> None:
    assert set(await fetched(world, "job,system", filters)) == names


@pytest.mark.parametrize("kinds", ["", "jobs", "job,", "job, agent", "job,nope", "JOB"])
async def test_a5_unknown_log_kind_is_rejected(world: LocalAgent, kinds: str) -> None:
    for method, arguments in (
        ("fetch_logs", [kinds, []]),
        ("fetch_logs_with_signed_url", [{"log_type": kinds}]),
        ("bundle_logs", [{"log_type": kinds}]),
    ):
        assert (await world.error(method, *arguments)).endswith(": Invalid log type")
    assert scratch(world) == []


async def test_a5_invalid_log_filter_is_reported(world: LocalAgent) -> None:
    error = await world.error("fetch_logs", "job", ["[z-a]"])

    assert ": Making logs tarball: cannot read the pattern '[z-a]': " in error
    assert scratch(world) == []


async def test_a5_missing_log_directory_gives_an_empty_archive(world: LocalAgent) -> None:
    (world.paths.system_log / "syslog").unlink()
    (world.paths.system_log / "audit/audit.log").unlink()
    (world.paths.system_log / "audit").rmdir()
    world.paths.system_log.rmdir()

    assert await fetched(world, "system") == {}


@pytest.mark.attack("a job exposes other users' files through symlinks or hard links in its log directory")
async def test_a5_files_outside_a_jobs_log_directory_are_not_packed(world: LocalAgent) -> None:
    (world.paths.log / "web/secret.log").symlink_to(world.paths.settings_cache)
    (world.paths.log / "web/all").symlink_to(world.paths.bosh)
    os.mkfifo(world.paths.log / "web/pipe")
    (world.paths.log / "web/current").symlink_to(world.paths.sys / "log/web/web.stdout.log")

    found = await fetched(world, "job")

    assert set(found) == JOB | {"./agent_shim.remarks.txt", "./web/current"}
    assert found["./web/current"] == found["./web/web.stdout.log"]
    assert [line.split(": ")[0] for line in found["./agent_shim.remarks.txt"].splitlines()] == [
        "./web/all",
        "./web/secret.log",
    ]


async def test_a5_failed_log_upload_is_reported_and_leaves_no_file(world: LocalAgent) -> None:
    store = store_of(world)
    store.rmdir()
    store.write_text("no directory")

    assert ": Create file on blobstore: " in await world.error("fetch_logs", "job", None)
    assert scratch(world) == []


async def test_a6_logs_are_uploaded_to_a_signed_url_with_the_requested_headers(world: LocalAgent) -> None:
    async with http_server() as server:
        request = {
            "signed_url": f"{server.url}/signed/ab/id?st=secret&ts=1",
            "log_type": "job",
            "filters": None,
            "blobstore_headers": {"x-ms-blob-type": "blockblob"},
        }
        value = await world.value("fetch_logs_with_signed_url", request)
        (put,) = server.requests

    assert value == {
        "sha1": f"{hashlib.sha1(put.body).hexdigest()};sha512:{hashlib.sha512(put.body).hexdigest()}",
    }
    assert set(unpacked(put.body)) == JOB
    assert (put.method, put.target) == ("PUT", "/signed/ab/id?st=secret&ts=1")
    assert put.headers["x-ms-blob-type"] == "blockblob"
    assert put.headers["content-length"] == str(len(put.body))
    assert "transfer-encoding" not in put.headers
    assert scratch(world) == []


async def test_a6_rejected_log_upload_is_reported_without_the_url_signature(world: LocalAgent) -> None:
    async with http_server() as server:
        server.plan.append("403")
        request = {"signed_url": f"{server.url}/id?st=secret", "log_type": "job"}
        error = await world.error("fetch_logs_with_signed_url", request)

    assert error.endswith(f": Create file on blobstore: Error executing PUT, response was 403 from {server.host}")
    assert scratch(world) == []


async def test_a4_log_bundle_is_kept_until_it_is_removed(world: LocalAgent) -> None:
    value = (await world.call("bundle_logs", {"log_type": "job,agent", "filters": ["both"]}))["value"]
    path = Path(value["logs_tar_path"])
    data = path.read_bytes()

    assert value == {"logs_tar_path": str(path), "sha512": f"sha512:{hashlib.sha512(data).hexdigest()}"}
    assert path.parent == world.paths.tmp / "logs"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o711
    assert unpacked(data) == {"./both": "both of the agent\n"}

    for _ in range(2):
        assert await world.call("remove_file", str(path)) == {"value": str(path)}
        assert scratch(world) == []


async def test_a4_oldest_log_bundle_is_removed_if_there_are_too_many(
    world: LocalAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each bundle is a copy of all logs and is kept for a day, so repeated requests could fill the disk."""
    monkeypatch.setattr(archives, "MAX_BUNDLES", 2)
    paths = [Path((await world.value("bundle_logs", {"log_type": "job"}))["logs_tar_path"]) for _ in range(3)]

    assert [path.exists() for path in paths] == [False, True, True]


@pytest.mark.attack("an SSH user reads another operator's log archive")
@pytest.mark.root
@pytest.mark.parametrize(("owner", "group"), [("nobody", None), ("nobody:daemon", "daemon")])
async def test_a4_log_bundle_belongs_to_the_requested_user(world: LocalAgent, owner: str, group: str | None) -> None:
    value = await world.value("bundle_logs", {"owning_user": owner, "log_type": "job"})
    path = Path(value["logs_tar_path"])

    assert path.owner() == "nobody"
    assert path.group() == (group or "nogroup")


@pytest.mark.root
@pytest.mark.parametrize("user", ["bosh_nosuch", "bosh\0"])
async def test_a4_log_bundle_for_an_unknown_user_fails_and_leaves_no_file(world: LocalAgent, user: str) -> None:
    error = await world.error("bundle_logs", {"owning_user": user, "log_type": "job"})

    assert error.startswith("Action Failed bundle_logs: cannot give ")
    assert "there is no user bosh" in error
    assert scratch(world) == []


async def test_a4_creating_a_log_bundle_removes_day_old_and_unfinished_ones(world: LocalAgent) -> None:
    paths = [Path((await world.value("bundle_logs", {"log_type": "job"}))["logs_tar_path"]) for _ in range(2)]
    old = paths[0].stat().st_mtime - UNIX_DAY - 1
    os.utime(paths[0], (old, old))
    half = world.paths.bundled_logs / ".logs-0.tgz.tmp-01234567"
    half.touch()

    last = Path((await world.value("bundle_logs", {"log_type": "job"}))["logs_tar_path"])

    assert set(world.paths.bundled_logs.iterdir()) == {paths[1], last}


async def test_a4_log_bundles_are_created_one_at_a_time_without_delaying_other_requests(tmp_path: Path) -> None:
    packing, gate, most = 0, asyncio.Event(), 0

    async def execute(request: protocol.Request, **_: object) -> protocol.Done:
        nonlocal packing, most
        packing += 1
        most = max(most, packing)
        await gate.wait()
        try:
            return await workers.execute(request)
        finally:
            packing -= 1

    async with new_world(tmp_path / "w", execute=execute) as world, asyncio.timeout(60):
        bundles = [asyncio.create_task(world.call("bundle_logs", {"log_type": "job"})) for _ in range(3)]
        assert await world.call("ping") == {"value": "pong"}
        assert is_running(await world.call("run_script", "none", {}))
        assert not any(bundle.done() for bundle in bundles)
        gate.set()
        replies = await asyncio.gather(*bundles)

    assert len({reply["value"]["logs_tar_path"] for reply in replies}) == 3
    assert most == 1


async def test_a4_remove_file_removes_temporary_files_and_links_but_not_link_targets(world: LocalAgent) -> None:
    left, target, link = world.paths.tmp / "left", world.paths.base / "target", world.paths.tmp / "link"
    left.write_text("x")
    target.write_text("x")
    link.symlink_to(target)

    for path in (left, link, left):
        assert await world.value("remove_file", str(path)) == str(path)
    assert [path.name for path in (left, link, target) if os.path.lexists(path)] == ["target"]


@pytest.mark.attack("a request removes a file that is not a log archive")
async def test_a4_remove_file_removes_nothing_outside_the_temporary_directory(world: LocalAgent) -> None:
    kept = await world.value("bundle_logs", {"log_type": "job"})
    outside = world.paths.base / "outside"
    outside.write_text("x")
    inside = world.paths.bundled_logs / "other"
    inside.write_text("x")
    link = world.paths.tmp / "link"
    link.symlink_to(world.paths.bundled_logs)
    for path in (
        str(outside),
        str(inside),
        "/",
        str(world.paths.tmp),
        str(world.paths.bundled_logs),
        f"{world.paths.bundled_logs}/../logs/{Path(kept['logs_tar_path']).name}",
        f"{link}/{Path(kept['logs_tar_path']).name}",
        ".",
    ):
        error = await world.error("remove_file", path)
        assert error == (
            f"Action Failed remove_file: cannot remove {path}: "
            f"it is neither an archive of bundle_logs nor a file in {world.paths.tmp}"
        )

    assert outside.exists()
    assert inside.exists()
    assert Path(kept["logs_tar_path"]).exists()


@pytest.mark.parametrize("path", ["/nonexistent/x", "/etc/passwd/x", "", "a\0b", "/" + "x" * 300])
async def test_a4_removing_a_missing_file_succeeds(world: LocalAgent, path: str) -> None:
    assert await world.call("remove_file", path) == {"value": path}


@pytest.mark.attack("a request removes a file that is not a log archive")
async def test_a4_symlink_in_place_of_a_log_bundle_is_removed_not_followed(world: LocalAgent) -> None:
    path = Path((await world.value("bundle_logs", {"log_type": "job"}))["logs_tar_path"])
    victim = world.paths.base / "victim"
    victim.mkdir()
    (victim / "file").touch()
    path.unlink()
    path.symlink_to(victim)

    assert await world.value("remove_file", str(path)) == str(path)
    assert not path.is_symlink()
    assert (victim / "file").exists()


async def test_a5_logs_that_change_during_packing_contain_only_whole_lines(world: LocalAgent) -> None:
    """Each file in the archive consists of whole lines, followed by zeros if the file was truncated while it was
    packed.
    """
    log = world.paths.log / "web/busy.log"
    log.write_text("".join(f"line {number}\n" for number in range(5000)))
    stop = asyncio.Event()

    def write() -> None:
        number = 5000
        while not stop.is_set():
            with log.open("a") as out:
                out.writelines(f"line {number + i}\n" for i in range(50))
            number += 50
            for age in range(6, 0, -1):
                if (old := log.with_name(f"busy.log.{age}")).exists():
                    old.rename(log.with_name(f"busy.log.{age + 1}"))
            log.rename(log.with_name("busy.log.1"))
            log.touch()

    writing = asyncio.create_task(asyncio.to_thread(write))
    try:
        for _ in range(5):
            found = await fetched(world, "job", ["web/busy.log*"])
            assert all(re.fullmatch(r"(line \d+\n)*\0*", text) for name, text in found.items() if "busy" in name)
    finally:
        stop.set()
        await writing
