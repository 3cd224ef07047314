"""Tests how the agent waits for settings, rereads them, and stores updates."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from agent_shim.core import settings
from agent_shim.core.errors import SettingsError
from agent_shim.core.paths import Paths
from agent_shim.host import files as host_files
from agent_shim.host.files import MAX_FILE_BYTES
from agent_shim.services.settings_store import SettingsStore
from tests.support.waiting import until


class Files:
    """A settings file as a CPI writes it, and a store that checks this file every 10 ms."""

    def __init__(self, base: Path) -> None:
        self.paths = Paths(base)
        self.paths.bosh.mkdir(parents=True)
        self.source = base / "source.json"
        self.store = SettingsStore(self.paths, [self.source], look=0.01)

    def write(self, **members: Any) -> None:
        self.put(json.dumps({"agent_id": "a-1", "mbus": "nats://h:1", **members}))

    def put(self, text: str) -> None:
        """Replace the source file atomically so that it is never seen empty."""
        new = self.source.with_suffix(".new")
        new.write_text(text)
        new.rename(self.source)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.mark.parametrize(
    "before",
    [None, "", "{", '{"agent_id": 7}', '{"agent_id": "a-1"}', '{"agent_id":"a-1","mbus":"nats://h'],
    ids=["absent", "empty", "half", "wrong type", "no bus", "cut"],
)
async def test_agent_waits_until_the_settings_are_valid(
    files: Files, caplog: pytest.LogCaptureFixture, before: str | None
) -> None:
    if before is not None:
        files.source.write_text(before)
    waiting = asyncio.ensure_future(files.store.wait())
    await until(lambda: "waiting for it to change" in caplog.text)
    assert not waiting.done()

    files.write()

    async with asyncio.timeout(60):
        assert (await waiting).agent_id == "a-1"


@pytest.mark.attack("settings are malformed")
@pytest.mark.parametrize("kind", ["fifo", "device", "flood"])
async def test_fifos_devices_and_huge_files_are_rejected_as_settings(files: Files, kind: str) -> None:
    """A FIFO would block the start, and a device or a huge file would use unlimited memory."""
    if kind == "fifo":
        os.mkfifo(files.source)
    elif kind == "device":
        files.source.symlink_to("/dev/zero")
    else:
        files.write()
        os.truncate(files.source, MAX_FILE_BYTES + 1)

    with pytest.raises(SettingsError, match=r"it is not a regular file|it has more than \d+ bytes"):
        await files.store.refreshed()


async def test_each_settings_problem_is_logged_once(
    files: Files, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    read = host_files.read

    def counted(path: Path, **options: bool) -> bytes:
        nonlocal looks
        looks += path == files.source
        return read(path, **options)

    monkeypatch.setattr(host_files, "read", counted)
    waiting = asyncio.ensure_future(files.store.wait())
    async with asyncio.timeout(60):
        await until(lambda: looks >= 5)
        files.put("{")
        seen = looks
        await until(lambda: looks >= seen + 5)
        files.write()
        await waiting

    assert len([record for record in caplog.records if record.name == "agent_shim.services.settings_store"]) == 2


async def test_settings_member_with_the_wrong_type_is_ignored_and_logged_once(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    files.write(env={"http_proxy": 5, "bosh": {"run_dir": {"tmpfs": "yes"}}})

    for _ in range(3):
        assert (await files.store.refreshed()).source.env.http_proxy == ""

    told = [record.message for record in caplog.records if "ignoring a member" in record.message]
    assert [text.rpartition(".json: ")[2] for text in told] == [
        "http_proxy: Expected `str`, got `int`",
        "tmpfs: Expected `bool`, got `str`",
    ]


async def test_settings_copy_is_used_while_the_source_is_missing(files: Files) -> None:
    files.write(vm={"name": "vm-7"})
    await files.store.wait()
    files.source.unlink()

    again = SettingsStore(files.paths, [files.source])

    assert (await again.refreshed()).source.vm.name == "vm-7"
    assert files.paths.settings_cache.stat().st_mode & 0o777 == 0o600


@pytest.mark.attack("settings are malformed")
async def test_settings_copy_is_used_while_the_source_is_invalid(files: Files) -> None:
    files.write(vm={"name": "vm-7"})
    await files.store.wait()
    files.source.write_text("{")

    assert (await SettingsStore(files.paths, [files.source]).refreshed()).source.vm.name == "vm-7"


async def test_settings_error_names_the_first_existing_file(files: Files) -> None:
    files.source.write_text("{")

    with pytest.raises(SettingsError, match=r"cannot read settings from .*source\.json"):
        await files.store.refreshed()


async def test_settings_update_is_stored_and_read_back(files: Files) -> None:
    files.write()
    await files.store.wait()
    news = settings.UpdateSettings(mbus=settings.MbusSettings(cert=settings.Cert("ca", "c", "k")), trusted_certs="T")

    await files.store.save_update(files.store.merged(news).update)

    assert json.loads(files.paths.update_settings.read_bytes()) == {
        "blobstores": None,
        "disk_associations": [],
        "mbus": {"cert": {"ca": "ca", "certificate": "c", "private_key": "k"}, "urls": []},
        "trusted_certs": "T",
    }
    assert files.paths.update_settings.stat().st_mode & 0o777 == 0o600
    assert (await SettingsStore(files.paths, [files.source]).refreshed()).mbus.certificate == "c"


async def test_truncated_settings_update_file_does_not_replace_the_last_update(files: Files) -> None:
    files.write()
    await files.store.wait()
    await files.store.save_update(settings.UpdateSettings(trusted_certs="T"))
    files.paths.update_settings.write_text('{"trusted')

    assert (await files.store.refreshed()).update.trusted_certs == "T"


async def test_settings_watch_reports_changes_but_not_identical_rewrites(files: Files) -> None:
    files.write()
    await files.store.wait()
    found: list[settings.Effective] = []
    arrived = asyncio.Event()

    async def changed(news: settings.Effective) -> None:
        found.append(news)
        arrived.set()

    watching = asyncio.ensure_future(files.store.watch(changed))
    async with asyncio.timeout(60):
        await asyncio.sleep(0.03)
        files.write()
        await asyncio.sleep(0.05)
        files.source.write_text("{")
        await asyncio.sleep(0.05)
        files.write(mbus="nats://other:2")
        await arrived.wait()
    watching.cancel()

    assert [news.mbus.urls for news in found] == [("nats://other:2",)]


async def test_settings_change_is_reported_even_if_an_action_reads_it_first(files: Files) -> None:
    files.write()
    await files.store.wait()
    arrived = asyncio.Event()

    async def changed(_: settings.Effective) -> None:
        arrived.set()

    watching = asyncio.ensure_future(files.store.watch(changed))
    await asyncio.sleep(0.03)
    files.write(mbus="nats://other:2")
    await files.store.refreshed()

    async with asyncio.timeout(60):
        await arrived.wait()
    watching.cancel()


async def test_settings_reader_does_not_undo_a_concurrent_update(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write()
    await files.store.wait()
    read, is_stored, has_read = host_files.read, threading.Event(), threading.Event()
    files.paths.update_settings.write_text("{}")

    def slowly(path: Path, **options: bool) -> bytes:
        found = read(path, **options)
        if path == files.paths.update_settings:
            has_read.set()
            is_stored.wait(0.3)
        return found

    monkeypatch.setattr(host_files, "read", slowly)
    reading = asyncio.ensure_future(files.store.refreshed())
    await asyncio.to_thread(has_read.wait)
    await files.store.save_update(settings.UpdateSettings(trusted_certs="new"))
    is_stored.set()
    await reading

    assert files.store.current.update.trusted_certs == "new"
