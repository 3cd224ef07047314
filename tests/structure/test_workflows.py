"""Checks that workflows run ``./dev`` tasks, have minimal permissions, and pin their actions."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.support.source import ROOT

WORKFLOWS = sorted(path.name for path in (ROOT / ".github/workflows").iterdir())
TASK = re.compile(r"\./dev (\$\{\{ matrix\.task \}\}|[a-z0-9-]+)")


def read(name: str) -> dict[str, Any]:
    # In YAML 1.1, the "on" key is read as a boolean. This does not matter, because no test uses that key.
    found: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows" / name).read_text())
    return found


def tasks(workflow: dict[str, Any]) -> set[str]:
    """Return the names of the ``./dev`` tasks that a workflow runs."""
    found: set[str] = set()
    for job in workflow["jobs"].values():
        for step in job["steps"]:
            for task in TASK.findall(step.get("run", "")):
                found |= {task} if "matrix" not in task else set(job["strategy"]["matrix"]["task"])
    return found


def test_ci_workflow_runs_the_dev_ci_tasks() -> None:
    listed = re.search(r"\ndo-ci\(\) \{\n[^}]* for task in ([^;]+);", (ROOT / "dev").read_text())

    assert listed is not None
    assert tasks(read("ci.yml")) == set(listed[1].split())


@pytest.mark.parametrize("name", WORKFLOWS)
def test_tasks_named_by_workflows_exist(name: str) -> None:
    known = set(re.findall(r"^do-([a-z0-9-]+)\(\)", (ROOT / "dev").read_text(), re.MULTILINE))

    assert tasks(read(name))
    assert tasks(read(name)) - known == set()


def test_ci_covers_every_supported_python_version_and_arm64() -> None:
    matrix = read("ci.yml")["jobs"]["test"]["strategy"]["matrix"]
    classifiers = re.findall(r"Python :: (3\.\d+)\"", (ROOT / "pyproject.toml").read_text())

    assert matrix["python"] == classifiers
    assert any(one["machine"].endswith("-arm") for one in matrix["include"])


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflows_limit_permissions_and_have_timeouts(name: str) -> None:
    workflow = read(name)

    assert workflow["permissions"] in ({}, {"contents": "read"})
    assert [job for job, one in workflow["jobs"].items() if "timeout-minutes" not in one] == []


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflow_actions_are_pinned_and_scripts_contain_no_event_data(name: str) -> None:
    """A tag could be moved to other code, and the shell would execute text that an event inserts into a script."""
    used = re.findall(r"uses: (.*)", (ROOT / ".github/workflows" / name).read_text())

    assert used
    assert [one for one in used if not re.fullmatch(r"[\w/.-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", one)] == []
    assert "${{ github.event" not in "".join(re.findall(r"run: (.*)", (ROOT / ".github/workflows" / name).read_text()))
