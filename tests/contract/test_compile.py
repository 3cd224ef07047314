"""Tests the replies and effects of compile requests.

The codes ``a16`` and ``a17`` in test names are explained in tests/support/protocol_facts.py.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import re
import shutil
import stat
import subprocess
import tarfile
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from agent_shim.bulk.protocol import BlobRef
from agent_shim.demo.release import archive
from agent_shim.services.compiler import Package
from tests.contract.test_actions import store_of
from tests.support import jobs
from tests.support.http import BlobServer
from tests.support.programs import end_kept, is_alive, number_in
from tests.support.waiting import until
from tests.support.world import LocalAgent, is_running

pytestmark = pytest.mark.slow

INSTALL = "mkdir -p $BOSH_INSTALL_TARGET/bin; "
LINKS = "$(dirname $BOSH_INSTALL_TARGET)"
"""Shell expression for the directory with the links to enabled packages, ``/var/vcap/packages`` on a machine."""


def source(world: LocalAgent, packaging: str, **files: str) -> tuple[str, str]:
    """Store a package's source in the blobstore. Return the blob's id and digest."""
    blob = jobs.blob(store_of(world), archive({"packaging": packaging, **files}))
    return blob["blobstore_id"], blob["sha1"]


def dependency(world: LocalAgent, name: str, version: str = "1", **files: str) -> dict[str, str]:
    """Store a compiled package in the blobstore. Return its entry for the dependencies in a compile request."""
    content = archive(files or {"bin/tool": f"#!/bin/sh\necho {name} {version}\n"})
    return {"name": name, "version": version, **jobs.blob(store_of(world), content)}


def members(content: bytes) -> dict[str, bytes | None]:
    """Map the name of each entry in an archive to its content, or to None if the entry is not a file."""
    with tarfile.open(fileobj=io.BytesIO(content)) as packed:
        return {
            member.name: file.read() if (file := packed.extractfile(member)) else None for member in packed.getmembers()
        }


def printed(world: LocalAgent, stream: str = "stdout") -> str:
    return (world.paths.log / f"compilation/packaging.{stream}.log").read_text()


def leftovers(world: LocalAgent) -> list[Path]:
    """Return everything that compilations have left behind, except their logs and the parent directories of package
    versions.
    """
    paths = world.paths
    found = [path for place in (paths.packages, paths.compile) for path in place.glob("*")]
    return [*found, *paths.tmp.glob(".*"), *paths.data_packages.glob("*/*")]


async def compiled(world: LocalAgent, packaging: str, name: str = "p", **deps: dict[str, str]) -> bytes:
    """Compile a package and return the resulting archive."""
    return await compiled_from(world, *source(world, packaging), name, deps)


async def compiled_from(world: LocalAgent, blob_id: str, digest: str, name: str = "p", deps: Any = None) -> bytes:
    """Compile a package whose source is in a blob, and return the resulting archive."""
    value = await world.value("compile_package", blob_id, digest, name, "1.1", deps)
    content: bytes = (store_of(world) / value["result"]["blobstore_id"]).read_bytes()
    return content


# --- answers ----------------------------------------------------------------------------------------------------------


async def test_a16_compile_returns_id_and_sha1_of_a_new_blob(world: LocalAgent) -> None:
    arguments = source(world, INSTALL + "cp src $BOSH_INSTALL_TARGET/bin/", src="content")
    value = await world.value("compile_package", *arguments, "p", "1.1", {})

    result = value["result"]
    content = (store_of(world) / result["blobstore_id"]).read_bytes()
    assert set(value) == {"result"}
    assert set(result) == {"blobstore_id", "sha1"}
    assert str(uuid.UUID(result["blobstore_id"])) == result["blobstore_id"]
    assert hashlib.sha1(content).hexdigest() == result["sha1"]
    assert content.startswith(b"\x1f\x8b")
    assert members(content) == {".": None, "./bin": None, "./bin/src": b"content"}
    with tarfile.open(fileobj=io.BytesIO(content)) as packed:
        assert {(member.uid, member.gid, member.uname) for member in packed.getmembers()} == {(0, 0, "root")}


async def test_a16_packaging_script_gets_its_documented_environment(world: LocalAgent) -> None:
    await compiled(world, 'echo "$0|$PWD|$PATH|$TMPDIR|$(umask)"; env | grep ^BOSH_ | sort; ls; cat', "hello")

    paths = world.paths
    first, *variables, listed = printed(world).splitlines()
    script, directory, path, tmp, umask = first.split("|")
    assert (script, directory, tmp, umask) == ("packaging", str(paths.compile / "hello"), str(paths.tmp), "0022")
    assert path.split(":")[0] == str(paths.bosh_bin)
    assert variables == [
        f"BOSH_COMPILE_TARGET={paths.compile / 'hello'}",
        f"BOSH_INSTALL_TARGET={paths.packages / 'hello'}",
        "BOSH_PACKAGE_NAME=hello",
        "BOSH_PACKAGE_VERSION=1.1",
    ]
    assert listed == "packaging"


async def test_a16_compile_links_only_the_package_and_its_dependencies(world: LocalAgent) -> None:
    """If links from earlier compilations remained, a script could use them by mistake."""
    stray = world.paths.packages / "golang-1.19-linux"
    stray.mkdir()
    (stray / "compile.env").write_text("echo wrong")
    (world.paths.packages / "dangling").symlink_to("/nowhere")
    golang = dependency(world, "golang-1.20-linux", **{"bosh/compile.env": "echo right"})

    await compiled(
        world,
        f"ls {LINKS}; source {LINKS}/golang-*/bosh/compile.env; {LINKS}/libhello/bin/tool",
        "hello",
        **{"golang-1.20-linux": golang, "libhello": dependency(world, "libhello")},
    )

    assert printed(world) == "golang-1.20-linux\nhello\nlibhello\nright\nlibhello 1\n"
    assert leftovers(world) == []


async def test_a16_compilation_logs_contain_only_the_last_compilation(world: LocalAgent) -> None:
    log = world.paths.log / "compilation"
    log.mkdir()
    (log / "old").touch()
    await compiled(world, "echo first")
    await compiled(world, "echo second")

    assert printed(world) == "second\n"
    assert printed(world, "stderr") == "+ echo second\n"
    assert sorted(path.name for path in log.iterdir()) == ["packaging.stderr.log", "packaging.stdout.log"]
    assert stat.S_IMODE(log.stat().st_mode) == 0o750
    assert {stat.S_IMODE(path.stat().st_mode) for path in log.iterdir()} == {0o640}


async def test_a16_compile_accepts_null_dependencies_and_no_packaging_script(world: LocalAgent) -> None:
    blob = jobs.blob(store_of(world), archive({"file": "x"}))

    assert members(await compiled_from(world, blob["blobstore_id"], blob["sha1"])) == {".": None}


async def test_a16_uncompressed_source_gives_an_uncompressed_package(world: LocalAgent) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as packed:
        packed.addfile(tarfile.TarInfo("./file"))
    blob = jobs.blob(store_of(world), out.getvalue())

    assert (await compiled_from(world, blob["blobstore_id"], blob["sha1"])).startswith(b"./\0")


def compressed(data: bytes, program: str) -> bytes:
    return subprocess.run([program, "-c"], input=data, stdout=subprocess.PIPE, check=True).stdout


@pytest.mark.parametrize("program", ["bzip2", "xz", "zstd"])
async def test_a16_package_is_gzipped_if_its_source_uses_another_compression_format(
    world: LocalAgent, program: str
) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    bare = gzip.decompress(archive({"packaging": "cp file $BOSH_INSTALL_TARGET", "file": "x"}))
    blob = jobs.blob(store_of(world), await asyncio.to_thread(compressed, bare, program))

    assert members(await compiled_from(world, blob["blobstore_id"], blob["sha1"])) == {".": None, "./file": b"x"}


async def test_a17_compile_uses_signed_urls_and_headers_to_download_and_upload(
    world: LocalAgent, server: BlobServer
) -> None:
    tool, src = archive({"bin/tool": "x"}), archive({"packaging": f"{INSTALL} cp {LINKS}/pcre/bin/tool src"})
    server.blobs = {"/pcre": tool, "/src": src}
    request = {
        "package_get_signed_url": f"{server.url}/src?sig=1",
        "upload_signed_url": f"{server.url}/result?sig=2",
        "digest": f"sha256:{hashlib.sha256(src).hexdigest()}",
        "name": "nginx",
        "version": "1.2",
        "blobstore_headers": {"x-ms-blob-type": "blockblob"},
        "deps": {
            "pcre": {
                "name": "pcre",
                "version": "8.1",
                "sha1": hashlib.sha1(tool).hexdigest(),
                "blobstore_id": "not asked for",
                "package_get_signed_url": f"{server.url}/pcre?sig=3",
                "blobstore_headers": {"x-own": "1"},
            },
            "local": dependency(world, "local"),
        },
    }
    value = await world.value("compile_package_with_signed_url", request)

    result = server.blobs["/result"]
    digests = f"{hashlib.sha1(result).hexdigest()};sha512:{hashlib.sha512(result).hexdigest()}"
    assert value == {"result": {"sha1": digests}}
    got = {each.target: {"x-ms-blob-type", "x-own"} & set(each.headers) for each in server.requests}
    assert got == {
        "/pcre?sig=3": {"x-own"},
        "/src?sig=1": {"x-ms-blob-type"},
        "/result?sig=2": {"x-ms-blob-type"},
    }
    assert members(result)["./bin"] is None
    assert leftovers(world) == []


# --- failures ---------------------------------------------------------------------------------------------------------


async def failed(world: LocalAgent, *arguments: Any) -> str:
    """Compile the package ``p``, and check that this fails. Return the error without its constant prefix."""
    text = await world.error("compile_package", *arguments)
    found = re.fullmatch(r"Action Failed get_task: Task \S+ result: Compiling package p: (.*)", text, re.DOTALL)
    assert found is not None, text
    return found[1]


async def test_a16_failed_packaging_script_is_reported_with_its_output(world: LocalAgent) -> None:
    packaging = INSTALL + "set +x; echo out; echo err >&2; exit 7"
    tool = dependency(world, "tool")
    text = await failed(world, *source(world, packaging), "p", "1", {"tool": tool})

    assert text == (
        "Running packaging script: Running packaging script: Command exited with 7; Stdout: out\n, "
        f"Stderr: + mkdir -p {world.paths.packages}/p/bin\n+ set +x\nerr\n"
    )
    assert leftovers(world) == []


async def test_a16_long_packaging_output_is_truncated_at_a_line_boundary(world: LocalAgent) -> None:
    packaging = "set +x; seq 100000; head -c 20000 /dev/zero | tr '\\0' é >&2; kill -9 $$"
    text = await failed(world, *source(world, packaging), "p", "1", {})

    head, out, err = re.split(r"; Truncated stdout: |, Truncated stderr: ", text)
    assert head.endswith("Command exited with 137")
    assert out.split() == [str(number) for number in range(98295, 100001)]
    assert len(out) <= 10 * 1024 < len(out) + len("98294\n")
    assert set(err[1:]) <= set("Ã©é\n")
    assert len(printed(world)) > 500_000


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"blob_id": ""}, "Fetching package p: No blobstore reference for package 'p'"),
        ({"blob_id": "gone"}, "Fetching package p: Getting blob from inner blobstore: "),
        ({"digest": "0" * 40}, "Fetching package p: Getting blob from inner blobstore: Checking downloaded blob "),
        ({"name": "../p"}, None),
        ({"version": ""}, "cannot install the package p: it has no version"),
    ],
)
async def test_a16_compile_reports_missing_blobs_wrong_digests_and_invalid_names_or_versions(
    world: LocalAgent, change: dict[str, str], text: str | None
) -> None:
    blob_id, digest = source(world, "")
    given = {"blob_id": blob_id, "digest": digest, "name": "p", "version": "1"} | change
    error = await world.error("compile_package", *given.values(), {})

    expected = f"Compiling package p: {text}" if text else "Compiling package ../p: cannot use '../p' as the name"
    assert f"result: {expected}" in error
    assert leftovers(world) == []


async def test_a16_compile_error_names_an_unavailable_dependency(world: LocalAgent) -> None:
    deps = {"good": dependency(world, "good"), "bad": {**dependency(world, "bad"), "blobstore_id": "gone"}}
    text = await failed(world, *source(world, ""), "p", "1", deps)

    assert text.startswith("Installing dependent package: 'bad': Fetching package blob: ")
    assert leftovers(world) == []


async def test_a16_compile_reports_a_result_that_cannot_be_stored(world: LocalAgent) -> None:
    store = store_of(world)
    packaging = f"rm -rf {store}; touch {store}"
    text = await failed(world, *source(world, packaging), "p", "1", {})

    assert text.startswith("Uploading compiled package: ")
    assert leftovers(world) == []


@pytest.mark.attack("a reader finds arguments, values or signed URLs in an audit record or an error")
async def test_compile_does_not_leak_signed_urls_to_logs_or_repr(
    world: LocalAgent, server: BlobServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    request: dict[str, Any] = {
        "package_get_signed_url": f"{server.url}/gone?sig=s3cr3t",
        "upload_signed_url": f"{server.url}/result?sig=s3cr3t",
        "blobstore_headers": {"x-key": "s3cr3t"},
        "digest": "0" * 40,
        "name": "p",
        "version": "1",
    }
    server.plan = ["404"] * 3
    reply = await world.call("compile_package_with_signed_url", request)
    task = world.agent.tasks.find(reply["value"]["agent_task_id"])
    world.agent.tasks.cancel(task.id)
    await task.ended.wait()
    url, headers = request["upload_signed_url"], request["blobstore_headers"]
    package = Package("p", "1", BlobRef("", url, headers), url, headers)

    assert not any("s3cr3t" in said for said in (caplog.text, repr(task), repr(package)))


async def test_compilation_keeps_packages_that_deployed_jobs_use(world: LocalAgent) -> None:
    wanted = jobs.spec(store_of(world), {"web": {"monit": ""}}, {"tool": {"bin/tool": "x"}})
    assert await world.value("apply", wanted) == "applied"
    paths = world.paths
    of_jobs = {path: path.lstat().st_mtime_ns for path in (paths.packages / "tool", paths.packages / "bpm/bin/bpm")}
    installed = (paths.packages / "tool").readlink()
    shared = {key: wanted["packages"]["tool"][key] for key in ("name", "version", "sha1", "blobstore_id")}

    packing = f"ls {LINKS}; cat {LINKS}/tool/bin/tool; mkdir -p $BOSH_INSTALL_TARGET; touch $BOSH_INSTALL_TARGET/done"
    content = await compiled(world, packing, tool=shared, other=dependency(world, "other"))

    assert "./done" in members(content)
    assert printed(world).split() == ["bpm", "other", "p", "tool", "x"]
    assert sorted(path.name for path in paths.packages.iterdir()) == ["bpm", "tool"]
    assert {path: path.lstat().st_mtime_ns for path in of_jobs} == of_jobs
    assert (installed / "bin/tool").read_text() == "x"
    assert (paths.jobs / "web/packages/tool").readlink() == installed


@pytest.mark.parametrize("clashing", ["dependency", "package"])
async def test_compilation_refuses_to_replace_a_package_that_jobs_use(world: LocalAgent, clashing: str) -> None:
    wanted = jobs.spec(store_of(world), {"web": {"monit": ""}}, {"tool": {"bin/tool": "x"}})
    assert await world.value("apply", wanted) == "applied"
    before = (world.paths.packages / "tool").readlink()
    needed = {"tool": dependency(world, "tool", "2")} if clashing == "dependency" else {}

    text = await world.error("compile_package", *source(world, ""), "p" if needed else "tool", "2", needed)

    assert text.endswith(
        ": cannot compile here: jobs of this instance use another version of package tool "
        "(compile it on an instance without jobs)"
    )
    assert (world.paths.packages / "tool").readlink() == before
    assert (world.paths.packages / "tool/bin/tool").is_file()


async def test_compilation_works_after_applying_a_spec_without_jobs(world: LocalAgent) -> None:
    """A compilation VM gets a spec without a configuration hash. With create-env, the first spec has a hash but no
    jobs.
    """
    await world.value(
        "apply", {"deployment": "d", "job": {"name": "compilation-1"}, "index": 0, "id": "i", "packages": {}}
    )
    await compiled(world, "")
    nothing = {"blobstore_id": "", "sha1": ""}
    bare = {
        "configuration_hash": "unused-configuration-hash",
        "job": {"name": ""},
        "rendered_templates_archive": nothing,
    }
    await world.value("apply", bare)

    assert members(await compiled(world, "touch $BOSH_INSTALL_TARGET/x")) == {".": None, "./x": b""}


# --- running programs -------------------------------------------------------------------------------------------------


async def begun(world: LocalAgent, packaging: str) -> tuple[str, int]:
    """Start a compilation whose script waits. Return its task id and the pid of a process that the script started."""
    started = world.paths.base / "started"
    reply = await world.call("compile_package", *source(world, packaging.format(started)), "p", "1", {})
    assert is_running(reply)
    return reply["value"]["agent_task_id"], await until(lambda: number_in(started))


async def test_compilation_progress_is_reported(world: LocalAgent) -> None:
    task_id, _ = await begun(world, "sleep 600 & echo $! >{}; wait")
    task = world.agent.tasks.running

    assert task is not None
    assert task.id == task_id
    assert task.progress == "p: running the packaging script"
    assert 0 < task.begun_at < time.monotonic()
    await world.value("cancel_task", task_id)
    await task.ended.wait()


@pytest.mark.parametrize(
    "packaging",
    [
        "sleep 600 & echo $! >{}; wait",
        "trap '' TERM; sleep 600 & echo $! >{}; wait; sleep 600",
        "setsid sleep 600 & echo $! >{}; wait",
        "env -i sleep 600 & echo $! >{}; wait",
        "(setsid -f sh -c 'echo $$ >{}; exec sleep 600'); sleep 600",
    ],
)
async def test_cancelled_compilation_leaves_no_processes_or_files(world: LocalAgent, packaging: str) -> None:
    task_id, child = await begun(world, packaging)
    try:
        assert await world.value("cancel_task", task_id) == "canceled"
        text = await world.error("get_task", task_id)

        assert text.endswith(f"Task {task_id} result: Compiling package p: cancelled")
        assert not is_alive(child)
        assert leftovers(world) == []
    finally:
        end_kept(world.paths)


async def test_processes_left_by_a_packaging_script_are_killed_when_it_exits(world: LocalAgent) -> None:
    """A process that survived could write into the package directory while it is being packed."""
    started = world.paths.base / "started"
    await compiled(world, f"sleep 600 & setsid sleep 600 & echo $! >{started}; sleep 600 & echo $! >>{started}")

    pids = [int(line) for line in started.read_text().splitlines()]
    assert [is_alive(pid) for pid in pids] == [False, False]


# --- reproducible results ---------------------------------------------------------------------------------------------


async def test_compiled_files_older_than_the_source_keep_their_modification_time(world: LocalAgent) -> None:
    """All other files get the source's time, so that compiling again gives the same archive."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as packed:
        for name, text, when in (
            (
                "packaging",
                "cp -a old $BOSH_INSTALL_TARGET/; touch $BOSH_INSTALL_TARGET/new; echo $SOURCE_DATE_EPOCH",
                9e8,
            ),
            ("old", "", 5e8),
            ("young", "", 1.5e9),
            ("future", "", 7e9),
        ):
            member = tarfile.TarInfo(f"./{name}")
            member.size, member.mtime = len(text), int(when)
            packed.addfile(member, io.BytesIO(text.encode()))
    blob = jobs.blob(store_of(world), out.getvalue())
    content = await compiled_from(world, blob["blobstore_id"], blob["sha1"])

    with tarfile.open(fileobj=io.BytesIO(content)) as packed:
        times = {member.name: member.mtime for member in packed.getmembers()}
    assert times == {".": 1.5e9, "./new": 1.5e9, "./old": 5e8}
    assert printed(world) == "1500000000\n"
