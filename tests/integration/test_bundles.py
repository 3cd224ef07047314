"""Tests installing, activating and removing bundles on a real disk, with real workers that unpack them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from agent_shim.bulk import protocol, workers
from agent_shim.bulk.protocol import BlobRef, Done, Outcome
from agent_shim.core.errors import ActionError, BlobError
from agent_shim.core.paths import Paths
from agent_shim.core.settings import Blobstore
from agent_shim.demo.release import archive
from agent_shim.host import files
from agent_shim.services.bundles import MAX_SMALL_BYTES, Bundle, Bundles

DUMMY = Blobstore()


def sha1(text: str | bytes) -> str:
    data = text.encode() if isinstance(text, str) else text
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


@pytest.fixture
async def bundles(paths: Paths) -> AsyncIterator[Bundles]:
    async with workers.Workers() as pool:
        yield Bundles(paths, pool.execute)


def package(paths: Paths, name: str, version: str = "1", **members: bytes) -> Bundle:
    """Return a package whose archive is in this machine's blobs directory."""
    data = archive(members or {"file": name.encode()})
    (paths.blobs / f"blob-{name}-{version}").write_bytes(data)
    return Bundle("package", name, version, BlobRef(f"blob-{name}-{version}", digest=sha1(data)))


def jobs(paths: Paths, *names: str, version: str = "1", blob_id: str = "templates") -> list[Bundle]:
    """Return jobs whose rendered templates are in one archive, as if the agent had received it over the bus."""
    data = archive({f"{name}/monit": f"{name} {version}" for name in names})
    (paths.sensitive_blobs / blob_id).write_bytes(data)
    return [Bundle("job", name, version, BlobRef(blob_id, digest=sha1(data))) for name in names]


async def installed(bundles: Bundles, *wanted: Bundle) -> None:
    await bundles.install(wanted, DUMMY, 5)


def in_use(links: Path) -> dict[str, Path]:
    return {link.name: link.readlink() for link in sorted(links.iterdir()) if link.is_symlink()}


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bundle", "hashed"),
    [
        (Bundle("job", "web", "1.2", BlobRef("x", digest="abc")), "1.2-abc"),
        (Bundle("job", "web", "1.2", BlobRef("x", digest="sha1:abc")), "1.2-abc"),
        (Bundle("package", "p", "v.1", BlobRef("x", digest="abc;sha256:def")), "v.1-abc;sha256:def"),
        (Bundle("package", "p", "v.1"), "v.1"),
    ],
)
def test_bundle_path_matches_the_go_agent(paths: Paths, bundles: Bundles, bundle: Bundle, hashed: str) -> None:
    """The directory name is the SHA-1 of ``VERSION-DIGEST``. For a package that was compiled on this machine, it is the
    SHA-1 of the version alone.
    """
    kind = paths.data_jobs if bundle.kind == "job" else paths.data_packages

    assert bundles.path(bundle) == kind / bundle.name / sha1(hashed)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc", "../x", "a\0b", ".hidden", "x" * 300])
async def test_bundle_with_an_unsafe_name_or_no_version_is_rejected(paths: Paths, bundles: Bundles, name: str) -> None:
    """The name and version come from requests and become part of paths."""
    with pytest.raises(ActionError, match="cannot use .* as the name of a package"):
        bundles.path(Bundle("package", name, "1"))
    with pytest.raises(ActionError, match="cannot use .* as the name of a job"):
        await bundles.make_job_dirs([name])
    with pytest.raises(ActionError, match="^cannot install the job web: it has no version$"):
        await installed(bundles, Bundle("job", "web", "", BlobRef("x", digest="00")))


# --- install ----------------------------------------------------------------------------------------------------------


async def test_one_worker_installs_all_bundles(paths: Paths, bundles: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[protocol.Request] = []

    async def work(request: protocol.Request, **_: object) -> Done:
        asked.append(request)
        return await workers.execute(request)

    bundles = Bundles(paths, work)
    wanted = [*jobs(paths, "web", "db"), package(paths, "ruby"), package(paths, "nginx")]
    await bundles.install(wanted, DUMMY, 5)
    await bundles.install(wanted, DUMMY, 5)

    assert len(asked) == 1
    assert all(bundles.path(bundle).is_dir() for bundle in wanted)
    assert (bundles.path(wanted[0]) / "monit").read_bytes() == b"web 1"
    assert not paths.jobs.exists()
    assert not paths.packages.exists()


async def test_bundle_installed_by_the_go_agent_is_reused(paths: Paths, bundles: Bundles) -> None:
    """The only sign that the Go agent has installed a bundle is the bundle's directory."""
    bundle = Bundle("package", "p", "1", BlobRef("gone", digest="00"))
    bundles.path(bundle).mkdir(parents=True)
    await installed(bundles, bundle)

    assert bundles.path(bundle).is_dir()


async def test_first_bundle_failure_is_reported_and_other_bundles_are_kept(paths: Paths, bundles: Bundles) -> None:
    good = package(paths, "good")
    bad = Bundle("package", "bad", "1", BlobRef("missing", digest="00"))
    [job] = jobs(paths, "web")
    with pytest.raises(ActionError, match="^Preparing package bad: Fetching package blob: Getting blob from inner"):
        await installed(bundles, bad, good, Bundle("job", "other", "1", job.source))

    assert bundles.path(good).is_dir()
    assert not bundles.path(bad).exists()


@pytest.mark.parametrize("how", ["killed", "cancelled"])
async def test_partial_bundles_left_by_a_killed_worker_are_removed(paths: Paths, how: str) -> None:
    bundle = package(paths, "p")
    begun = asyncio.Event()

    async def work(request: protocol.Request, **_: object) -> Done:
        half = files.sibling(Bundles(paths).path(bundle))
        (half / "below").mkdir(parents=True)
        begun.set()
        if how == "killed":
            raise ActionError("killed")
        await asyncio.Event().wait()
        return Done()

    task = asyncio.create_task(Bundles(paths, work).install([bundle], DUMMY, 5))
    await begun.wait()
    if how == "cancelled":
        task.cancel()
    with pytest.raises(ActionError if how == "killed" else asyncio.CancelledError):
        await task

    assert list((paths.data_packages / "p").iterdir()) == []


async def test_boot_removes_leftover_bundle_files(paths: Paths, bundles: Bundles) -> None:
    bundle = package(paths, "p")
    await installed(bundles, bundle)
    await bundles.activate([], [bundle])
    for place in (bundles.path(bundle), paths.packages / "p", paths.tmp / "blob"):
        files.sibling(place).mkdir()
    files.sibling(paths.packages / "q").symlink_to("/")
    kept = [path for path in paths.base.rglob("*") if not files.is_leftover(path.name)]
    await bundles.sweep()

    assert sorted(paths.base.rglob("*")) == sorted(kept)


# --- activate ---------------------------------------------------------------------------------------------------------


async def test_activation_links_jobs_and_packages_to_their_bundles(paths: Paths, bundles: Bundles) -> None:
    web, db = jobs(paths, "web", "db")
    ruby, nginx = package(paths, "ruby"), package(paths, "nginx")
    await installed(bundles, web, db, ruby, nginx)
    await bundles.activate([web, db], [ruby, nginx])

    packages = {"nginx": bundles.path(nginx), "ruby": bundles.path(ruby)}
    assert in_use(paths.jobs) == {"db": bundles.path(db), "web": bundles.path(web)}
    assert in_use(paths.packages) == packages
    assert in_use(paths.jobs / "web" / "packages") == packages
    assert in_use(paths.jobs / "db" / "packages") == packages
    modes = {path: mode_of(path) for path in (paths.jobs, paths.packages, paths.jobs / "web" / "packages")}
    assert modes == {paths.jobs: 0o750, paths.packages: 0o755, paths.jobs / "web" / "packages": 0o755}
    before = {path: path.lstat().st_ino for path in paths.base.rglob("*") if path.is_symlink()}
    await bundles.activate([web, db], [ruby, nginx])
    assert {path: path.lstat().st_ino for path in before} == before


async def test_job_loses_links_to_removed_packages(paths: Paths, bundles: Bundles) -> None:
    [web] = jobs(paths, "web")
    ruby, nginx = package(paths, "ruby"), package(paths, "nginx")
    await installed(bundles, web, ruby, nginx)
    await bundles.activate([web], [ruby, nginx])
    links = paths.jobs / "web" / "packages"
    (links / "own").symlink_to("/elsewhere")
    (links / "file").touch()
    await bundles.activate([web], [ruby])

    assert in_use(links) == {"own": Path("/elsewhere"), "ruby": bundles.path(ruby)}
    assert (links / "file").is_file()


async def test_package_links_created_by_a_release_are_kept(paths: Paths, bundles: Bundles) -> None:
    """Some releases select one of several package versions with a link that the agent did not create."""
    paths.packages.mkdir()
    (paths.packages / "erlang").symlink_to("erlang-26")
    erlang = package(paths, "erlang-26")
    await installed(bundles, erlang)
    await bundles.activate([], [erlang])
    await bundles.activate([], [])

    assert in_use(paths.packages) == {"erlang": Path("erlang-26")}


async def test_directory_in_place_of_a_bundle_link_is_replaced_unless_the_bundle_is_missing(
    paths: Paths, bundles: Bundles
) -> None:
    """An image may contain a directory where the agent needs a link."""
    (paths.packages / "p" / "old").mkdir(parents=True)
    bundle = package(paths, "p")
    await installed(bundles, bundle)
    await bundles.activate([], [bundle])
    assert (paths.packages / "p" / "file").read_bytes() == b"p"

    with pytest.raises(ActionError, match="cannot use the package q: bundle must be installed"):
        await bundles.activate([], [package(paths, "q")])

    assert in_use(paths.packages) == {"p": bundles.path(bundle)}
    assert bundles.path(bundle).is_dir()


async def test_bundle_removal_does_not_follow_a_link_in_place_of_a_package_directory(
    paths: Paths, bundles: Bundles, tmp_path: Path
) -> None:
    others = [tmp_path / "others/version", files.sibling(tmp_path / "others/version")]
    for other in others:
        other.mkdir(parents=True)
    (paths.data_packages / "p").symlink_to(tmp_path / "others")
    await bundles.activate([], [])
    await bundles.sweep()

    assert all(other.is_dir() for other in others)


async def test_bundle_is_renamed_before_its_content_is_removed(
    paths: Paths, bundles: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the agent crashes during the removal, the remaining files must not look like an installed bundle."""
    bundle = package(paths, "p")
    await installed(bundles, bundle)
    looked_installed = []
    honest = files.remove_tree

    def spy(path: Path) -> None:
        looked_installed.append(bundles.path(bundle).exists())
        honest(path)

    monkeypatch.setattr(files, "remove_tree", spy)
    await bundles.activate([], [])

    assert looked_installed == [False]


# --- job directories --------------------------------------------------------------------------------------------------


async def test_job_directories_are_created_but_existing_ones_keep_their_modes(
    paths: Paths, bundles: Bundles, tmp_path: Path
) -> None:
    """If the agent followed a link in place of a directory, a job could make root change any file's mode."""
    (paths.log / "web").mkdir(parents=True, mode=0o700)
    (tmp_path / "victim").mkdir(mode=0o700)
    (paths.data / "led").symlink_to(tmp_path / "victim")
    (paths.data / "nowhere").symlink_to(tmp_path / "absent")
    await bundles.make_job_dirs(["web", "db", "led", "nowhere"])

    modes = {str(path.relative_to(paths.data)): mode_of(path) for path in paths.data.rglob("*/web")}
    assert modes == {"sys/log/web": 0o700, "sys/run/web": 0o770}
    assert mode_of(paths.data / "web") == 0o770
    assert mode_of(paths.data / "db") == 0o770
    assert mode_of(tmp_path / "victim") == 0o700
    assert not (tmp_path / "absent").exists()


# --- blobs ------------------------------------------------------------------------------------------------------------


@pytest.mark.attack("a request passes a path or an option as the name of a blob, a blobstore provider or an agent")
@pytest.mark.parametrize("blob_id", ["../x", "a/b", "", "tmp/.."])
async def test_blob_with_an_unsafe_name_is_rejected(paths: Paths, bundles: Bundles, blob_id: str) -> None:
    (paths.data / "x").touch()
    with pytest.raises(BlobError, match="it is not a plain name"):
        await bundles.keep_blob(blob_id, sha1(b"data"), b"data")
    with contextlib.suppress(BlobError):
        await bundles.delete_source(blob_id)

    assert (paths.data / "x").exists()


async def test_each_deletion_removes_one_copy_of_a_blob(paths: Paths, bundles: Bundles) -> None:
    """As in the Go agent, the first call deletes the copy that was received over the bus. Only the next call deletes
    the copy that create-env uploaded.
    """
    for directory in (paths.sensitive_blobs, paths.blobs):
        (directory / "id").touch()
    await bundles.delete_source("id")
    assert not (paths.sensitive_blobs / "id").exists()
    assert (paths.blobs / "id").exists()

    await bundles.delete_source("id")
    await bundles.delete_source("id")
    assert not (paths.blobs / "id").exists()


async def test_small_blob_is_read_and_oversized_blob_is_rejected(paths: Paths, bundles: Bundles) -> None:
    (paths.blobs / "id").write_bytes(b"data")
    assert await bundles.fetch_small(BlobRef("id", digest=sha1(b"data")), DUMMY) == b"data"
    assert list(paths.tmp.iterdir()) == []
    with pytest.raises(ActionError, match="Checking blob 'id'"):
        await bundles.fetch_small(BlobRef("id", digest="00"), DUMMY)

    (paths.blobs / "id").write_bytes(b"data")
    with (paths.blobs / "id").open("r+b") as file:
        file.truncate(MAX_SMALL_BYTES + 1)
    with pytest.raises(ActionError, match="cannot use the blob: it has 16777217 bytes"):
        await bundles.fetch_small(BlobRef("id", digest=sha1((paths.blobs / "id").read_bytes())), DUMMY)
    assert list(paths.tmp.iterdir()) == []


# --- disk errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "do",
    [
        lambda bundles, bundle: bundles.activate([], [bundle]),
        lambda bundles, bundle: bundles.create(bundle),
        lambda bundles, _: bundles.make_job_dirs(["web"]),
        lambda bundles, _: bundles.keep_blob("id", sha1(b""), b""),
    ],
)
async def test_disk_error_in_a_bundle_operation_is_reported_as_an_action_error(
    paths: Paths, bundles: Bundles, do: Callable[[Bundles, Bundle], asyncio.Future[None]]
) -> None:
    bundle = package(paths, "p")
    await installed(bundles, bundle)
    for path in (paths.packages, paths.data / "web"):
        path.touch()
    files.remove_tree(paths.sensitive_blobs)
    files.remove_tree(paths.data_sys)
    paths.data_sys.touch()
    with pytest.raises(ActionError, match="cannot "):
        await do(bundles, bundle)


@pytest.mark.attack("a worker gets an invalid request, sends an invalid response, or is killed")
async def test_worker_answer_with_the_wrong_number_of_outcomes_is_rejected(paths: Paths) -> None:
    async def work(request: protocol.Request, **_: object) -> Done:
        return Done(outcomes=[Outcome()] * 2)

    with pytest.raises(ValueError, match="zip"):
        await Bundles(paths, work).install([package(paths, "p")], DUMMY, 5)
