"""Every module has a test file, or a line here that says where it is tested or why not."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import pytest

from tests.structure.source import ROOT, modules

ELSEWHERE: Mapping[str, str] = {
    "actions.access": "contract/test_actions.py",
    "actions.core": "contract/test_actions.py",
    "actions.jobs": "contract/test_actions.py",
    "asking": "integration/test_control.py",
    "boot": "image/test_image.py",
    "cli": "image/test_image.py",
    "compilation": "contract/test_compile.py",
    "dispatch": "contract/test_envelope.py",
    "disks.places": "integration/test_disks_service.py",
    "doctor.finding": "unit/test_doctor.py",
    "doctor.judgement": "unit/test_doctor.py",
    "bpm_logs": "contract/test_bpm_cli.py",
    "host.jailer": "root/test_bpm.py",
    "host.pseudo_terminal": "root/test_bpm_attacks.py",
    "host.nftables": "root/test_firewall.py",
    "host.trials": "root/test_doctor.py",
    "host.rotating": "integration/test_rotation.py",
    "host.volumes": "root/test_disks_volumes.py",
    "monit_text": "unit/test_monit_cli.py",
    "running": "integration/test_daemon.py",
    "observed": "integration/test_daemon.py",
    "spec_store": "contract/test_state.py",
    "supervisor.bpm": "contract/test_corpus_bpm.py",
    "supervisor.bpm_answers": "contract/test_bpm_cli.py",
    "supervisor.faults": "integration/test_supervisor_checks.py",
    "supervisor.identity": "unit/supervisor/test_ownership.py",
    "supervisor.monit_answers": "integration/test_monit_cli.py",
    "supervisor.posix_regex": "contract/test_corpus_monit.py",
    "probe": "unit/test_commands.py",
    "terminal": "unit/test_doctor.py",
}
"""Modules that are tested through others, and the file that would fail."""

UNTESTED: Mapping[str, str] = {
    "": "a version",
    "agent": "a record",
    "demo.play": "is a test itself: ./dev demo",
    "demo.release": "is a test itself: ./dev demo",
    "errors": "names only",
    "paths": "names only",
}
"""Modules without a test, and why."""


def unmapped(names: Collection[str], files: Collection[str]) -> Iterator[str]:
    """Modules that no test file (``files`` are stems) is named after.

    ``host.files`` has a test in ``test_files``, ``test_host_files`` and what goes on with ``_`` after either.
    """
    for name in names:
        stems = {f"test_{name.rpartition('.')[2]}", f"test_{name.replace('.', '_')}"}
        if not any(file in stems or file.startswith(tuple(f"{stem}_" for stem in stems)) for file in files):
            yield name


def test_every_module_has_a_test() -> None:
    """A module is named by a test file or stands in one of the lists."""
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
        ("metrics", ["test_metrics_http"], True),
        ("host.files", ["test_host", "test_filesystem"], False),
        ("bus.nats", [], False),
    ],
)
def test_a_name_finds_its_test(name: str, files: list[str], is_mapped: bool) -> None:
    """A test file belongs to a module by its whole name, not by a prefix of it."""
    assert (list(unmapped([name], files)) == []) is is_mapped
