"""A new cluster for each test, and a check that the CPI needs only the permissions that the Roles in deploy/cpi
grant.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

from tests.cpi.calls import CpiCalls
from tests.cpi.fake_api import FakeApiServer, FakeCluster
from tests.support.source import ROOT

VERBS = {"POST": "create", "PATCH": "patch", "DELETE": "delete", "WATCH": "watch"}


@cache
def allowed() -> frozenset[tuple[str, str]]:
    """Return the permissions that the Roles grant, as pairs of a verb and a plural resource name."""
    texts = [file.read_text() for file in sorted((ROOT / "deploy/cpi").rglob("*.yaml"))]
    roles = [one for text in texts if "rbac.authorization" in text for one in yaml.safe_load_all(text)]
    rules = [rule for one in roles if one and one["kind"] in ("Role", "ClusterRole") for rule in one["rules"]]
    return frozenset((verb, plural) for rule in rules for verb in rule["verbs"] for plural in rule["resources"])


def permission_for(request: str) -> tuple[str, str]:
    """Return the permission that a request needs, as an RBAC verb and a plural resource name."""
    method, _, path = request.partition(" ")
    plural, _, name = path.partition("/")
    return VERBS.get(method) or ("get" if name else "list"), plural


@pytest.fixture
def server() -> Iterator[FakeApiServer]:
    server = FakeApiServer(FakeCluster())
    yield server
    server.close()
    assert server.cluster.violations == []
    # Every account may query its own permissions (system:basic-user), so the Roles need not grant this permission.
    reviews = {("create", "selfsubjectaccessreviews")}
    assert {permission_for(request) for request in server.requests} - reviews <= allowed()


@pytest.fixture
def cluster(server: FakeApiServer) -> FakeCluster:
    return server.cluster


@pytest.fixture
def cpi(server: FakeApiServer, tmp_path: Path) -> CpiCalls:
    """Return a CPI whose timeouts are so short that tests can wait for them to expire."""
    return CpiCalls(
        server,
        tmp_path,
        agent={"mbus": "nats://10.0.0.6:4222"},
        timeouts={
            "retry": 2,
            "unmount": 1,
            "helper": 2,
            "unschedulable": 1,
            "crashing": 1,
            "room": 1,
            "bus": 1,
            "unready": 1,
            "delete_vm": 1,
            "create_vm": 3,
        },
    )
