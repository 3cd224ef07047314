"""Every module has a test file, or a line here that says where it is tested or why not."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import pytest

from tests.structure.source import ROOT, modules

ELSEWHERE: Mapping[str, str] = {
    "actions.access": "contract/test_actions.py",
    "actions.state": "contract/test_actions.py",
    "actions.jobs": "contract/test_actions.py",
    "edges.control_client": "integration/test_control_server.py",
    "daemon.boot": "image/test_image.py",
    "cli.main": "image/test_image.py",
    "__main__": "integration/test_wheel.py",
    "cli.__main__": "integration/test_daemon.py",
    "cli.compile_release": "integration/test_compile_command.py",
    "daemon.main": "integration/test_daemon.py",
    "edges.bus": "integration/test_nats.py",
    "core.bus_stats": "integration/test_nats.py",
    "bulk.modes": "integration/test_worker.py",
    "bulk.providers": "integration/test_blobstore_providers.py",
    "services.logs.log_file": "unit/services/logs/test_tail.py",
    "services.logs.archives": "contract/test_logs.py",
    "actions.compilation": "contract/test_compile.py",
    "actions.dispatch": "contract/test_envelope.py",
    "services.disks.mounting": "integration/test_disks_service.py",
    "cli.doctor.finding": "unit/cli/test_doctor.py",
    "cli.doctor.limits": "unit/cli/test_doctor.py",
    "cli.bpm_logs": "contract/test_bpm_command.py",
    "host.sandbox": "root/test_bpm.py",
    "host.nftables": "root/test_firewall.py",
    "bulk.copytruncate": "integration/test_rotation.py",
    "host.descriptors": "integration/test_copytree.py",
    "host.volumes": "root/test_disks_volumes.py",
    "edges.accepting": "integration/test_http_server.py",
    "core.events": "integration/test_scripts.py",
    "edges.monit_text": "unit/cli/test_monit.py",
    "daemon.endings": "integration/test_orderly_stop.py",
    "daemon.runtime": "integration/test_daemon.py",
    "daemon.status_report": "integration/test_daemon.py",
    "services.spec_store": "contract/test_state.py",
    "supervisor.bpm.config": "contract/test_corpus_bpm.py",
    "supervisor.event_kinds": "integration/test_rule_engine.py",
    "supervisor.ownership.process_record": "unit/supervisor/ownership/test_evidence.py",
    "supervisor.monit.monit_api": "integration/test_monit_command.py",
    "supervisor.posix_regex": "contract/test_corpus_monit.py",
    "cli.probe": "unit/cli/test_commands.py",
    "cli.ansi": "unit/cli/test_doctor.py",
}
"""Modules that are tested through others, and the file that would fail."""

UNTESTED: Mapping[str, str] = {
    "": "a version",
    "actions.agent": "a record",
    "core.errors": "names only",
    "core.paths": "names only",
}
"""Modules without a test, and why."""


def unmapped(names: Collection[str], files: Collection[str]) -> Iterator[str]:
    """Return modules without a test file of their name (``files`` are stems).

    ``services.disks.hints`` has a test in ``test_hints``, ``test_disks_hints`` or either of them with a suffix
    after ``_``.
    """
    for name in names:
        parts = name.split(".")
        stems = {"_".join(["test", *parts[start:]]) for start in range(len(parts))}
        if not any(file in stems or file.startswith(tuple(f"{stem}_" for stem in stems)) for file in files):
            yield name


def test_every_module_has_a_test() -> None:
    """A test file or one of the lists names each module."""
    files = [path.stem for path in (ROOT / "tests").rglob("test_*.py")]
    written = [name for name, module in modules().items() if not module.is_package or module.tree.body[1:]]

    assert sorted(set(unmapped(written, files)) - set(ELSEWHERE) - set(UNTESTED)) == []


def test_lists_name_modules_that_exist() -> None:
    """A line goes with its module."""
    assert sorted({*ELSEWHERE, *UNTESTED} - set(modules())) == []


def test_files_of_other_names_exist() -> None:
    """A test that is named here is there."""
    assert [file for file in ELSEWHERE.values() if not (ROOT / "tests" / file).is_file()] == []


@pytest.mark.parametrize(
    ("name", "files", "is_mapped"),
    [
        ("host.files", ["test_files"], True),
        ("host.files", ["test_host_files"], True),
        ("edges.metrics", ["test_metrics_http"], True),
        ("host.files", ["test_host", "test_filesystem"], False),
        ("edges.bus.nats", [], False),
    ],
)
def test_a_name_finds_its_test(name: str, files: list[str], is_mapped: bool) -> None:
    """A test file belongs to a module by its whole name, not by a prefix of it."""
    assert (list(unmapped([name], files)) == []) is is_mapped
