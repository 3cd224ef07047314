"""Tests how programs in a monit file that call ``bpm start`` or ``bpm stop`` are recognized."""

from __future__ import annotations

import pytest

from agent_shim.supervisor.bpm.calls import BpmCall, bpm_call

BPM = "/var/vcap/jobs/bpm/bin/bpm"


@pytest.mark.parametrize(
    ("argv", "call"),
    [
        ((BPM, "start", "web"), BpmCall("start", "web", "web")),
        ((BPM, "stop", "web"), BpmCall("stop", "web", "web")),
        ((BPM, "start", "web", "-p", "worker"), BpmCall("start", "web", "worker")),
        ((BPM, "start", "-p", "worker", "web"), BpmCall("start", "web", "worker")),
        (("/var/vcap/packages/bpm/bin/bpm", "stop", "web", "--process=worker"), BpmCall("stop", "web", "worker")),
        ((BPM, "start"), None),
        ((BPM, "run", "web"), None),
        ((BPM, "start", "web", "worker"), None),
        ((BPM, "start", "-p", "worker"), None),
        (("/var/vcap/jobs/web/bin/ctl", "start", "web"), None),
    ],
)
def test_bpm_start_and_stop_commands_are_recognized(argv: tuple[str, ...], call: BpmCall | None) -> None:
    """Without the ``-p`` option, bpm uses the process that is named after the job."""
    assert bpm_call(argv) == call
