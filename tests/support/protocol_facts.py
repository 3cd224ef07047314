"""Numbered facts about the protocol.

The names of the tests that check a fact begin with its number, for example ``test_a13_…``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

FACTS: Final[Mapping[str, str]] = {
    # Facts about the connection
    "t1": "TLS is mutual, and a server whose certificate has the wrong CA, host or common name is rejected.",
    "t2": "The agent retries forever at growing intervals, and then subscribes again.",
    "t3": "The agent subscribes only to its own subject. If the server refuses a message, only that message is lost.",
    "t4": "Bus addresses from update_settings take precedence over env.bosh.mbus, and those over mbus.",
    "t5": "Invalid messages are dropped.",
    "t6": "The length of replies is limited.",
    "t7": "The connection stays up while a long action runs.",
    "t8": "Many tasks can be queued at the same time.",
    "t9": "Over HTTPS, status codes, headers and ciphers are those of the Go agent.",
    "t10": "Over HTTPS, no heartbeats are sent, and a request without ``protocol`` has protocol 0.",
    "t11": "The agent switches to new credentials, stores them, and reports the result under the old task id.",
    # Facts about requests and replies
    "e1": "Unknown methods are reported.",
    "e2": "Failures of immediate actions are reported.",
    "e3": "Failed tasks are reported by get_task.",
    "e4": "Unknown tasks are reported.",
    "e5": "Too few arguments are an error.",
    "e6": "Surplus arguments are ignored.",
    "e7": "Null arguments and fields are zero values.",
    "e8": "Arguments of the wrong type are an error.",
    "e9": "Task ids are UUIDs, and results can be fetched repeatedly.",
    "e10": "Tasks can be cancelled.",
    "e11": "Tasks of update_settings are stored, so the next agent can resume them.",
    # Facts about individual actions
    "a1": "ping",
    "a2": "info",
    "a3": "ssh",
    "a4": "bundle_logs and remove_file",
    "a5": "fetch_logs",
    "a6": "fetch_logs_with_signed_url",
    "a7": "update_settings",
    "a8": "shutdown",
    "a9": "prepare",
    "a10": "apply",
    "a11": "start",
    "a12": "stop",
    "a13": "drain",
    "a14": "run_script",
    "a15": "run_errand",
    "a16": "compile_package",
    "a17": "compile_package_with_signed_url",
    "a18": "upload_blob",
    "a19": "list_disk",
    "a20": "mount_disk",
    "a21": "unmount_disk",
    "a22": "migrate_disk",
    "a23": "add_persistent_disk and remove_persistent_disk",
    "a24": "add_dynamic_disk and remove_dynamic_disk",
    "a25": "delete_arp_entries",
    "a26": "sync_dns",
    "a27": "sync_dns_with_signed_url",
    "a28": "Actions that only older agents have are reported as unknown.",
    # Facts about states and messages
    "s1": "The state of a fresh instance is the same as the Go agent's.",
    "s2": "get_state returns what is in the spec, whether the spec is full or partial.",
    "s3": "Vitals have the documented form.",
    "s4": "If several values of job_state apply, the first one that the page lists is reported.",
    "s5": "Processes in get_state have the form that the CLI decodes.",
    "s6": "Networks are returned as they were sent.",
    "s7": "Heartbeats have the documented form.",
    "s8": "Alerts have the documented form.",
    "s9": "The notice of a shutdown has the documented form.",
    # Facts about digests
    "d1": "A bare digest is a SHA-1.",
    "d2": "If there are several digests, the strongest is checked.",
    "d3": "Digests with unknown algorithms are ignored, unless all algorithms are unknown.",
    "d4": "Two digests of the same algorithm are rejected.",
    "d5": "A blob without a digest is rejected.",
    "d6": "Digests with invalid characters are rejected.",
    "d7": "Errors contain the digests in their original order.",
}
