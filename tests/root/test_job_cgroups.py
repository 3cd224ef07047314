"""Tests job cgroups in this machine's real cgroup hierarchies."""

from __future__ import annotations

import pytest

from agent_shim.host import job_cgroups

pytestmark = pytest.mark.root


def test_cgroup_probe_leaves_no_cgroup_behind() -> None:
    """If the probe left a cgroup behind, the next probe by the same process would fail."""
    job_cgroups.offered()

    assert [
        path
        for _, each in job_cgroups.hierarchies()
        for path in job_cgroups.parent_of_job_cgroups(each).glob("probe-*")
    ] == []
