"""Tests the replies and effects of the actions in a deploy.

Codes such as ``a13`` in test names are explained in tests/support/protocol_facts.py.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agent_shim.host import command
from agent_shim.services.trusted_cas import TrustedCas
from agent_shim.supervisor import plan, supervisor
from agent_shim.supervisor.monit import parser
from agent_shim.supervisor.monit.ast import JobFile
from tests.support import jobs
from tests.support.waiting import TIMEOUT_S, until
from tests.support.world import LocalAgent
from tests.support.world import world as new_world


def store_of(world: LocalAgent) -> Path:
    return Path(world.agent.settings.current.blobstore.options["blobstore_path"])


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def deployed(world: LocalAgent, *names: str, **files: dict[str, str]) -> dict[str, Any]:
    """Apply a spec with a sleeping job for each of ``names`` and ``files``, and return the spec.

    ``files`` adds files to a job or replaces some of its files.
    """
    wanted = jobs.spec(
        store_of(world),
        {name: jobs.sleeper(world.paths, name) | files.get(name, {}) for name in dict.fromkeys((*names, *files))},
        {"tool": {"bin/tool": "#!/bin/sh\n"}, "other": {"lib/x": "x"}},
    )
    assert await world.value("apply", wanted) == "applied"
    return wanted


async def running(world: LocalAgent) -> dict[str, Any]:
    async with asyncio.timeout(TIMEOUT_S):
        while (state := await world.value("get_state"))["job_state"] != "running":
            await asyncio.sleep(0.01)
    return state  # type: ignore[no-any-return]


async def test_a1_ping_is_answered_with_pong(world: LocalAgent) -> None:
    assert await world.call("ping") == {"value": "pong"}


async def test_a2_info_returns_the_api_version(world: LocalAgent) -> None:
    assert await world.call("info") == {"value": {"api_version": 1}}


async def test_a7_update_settings_without_bus_or_blobstores_does_not_reconnect(world: LocalAgent) -> None:
    assert await world.value("update_settings", {"trusted_certs": "", "disk_associations": []}) == "ok"
    assert world.asked == []
    assert json.loads(world.paths.update_settings.read_bytes())["mbus"]["urls"] == []


async def test_a7_new_bus_credentials_are_stored_and_cause_one_reconnect(world: LocalAgent) -> None:
    news = {"mbus": {"cert": {"ca": "ca", "certificate": "cert", "private_key": "key"}}}

    assert await world.value("update_settings", news) == "ok"
    assert world.asked == ["reconnect"]
    assert await world.value("update_settings", news) == "ok"
    assert world.asked == ["reconnect"]
    assert world.agent.settings.current.mbus.certificate == "cert"


async def test_a7_rejected_bus_credentials_are_not_stored(world: LocalAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[str] = []
    monkeypatch.setattr(TrustedCas, "install", lambda _, bundle: installed.append(bundle))
    before = world.agent.settings.current
    news = {"mbus": {"cert": {"ca": "ca", "certificate": "refused", "private_key": "key"}}, "trusted_certs": "x"}

    assert "cannot use the new bus credentials" in await world.error("update_settings", news)
    assert world.agent.settings.current == before
    assert not world.paths.update_settings.exists()
    assert installed == []


async def test_a8_shutdown_is_answered_with_an_empty_string(world: LocalAgent) -> None:
    assert await world.call("shutdown") == {"value": ""}
    assert world.asked == ["shut_down"]


async def test_a9_prepare_installs_jobs_and_packages_without_enabling_them_and_is_idempotent(world: LocalAgent) -> None:
    wanted = jobs.spec(store_of(world), {"web": jobs.sleeper(world.paths, "web")}, {"tool": {"bin/tool": "x"}})

    assert await world.value("prepare", wanted) == "prepared"

    digest = wanted["packages"]["tool"]["sha1"]
    name = hashlib.sha1(f"1-{digest}".encode()).hexdigest()
    assert (world.paths.data_packages / "tool" / name / "bin/tool").read_text() == "x"
    for links in (world.paths.jobs, world.paths.packages):
        assert [path.name for path in links.iterdir()] == ["bpm"]  # bpm is always installed
    assert not world.paths.spec.exists()
    assert await world.value("prepare", wanted) == "prepared"


async def test_a9_prepare_without_jobs_installs_packages_only(world: LocalAgent) -> None:
    wanted = jobs.spec(store_of(world), {}, {"tool": {"bin/tool": "x"}}, job={}, rendered_templates_archive=None)

    assert await world.value("prepare", wanted) == "prepared"
    assert [path.name for path in world.paths.data_packages.iterdir()] == ["tool"]


async def test_a9_uploaded_templates_are_deleted_by_prepare_and_can_be_resent(world: LocalAgent) -> None:
    wanted = jobs.spec(store_of(world), {"web": jobs.sleeper(world.paths, "web")})
    content = (store_of(world) / wanted["rendered_templates_archive"]["blobstore_id"]).read_bytes()
    for blob_id in ("upload-1", "upload-2"):
        upload = {
            "blob_id": blob_id,
            "checksum": hashlib.sha1(content).hexdigest(),
            "payload": base64.encodebytes(content).decode(),
        }
        assert await world.value("upload_blob", upload) == blob_id
        wanted["rendered_templates_archive"]["blobstore_id"] = blob_id
        assert await world.value("prepare" if blob_id == "upload-1" else "apply", wanted) in ("prepared", "applied")
        assert not (world.paths.sensitive_blobs / blob_id).exists()


async def test_a10_apply_without_a_configuration_hash_only_stores_the_spec(world: LocalAgent) -> None:
    await deployed(world, "web")
    partial = {
        "deployment": "dep",
        "job": {"name": "group", "template": "web", "version": "1", "templates": [{"name": "web", "version": "1"}]},
        "index": 3,
        "id": "instance-id",
        "networks": jobs.NETWORKS,
    }

    assert await world.value("apply", partial) == "applied"

    state = await world.value("get_state")
    assert (state["packages"], state["configuration_hash"], state["index"]) == ({}, "", 3)
    assert (world.paths.jobs / "web").is_symlink()
    texts = {name: (world.paths.instance / name).read_text() for name in ("id", "az", "name", "deployment")}
    assert texts == {"id": "instance-id", "az": "", "name": "", "deployment": "dep"}


async def test_a10_apply_installs_new_jobs_and_packages_and_removes_old_ones(world: LocalAgent) -> None:
    await deployed(world, "web", "worker")
    gone = (world.paths.jobs / "worker").resolve()

    await world.value(
        "apply",
        jobs.spec(
            store_of(world), {"web": jobs.sleeper(world.paths, "web")}, {"tool": {"bin/tool": "new"}}, version="2"
        ),
    )

    assert {path.name for path in world.paths.jobs.iterdir()} == {"web", "bpm"}  # bpm is always installed
    assert {path.name for path in world.paths.packages.iterdir()} - {"bpm"} == {"tool"}
    assert (world.paths.packages / "tool/bin/tool").read_text() == "new"
    assert (world.paths.jobs / "web/packages/tool").resolve() == (world.paths.packages / "tool").resolve()
    assert [path.name for path in (world.paths.jobs / "web/packages").iterdir()] == ["tool"]
    assert not gone.exists()
    for directory in (world.paths.log / "web", world.paths.run / "web", world.paths.data / "web"):
        assert mode_of(directory) == 0o770
    assert mode_of(world.paths.jobs / "web/bin/ctl") == 0o750
    assert mode_of(world.paths.jobs / "web/monit") == 0o640
    assert mode_of(world.paths.spec) == 0o600
    assert list(world.paths.monit_job.parent.glob("job/*")) == []


async def test_a10_apply_with_an_unknown_network_does_not_store_the_spec(world: LocalAgent) -> None:
    text = await world.error("apply", {"networks": {"other": {"type": "manual"}}, "id": "x"})

    assert text.endswith("result: Resolving dynamic networks: Network 'other' is not found in settings")
    assert not world.paths.spec.exists()


async def test_a10_create_env_loopback_network_needs_no_settings(world: LocalAgent) -> None:
    assert await world.value("apply", {"networks": {"local": {"ip": "127.0.0.1"}}}) == "applied"


async def test_a10_failed_apply_changes_nothing(world: LocalAgent) -> None:
    await deployed(world, "web")
    await world.value("start")
    before = await running(world)
    broken = jobs.spec(store_of(world), {"web": jobs.sleeper(world.paths, "web")}, {"tool": {"x": "y"}}, version="2")
    broken["packages"]["tool"]["sha1"] = "0" * 40

    text = await world.error("apply", broken)

    assert "Applying: " in text
    assert "tool" in text
    after = await world.value("get_state")
    assert after["configuration_hash"] == before["configuration_hash"]
    assert [process["name"] for process in after["processes"]] == ["web"]
    assert list(world.paths.data_packages.glob("*/.*")) == []


async def test_a10_apply_rejects_a_package_without_a_version(world: LocalAgent) -> None:
    wanted = jobs.spec(store_of(world), {}, {"tool": {"x": "y"}})
    wanted["packages"]["tool"]["version"] = ""

    assert "cannot install the package tool: it has no version" in await world.error("apply", wanted)


async def test_a11_start_is_answered_before_processes_run(world: LocalAgent) -> None:
    gate, pidfile = world.paths.base / "gate", world.paths.run / "web/web.pid"
    slow = jobs.sleeper(world.paths, "web")
    slow["bin/ctl"] = slow["bin/ctl"].replace("start)", f"start) while [ ! -e {gate} ]; do sleep 0.02; done;")
    await deployed(world, web=slow)

    assert await world.call("start") == {"value": "started"}
    assert not pidfile.exists()
    assert (await world.value("get_state"))["job_state"] == "starting"
    gate.touch()
    await running(world)
    assert pidfile.exists()


async def test_a11_start_writes_monit_files_in_reverse_order_and_removes_the_stopped_marker(world: LocalAgent) -> None:
    await deployed(world, "first", "second")
    await world.value("stop")
    assert (await world.value("get_state"))["job_state"] == "stopped"

    assert await world.call("start") == {"value": "started"}

    assert sorted(path.name for path in world.paths.monit_job.iterdir()) == [
        "0000_second.monitrc",
        "0001_first.monitrc",
    ]
    assert not world.paths.stopped_marker.exists()
    assert [process["name"] for process in (await running(world))["processes"]] == ["first", "second"]
    assert json.loads(world.paths.health.read_bytes())["state"] in ("starting", "running", "failing")


async def test_a11_start_updates_the_backup_before_its_reply(world: LocalAgent) -> None:
    """If the backup still contained the stopped marker and the container exited right after the reply, the agent in the
    next container would not start the jobs.
    """
    spec, stopped = (world.paths.mirror / path.name for path in (world.paths.spec, world.paths.stopped_marker))
    await deployed(world, "web")
    await world.value("stop")
    await world.agent.state_backup.update()
    assert stopped.exists()

    await world.value("start")

    assert not stopped.exists()
    assert spec.read_bytes() == world.paths.spec.read_bytes()


async def test_a10_apply_is_saved_before_its_reply(world: LocalAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without saved state, the agent in a new container would start the jobs even though they had never been
    started.
    """
    monkeypatch.setattr(supervisor, "SAVE_DELAY_S", 60.0)

    await deployed(world, "web")

    assert supervisor.read_saved(world.paths.supervisor_state) is not None


async def test_a10_apply_forgets_processes_from_the_previous_spec(world: LocalAgent) -> None:
    await deployed(world, "web")
    await world.value("start")
    await running(world)
    await world.value("stop")

    await deployed(world, "other")
    assert "processes" not in await world.value("get_state", "full")
    await world.value("start")

    assert [process["name"] for process in (await running(world))["processes"]] == ["other"]


async def test_a11_monit_files_are_parsed_in_a_thread_and_an_oversized_one_fails_only_its_job(
    world: LocalAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Monit files are parsed in a thread, because parsing a megabyte would block the event loop for seconds."""
    threads = set()

    def planned(files: Sequence[JobFile], **options: Any) -> tuple[plan.ProcessSpec, ...]:
        threads.add(threading.current_thread())
        return plan_of(files, **options)

    plan_of = plan.plan
    monkeypatch.setattr(plan, "plan", planned)
    await deployed(
        world,
        web=jobs.sleeper(world.paths, "web"),
        large={"monit": "#".ljust(parser.MAX_BYTES) + "\n"},
    )

    assert await world.call("start") == {"value": "started"}

    reasons = {service.process.name: service.reason for service in world.agent.supervisor.services()}
    assert reasons["large"] == "cannot read large/monit: it has more than 256 KiB"
    assert reasons["web"] == ""
    assert threads
    assert threading.current_thread() not in threads


async def test_a12_stop_terminates_all_processes_and_writes_stopped_marker_and_health_state(world: LocalAgent) -> None:
    """The health state must be written before the reply. Otherwise, bosh-dns would resolve names to the instance until
    the next heartbeat.
    """
    await deployed(world, "web")
    await world.value("start")
    await running(world)
    pid = int((world.paths.run / "web/web.pid").read_text())

    assert await world.value("stop") == "stopped"

    assert not Path(f"/proc/{pid}").exists()
    assert world.paths.stopped_marker.read_bytes() == b""
    assert json.loads(world.paths.health.read_bytes()) == {"state": "stopped"}
    state = await world.value("get_state")
    assert state["job_state"] == "stopped"
    assert [process["state"] for process in state["processes"]] == ["unknown"]


async def test_a12_stop_with_an_older_protocol_returns_immediately(world: LocalAgent) -> None:
    """Callers with an older protocol, such as the bosh CLI in create-env, get the reply before the jobs have
    stopped.
    """
    gate = world.paths.base / "gate"
    slow = jobs.sleeper(world.paths, "web")
    slow["bin/ctl"] = slow["bin/ctl"].replace("stop)", f"stop) while [ ! -e {gate} ]; do sleep 0.02; done;")
    await deployed(world, web=slow)
    await world.value("start")
    await running(world)
    pid = int((world.paths.run / "web/web.pid").read_text())

    assert await world.value("stop", protocol=2) == "stopped"
    assert Path(f"/proc/{pid}").exists()
    assert (await world.value("get_state"))["job_state"] == "stopped"

    waiting = asyncio.create_task(world.value("stop", protocol=3))
    await world.value("ping")
    assert not waiting.done()
    gate.touch()
    assert await waiting == "stopped"
    assert not Path(f"/proc/{pid}").exists()


async def test_a12_stop_without_jobs_succeeds(world: LocalAgent) -> None:
    assert await world.value("stop") == "stopped"
    assert await world.value("stop", protocol=0) == "stopped"


async def test_a13_drain_announces_shutdowns_and_rejects_invalid_requests(world: LocalAgent) -> None:
    assert await world.value("drain", "shutdown") == 0
    assert world.asked == ["announce_shutdown"]
    assert await world.value("drain", "shutdown", {}) == 0
    assert await world.value("drain", "update", {}) == 0
    assert world.asked == ["announce_shutdown"] * 2
    assert (await world.error("drain", "update")).endswith("result: Drain update requires new spec")
    assert (await world.error("drain", "status")).endswith("result: Unexpected call with drain type 'status'")
    assert "explode" in await world.error("drain", "explode", {})


async def test_a13_drain_scripts_get_arguments_and_environment_and_may_request_more_time(world: LocalAgent) -> None:
    trace = world.paths.base / "trace"
    drain = f"""#!/bin/sh
echo "$@ | $BOSH_JOB_STATE | $BOSH_JOB_NEXT_STATE | $PATH $(pwd) $(nice)" >> {trace}
[ "$1" = job_check_status ] && echo 0 || echo -0
exit 7
"""
    dynamic = drain.replace("echo -0", "echo -1")
    wanted = await deployed(world, web={"bin/drain": dynamic})
    wanted["configuration_hash"] = "hash-2"
    wanted["packages"]["tool"]["sha1"] = "f" * 40
    wanted["persistent_disk"] = 10

    assert await world.value("drain", "update", wanted) == 0

    path = f"/usr/sbin:/usr/bin:/sbin:/bin {world.paths.empty} {os.nice(0)}"
    assert trace.read_text().splitlines() == [
        f'job_changed hash_changed tool | {{"persistent_disk":0}} | {{"persistent_disk":10}} | {path}',
        f'job_check_status hash_unchanged | {{"persistent_disk":0}} |  | {path}',
    ]


async def test_a13_drain_leaves_processes_running_but_unmonitored(world: LocalAgent) -> None:
    await deployed(world, "web")
    await world.value("start")
    await running(world)
    pid = int((world.paths.run / "web/web.pid").read_text())

    await world.value("drain", "shutdown")

    state = await world.value("get_state")
    assert (state["job_state"], state["processes"][0]["state"]) == ("failing", "unknown")
    assert Path(f"/proc/{pid}").exists()


async def test_a13_drain_error_names_the_failed_jobs(world: LocalAgent) -> None:
    await deployed(world, good={"bin/drain": "#!/bin/sh\necho 0\n"}, bad={"bin/drain": "#!/bin/sh\necho hello\n"})

    text = await world.error("drain", "shutdown")

    assert text.endswith("1 of 2 drain scripts failed. Failed Jobs: bad. Successful Jobs: good.")


async def test_a14_scripts_get_their_environment_and_append_to_the_job_logs(world: LocalAgent) -> None:
    script = '#!/bin/sh\necho "$0 $# $NAME $PATH $TMPDIR"\necho err >&2\n'
    await deployed(world, web={"bin/pre-start": script}, worker={})

    for _ in range(2):
        assert await world.value("run_script", "pre-start", {"env": {"NAME": "value"}}) == {}

    logs = world.paths.log / "web"
    line = f"{world.paths.jobs}/web/bin/pre-start 0 value /usr/sbin:/usr/bin:/sbin:/bin {world.paths.tmp}\n"
    assert (logs / "pre-start.stdout.log").read_text() == 2 * line
    assert (logs / "pre-start.stderr.log").read_text() == "err\nerr\n"
    assert mode_of(logs / "pre-start.stdout.log") == 0o640
    assert not (world.paths.log / "worker/pre-start.stdout.log").exists()


async def test_a14_scripts_inherit_all_variables_except_those_meant_for_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    monkeypatch.setenv("AGENT_SHIM_GRACE", "7")
    monkeypatch.setenv("INHERITED", "yes")
    async with new_world(tmp_path) as world:
        await deployed(world, web={"bin/pre-start": "#!/bin/sh\nenv\n"})
        assert await world.value("run_script", "pre-start", {}) == {}
        seen = (world.paths.log / "web/pre-start.stdout.log").read_text().splitlines()

    assert "INHERITED=yes" in seen
    assert [line for line in seen if line.startswith(("AGENT_SHIM_", "MALLOC_"))] == []


async def test_a14_job_scripts_run_in_parallel(world: LocalAgent) -> None:
    meet = "#!/bin/sh\ntouch {here}\nwhile [ ! -e {there} ]; do sleep 0.01; done\n"
    here, there = world.paths.base / "here", world.paths.base / "there"
    await deployed(
        world,
        a={"bin/pre-start": meet.format(here=here, there=there)},
        b={"bin/pre-start": meet.format(here=there, there=here)},
    )

    assert await world.value("run_script", "pre-start", {}) == {}


async def test_a14_error_names_the_failed_scripts(world: LocalAgent) -> None:
    await deployed(world, good={"bin/post-start": "#!/bin/sh\n"}, bad={"bin/post-start": "#!/bin/sh\nexit 3\n"})

    text = await world.error("run_script", "post-start", {})

    assert text.endswith("1 of 2 post-start scripts failed. Failed Jobs: bad. Successful Jobs: good.")


async def test_a15_errand_runs_the_first_or_the_named_job(world: LocalAgent) -> None:
    run = "#!/bin/sh\necho out; echo err >&2; exit 3\n"
    await deployed(world, smoke={"bin/run": run}, web={"bin/run": "#!/bin/sh\n"})

    assert await world.value("run_errand") == {"stdout": "out\n", "stderr": "err\n", "exit_code": 3}
    assert await world.value("run_errand", "web") == {"stdout": "", "stderr": "", "exit_code": 0}
    assert (await world.error("run_errand", "nope")).endswith("result: Could not find errand nope")


async def test_a15_errand_fails_without_jobs(world: LocalAgent) -> None:
    assert (await world.error("run_errand")).endswith("At least one job template is required to run an errand")
    assert (await world.error("run_errand", "")).endswith(" result: Could not find errand ")


async def test_a15_errand_without_a_name_fails_if_the_spec_has_no_job_template_field(world: LocalAgent) -> None:
    """The bosh CLI sends such a spec in create-env."""
    await world.value("apply", {"job": {"templates": [{"name": "web", "version": "1"}]}})

    assert (await world.error("run_errand")).endswith("At least one job template is required to run an errand")


async def test_a15_errand_that_cannot_start_is_reported_and_leaves_no_file(world: LocalAgent) -> None:
    await deployed(world, "web")

    path = world.paths.jobs / "web/bin/run"
    error = await world.error("run_errand", "web")
    assert error.endswith(f"Running errand script: cannot run {path}: No such file or directory")
    assert not list(world.paths.tmp.glob("errand-*"))


async def test_a15_large_errand_output_is_truncated_to_fit_a_reply(world: LocalAgent) -> None:
    run = "#!/bin/sh\nhead -c 3000000 /dev/zero | tr '\\0' '\"'\necho; echo the end\n"
    await deployed(world, smoke={"bin/run": run})

    result = await world.value("run_errand")

    assert result["exit_code"] == 0
    assert result["stdout"].startswith('""""')
    assert result["stdout"].endswith("the end\n")


async def test_a18_upload_accepts_multiline_base64_and_rejects_corrupted_payloads(world: LocalAgent) -> None:
    content = os.urandom(200)
    upload = {
        "blob_id": "b-1",
        "checksum": hashlib.sha1(content).hexdigest(),
        "payload": base64.encodebytes(content).decode(),
    }

    assert await world.value("upload_blob", upload) == "b-1"
    assert (world.paths.sensitive_blobs / "b-1").read_bytes() == content
    assert mode_of(world.paths.sensitive_blobs / "b-1") & 0o007 == 0

    text = await world.error("upload_blob", upload | {"blob_id": "b-2", "checksum": "0" * 40})
    assert "Payload corrupted. Checksum mismatch. Expected '" + "0" * 40 in text
    assert not (world.paths.sensitive_blobs / "b-2").exists()
    assert "illegal base64 data" in await world.error("upload_blob", upload | {"payload": "!!"})


@pytest.mark.attack("a request passes a path or an option as the name of a blob, a blobstore provider or an agent")
@pytest.mark.parametrize("blob_id", ["../x", "a/b", "", ".", ".."])
async def test_a18_upload_rejects_blob_ids_that_are_not_file_names(world: LocalAgent, blob_id: str) -> None:
    upload = {"blob_id": blob_id, "checksum": hashlib.sha1(b"x").hexdigest(), "payload": "eA=="}

    assert "exception" in await world.run("upload_blob", upload)


async def test_a19_list_disk_returns_an_empty_list_without_disks(world: LocalAgent) -> None:
    assert await world.call("list_disk", protocol=0) == {"value": []}
    assert await world.value("list_disk") == []


@pytest.mark.attack("a request puts commands for `ip` into an address")
async def test_a25_delete_arp_entries_never_fails(world: LocalAgent) -> None:
    assert await world.call("delete_arp_entries", {"ips": ["192.0.2.1", "not an address; rm -rf /", ""]}) == {
        "value": {}
    }
    assert await world.call("delete_arp_entries", {}) == {"value": {}}


async def test_a25_many_arp_entries_are_deleted_by_one_process(
    world: LocalAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ``ip`` process reads one command per line, so strings that are not addresses must not reach it."""
    given: list[str] = []

    async def run(*_: str, **options: Any) -> str:
        given.append(options["given"])
        return ""

    monkeypatch.setattr(command, "run", run)
    addresses = [f"10.0.{number // 250}.{number % 250}" for number in range(20_000)]
    hostile = ["fe80::1%eth0\nlink delete eth0", "10.0.0.1\nlink delete eth0", "-help"]

    await world.call("delete_arp_entries", {"ips": [*addresses, *hostile, *addresses]})

    assert [text.splitlines() for text in given] == [[f"neigh flush to {address}" for address in addresses]]


async def test_a25_flood_of_arp_requests_runs_one_program_at_a_time(world: LocalAgent) -> None:
    """Each program uses four file descriptors, so a flood of requests could exhaust them if the programs ran
    concurrently.
    """

    def opened() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = peak = opened()
    flood = [asyncio.create_task(world.call("delete_arp_entries", {"ips": ["192.0.2.1"]})) for _ in range(40)]
    while not all(task.done() for task in flood):
        await asyncio.sleep(0)
        peak = max(peak, opened())

    assert peak - before < 20


def _records(world: LocalAgent, version: int, *, actual: int | None = None) -> list[Any]:
    content = json.dumps(
        {"version": version if actual is None else actual, "records": [["10.0.0.9", "a.b.bosh"]]}
    ).encode()
    named = jobs.blob(store_of(world), content)
    return [named["blobstore_id"], f"sha256:{hashlib.sha256(content).hexdigest()}", version]


async def test_a26_sync_dns_stores_only_newer_valid_records(world: LocalAgent) -> None:
    assert await world.call("sync_dns", *_records(world, 2)) == {"value": "synced"}
    assert json.loads(world.paths.dns_records.read_bytes())["version"] == 2
    assert mode_of(world.paths.dns_records) == 0o640

    assert await world.call("sync_dns", "no such blob", "sha256:00", 2) == {"value": "synced"}
    assert "version" in await world.error("sync_dns", *_records(world, 3, actual=4))
    assert json.loads(world.paths.dns_records.read_bytes())["version"] == 2

    blob_id, _, version = _records(world, 5)
    assert "exception" in await world.call("sync_dns", blob_id, "sha256:" + "0" * 64, version)


async def test_quick_requests_are_answered_while_a_script_hangs_and_tasks_wait(world: LocalAgent) -> None:
    ready, gate = world.paths.base / "ready", world.paths.base / "gate"
    hang = f"#!/bin/sh\ntouch {ready}\nwhile [ ! -e {gate} ]; do sleep 0.01; done\n"
    await deployed(world, web={"bin/pre-start": hang})
    hanging = (await world.call("run_script", "pre-start", {}))["value"]["agent_task_id"]
    await until(ready.exists)
    waiting = [(await world.call("run_script", "nothing", {}))["value"]["agent_task_id"] for _ in range(8)]

    async with asyncio.timeout(10):
        assert await world.call("ping") == {"value": "pong"}
        assert "value" in await world.call("get_state", "full")
        assert await world.call("sync_dns", *_records(world, 1)) == {"value": "synced"}
        assert (await world.call("ssh", "cleanup", {"user_regex": "^bosh_nobody$"}))["value"]["status"] == "success"
        assert world.agent.tasks.find(hanging).state == "running"

    gate.touch()
    assert [await world.run("get_task", task_id) for task_id in [hanging, *waiting]] == [{"value": {}}] * 9
