"""Ways to break this agent on purpose: ``./dev compare-release --breaks`` checks that the comparison notices each of
them.

The broken agent is a modified copy. If the text to be replaced is missing, an error is raised, so that no defect
is skipped silently.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.machine import CODE
from tools.comparison.judge import Verdict

MODEL: Final = Path(__file__).with_name("model")
"""Directory with a release whose only job exercises every phase of the lifecycle."""


@dataclass(frozen=True)
class Break:
    """A deliberate defect: ``old`` is replaced with ``new`` in one of the agent's files.

    ``shows`` is a regular expression for the difference that the comparison must find, in the form "phase: what".
    """

    path: str
    old: str
    new: str
    shows: str
    trials: tuple[str, ...] = ()

    def copy(self, place: Path) -> None:
        """Copy the agent to a directory and break the copy.

        Raises ``LookupError`` if the text to be replaced is missing.
        """
        shutil.copytree(CODE / "agent_shim", place / "agent_shim", ignore=shutil.ignore_patterns("__pycache__"))
        file = place / "agent_shim" / self.path
        text = file.read_text()
        if self.old not in text:
            raise LookupError(f"cannot break the agent: {self.path} has no {self.old!r}")
        file.write_text(text.replace(self.old, self.new))

    def is_noticed(self, verdict: Verdict) -> bool:
        """Return True if the expected difference was found and is not allowed by docs/monit-deviations.md."""
        return any(re.search(self.shows, f"{one.phase}: {one.what}") for one in verdict.differences)


_SPAWN: Final = "supervisor/ctl_programs.py"
_SCRIPTS: Final = "await agent.scripts.run_all("
_REACT: Final = "await service.react(rule.action, complaint.word, finding.text)"


def _without_script(name: str, phase: str, *trials: str) -> Break:
    """Return a change that makes the agent skip one of the scripts without reporting an error."""
    new = f'if name != "{name}":\n        {_SCRIPTS}'
    return Break("actions/scripts.py", _SCRIPTS, new, rf"^{phase}: script {name}", trials)


BREAKS: Final[dict[str, Break]] = {
    "MONIT_SERVICE is missing": Break(
        _SPAWN, '"MONIT_SERVICE": name,', "", "ctl start script: environment MONIT_SERVICE"
    ),
    "MONIT_HOST is wrong": Break(
        _SPAWN, "socket.gethostname()", '"elsewhere"', "ctl start script: environment MONIT_HOST"
    ),
    "programs start in /tmp": Break(
        _SPAWN, "cwd=str(self.directory()), user=user", 'cwd="/tmp", user=user', "ctl start script: directory"
    ),
    "programs have another umask": Break("host/process.py", "umask=0o022", "umask=0o077", "ctl start script: umask"),
    "programs ignore their user": Break(
        _SPAWN, "program.uid or None, program.gid or None", "None, None", "plain lives: user"
    ),
    "programs have the agent's limits": Break(
        "host/process.py",
        "if resource.getrlimit(resource.RLIMIT_NOFILE) == _raised(limits):",
        "if False:",
        "serve lives: limit nofile",
    ),
    "scripts lack TMPDIR": Break(
        "services/scripts.py", '{**environ, "PATH": PATH}', '{"PATH": PATH}', "pre-start script: environment TMPDIR"
    ),
    "each alert is sent twice": Break(
        "edges/alerts.py",
        "self.waiting.append(message)",
        "self.waiting.extend((message, message))",
        "^death: alert web - Does not exist",
        ("death",),
    ),
    "the state names another VM": Break(
        "actions/state.py", "settings.source.vm.name}", '"other"}', r"value in state vm\.name"
    ),
    "a heartbeat names another instance": Break(
        "daemon/runtime.py", "node_id=spec.id", 'node_id="other"', "value in heartbeat node_id", ("death", "unmonitor")
    ),
    "post-start is left out": _without_script("post-start", "post-start"),
    "post-deploy is left out": _without_script("post-deploy", "post-deploy"),
    "pre-stop is left out": _without_script("pre-stop", "update: pre-stop", "update"),
    "post-stop is left out": _without_script("post-stop", "update: post-stop", "update"),
    "drain treats an update as a shutdown": Break(
        "services/scripts.py",
        'if kind == "shutdown":',
        'if kind == "update":\n        return list(SHUTDOWN_ARGUMENTS)\n    if kind == "shutdown":',
        "^update: drain: script drain",
        ("update",),
    ),
    "an update keeps the old spec": Break(
        "actions/state.py",
        "state = agent.spec.current.members()",
        'state = agent.spec.current.members() | {"configuration_hash": "hash 1"}',
        "^update: start: value in state configuration_hash",
        ("update",),
    ),
    "an errand always succeeds": Break(
        "actions/scripts.py", '"exit_code": errand.exit_code', '"exit_code": 0', "^errand: answer", ("errand",)
    ),
    "a changed file runs no program": Break(
        "supervisor/rule_engine.py",
        _REACT,
        f'if rule.action.kind != "exec":\n                {_REACT}',
        "^changed file: ",
        ("changed file",),
    ),
    "memory rules never match": Break("supervisor/rule_engine.py", '"totalmemory": total,', "", "^usage: ", ("usage",)),
    "CPU rules never match": Break(
        "supervisor/rule_engine.py", 'figures |= {"cpu %"', 'figures |= {"other"', "^usage: ", ("usage",)
    ),
    "unmonitor does nothing": Break(
        "supervisor/supervisor.py", "self._named(name).unmonitor()", "self._named(name)", "^unmonitor: ", ("unmonitor",)
    ),
    "a start after a stop does nothing": Break(
        "supervisor/supervisor.py",
        "        was_wanted, self._is_wanted = self._is_wanted, True\n",
        '        if self._paths.stopped_marker.exists() and getattr(self, "was_here", False):\n            return\n'
        "        self.was_here = self._paths.stopped_marker.exists()\n"
        "        was_wanted, self._is_wanted = self._is_wanted, True\n",
        "^start after stop: ",
        ("update", "start after stop"),
    ),
    "a slow start program is not reported": Break(
        "supervisor/service.py",
        "self.notify(*alert)\n                self._is_failure_reported",
        "self._is_failure_reported",
        "^slow start: alert web - Execution failed",
        ("update", "slow start"),
    ),
}
