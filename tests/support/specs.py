"""Provides apply specs that several tests use as expected values."""

from __future__ import annotations

from typing import Any, Final

FRESH_SPEC: Final[dict[str, Any]] = {
    "properties": {"logging": {"max_log_file_size": ""}},
    "job": {"name": None, "release": "", "template": "", "version": "", "templates": None},
    "packages": {},
    "configuration_hash": "",
    "networks": {},
    "resource_pool": {},
    "deployment": "",
    "name": "",
    "index": None,
    "id": "",
    "az": "",
    "persistent_disk": 0,
    "rendered_templates_archive": None,
}
"""Spec members that the Go agent reports on a VM before its first ``apply``."""
