"""Tests requests with a hostile value in their arguments. If the agent rejects such a request, it reports a short error
and changes nothing. Either way, it keeps answering.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from typing import Any, Final

import pytest

from agent_shim.actions.dispatch import ACTIONS
from tests.support import jobs
from tests.support.world import LocalAgent

DEEP: Final[list[Any]] = []
_level = DEEP
for _ in range(300):
    _level.append([])
    _level = _level[0]

HOSTILE: Final[dict[str, Any]] = {
    "null": None,
    "empty text": "",
    "true": True,
    "negative": -1,
    "huge number": 2**70,
    "fraction": 1e308,
    "list": [None, 1, "x", {}],
    "object": {"": None, "x": [1], "../x": {}, "name": 5},
    "nested": DEEP,
    "long text": "x" * 5000,
    "NUL": "a\0b",
    "path": "../../../../etc/passwd",
    "dots": "..",
    "lone surrogate": "a\ud800b",
    "line breaks": "a\r\nb: c\x1b[2J\u2028",
    "option": "--help",
    "URL without host": "https://",
    "URL of a wrong host": "http://[::1",
    "URL of a wrong port": "http://127.0.0.1:99999/",
    "URL of a file": "file:///etc/passwd",
    "not ASCII": "ä" * 200,
}
FEW: Final = ("negative", "nested", "NUL", "path", "not ASCII")
"""Names of the few hostile values that are tried with actions that start a program for each request."""
URLS: Final = ("URL of a wrong port", "URL of a file")
SIGNED: Final = {"signed_url": "", "blobstore_headers": {"a": "b"}}
DIGEST: Final = hashlib.sha1(b"").hexdigest()
NEEDED: Final = {"tool": {"name": "tool", "version": "1", "sha1": DIGEST, "blobstore_id": "b"}}
CERT: Final = {"ca": "", "certificate": "c", "private_key": "p"}


def arguments(world: LocalAgent) -> dict[str, list[Any]]:
    """Return valid arguments for each action, with every member that the action reads."""
    store = world.paths.base.parent / "blobstore"
    spec = jobs.spec(
        store, {"web": {"monit": ""}}, {"tool": {"x": ""}}, properties={"logging": {"max_log_file_size": "1M"}}
    )
    return {
        "ping": [],
        "info": [],
        "start": [],
        "shutdown": [],
        "stop": [],
        "list_disk": [],
        "get_task": ["task"],
        "cancel_task": ["task"],
        "get_state": ["full"],
        "ssh": ["cleanup", {"user": "bosh_x", "public_key": "ssh-rsa AAAA x", "user_regex": "^bosh_x"}],
        "apply": [spec],
        "prepare": [spec],
        "drain": ["update", spec],
        "run_script": ["pre-start", {"env": {"A": "b"}}],
        "run_errand": ["web"],
        "mount_disk": ["cid"],
        "unmount_disk": ["cid"],
        "migrate_disk": ["old", "new"],
        "add_persistent_disk": ["cid", {"path": "/dev/none", "id": "x"}],
        "remove_persistent_disk": ["cid"],
        "add_dynamic_disk": ["cid", {"path": "/dev/null"}],
        "remove_dynamic_disk": ["cid"],
        "sync_dns": ["blob", DIGEST, 1],
        "sync_dns_with_signed_url": [{**SIGNED, "multi_digest": DIGEST, "version": 1}],
        "delete_arp_entries": [{"ips": ["x"]}],
        "fetch_logs": ["job", ["*.log"]],
        "fetch_logs_with_signed_url": [{**SIGNED, "log_type": "job", "filters": ["*.log"]}],
        "bundle_logs": [{"owning_user": "nobody", "log_type": "job", "filters": ["*.log"]}],
        "remove_file": ["/tmp/x"],
        "upload_blob": [{"blob_id": "blob", "checksum": DIGEST, "payload": ""}],
        "compile_package": ["blob", DIGEST, "p", "1", NEEDED],
        "compile_package_with_signed_url": [
            {
                "package_get_signed_url": "",
                "upload_signed_url": "",
                "digest": DIGEST,
                "name": "p",
                "version": "1",
                "blobstore_headers": {"a": "b"},
                "deps": NEEDED,
            }
        ],
        "update_settings": [
            {
                "trusted_certs": "",
                "disk_associations": [],
                "mbus": {"cert": CERT, "urls": ["nats://127.0.0.1:1"]},
                "blobstores": [{"provider": "local", "options": {"blobstore_path": "/nowhere"}}],
            }
        ],
    }


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to each value inside ``value``, as a tuple of keys and indices."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in inner:
        yield (*way, key)
        yield from places(member, (*way, key))


def changed(value: Any, way: tuple[Any, ...], new: Any) -> Any:
    """Return a copy in which the value at path ``way`` is replaced with ``new``."""
    made = copy.deepcopy(value)
    *above, last = way
    at = made
    for key in above:
        at = at[key]
    at[last] = new
    return made


def tree(world: LocalAgent) -> dict[str, bytes]:
    """Return the paths of installed files, and the contents of persistent state files."""
    base = world.paths.base
    kept = [path for path in base.glob("bosh/*.json") if path.name != "supervisor.json"]
    found = {str(path): path.read_bytes() for path in kept}
    for directory in ("jobs", "packages", "data/jobs", "data/packages", "data/sensitive_blobs", "data/dynamic_disks"):
        found |= {str(path): b"" for path in (base / directory).rglob("*") if "bpm" not in path.parts}
    return found


WORKING: Final = {"apply", "prepare", "compile_package", "compile_package_with_signed_url", "fetch_logs"} | {
    "fetch_logs_with_signed_url",
    "bundle_logs",
    "sync_dns",
    "sync_dns_with_signed_url",
}
UNTRIED: Final = {"add_dynamic_disk": [1]}
"""Positions of arguments that are not tried, because the action would wait for the given path to appear."""


def test_hostile_arguments_are_defined_for_each_action(world: LocalAgent) -> None:
    assert arguments(world).keys() == ACTIONS.keys()


@pytest.mark.attack("a request is malformed, or has a value of the wrong type")
@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[pytest.mark.slow] * (name in WORKING)) for name in sorted(ACTIONS)]
)
async def test_rejected_hostile_arguments_get_a_short_error_and_change_nothing(world: LocalAgent, method: str) -> None:
    valid = arguments(world)[method]
    outside, before = sorted(world.paths.base.parent.iterdir()), tree(world)
    findings = []
    for way in places(valid):
        if way[0] in UNTRIED.get(method, []):
            continue
        names = HOSTILE if method not in WORKING else (*FEW, *URLS) if str(way[-1]).endswith("url") else FEW
        for name in names:
            reply = await world.run(method, *changed(valid, way, HOSTILE[name]))
            after = tree(world)
            if "value" not in reply:
                text = reply["exception"]["message"]
                if "internal error" in text or not text or len(text) > 20_000:
                    findings.append((way, name, text[:300]))
                if after != before:
                    findings.append((way, name, str(after.items() ^ before.items())))
            before = after
        assert await world.value("ping") == "pong"
    assert findings == []
    assert sorted(world.paths.base.parent.iterdir()) == outside
