"""``agent-shim doctor --patch``: changes to a pod as a strategic-merge patch for kubectl.

The patch contains the changes that a pod needs and that can be made in its manifest alone. Changes that give a
container more power, need a value or affect the node are added as comments, because only the owner knows whether the
jobs need them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, Literal

import yaml

from agent_shim.cli.doctor.finding import Report
from agent_shim.core import safetext

PLACEHOLDER: Final = "CONTAINER"
"""Placeholder for an unknown container name. Because it is not a valid name, kubectl rejects the patch instead of
adding a container.
"""
Target = Literal["template", "pod"]
"""What the patch applies to: the template of a StatefulSet, Deployment or DaemonSet, or the manifest of a pod."""
_WIDTH: Final = 100


def patch(report: Report, container: str, present: Collection[str], target: Target) -> str:
    """Return the patch as YAML with comments. If there is no change, the YAML is ``{}``.

    ``present`` are the capabilities that the container has. They are needed because a patch replaces both lists of
    capabilities (``add`` and ``drop``) and must therefore contain the complete lists.
    """
    spec: Mapping[str, Any] = {}
    for finding in report.findings:
        spec = _merged(spec, finding.patch)
    own = spec.get("container", {})
    if "capabilities" in own.get("securityContext", {}):
        kept = sorted(name for name in present if not name.isdigit())  # a number is a capability without a known name
        own = _merged(own, {"securityContext": {"capabilities": {"add": kept, "drop": ["ALL"]}}})
    changes: dict[str, Any] = {"containers": [{"name": container, **own}]} if own else {}
    changes |= {name: value for name, value in spec.items() if name != "container"}
    document = {"spec": {"template": {"spec": changes}} if target == "template" else changes} if changes else {}
    body = yaml.safe_dump(document, sort_keys=False, width=_WIDTH)
    return "\n".join(_comments(report, target, is_empty=not changes)) + f"\n{body}"


def _comments(report: Report, target: Target, *, is_empty: bool) -> Iterator[str]:
    """Yield the comment lines above the patch. They list the changes that the patch does not contain."""
    if is_empty:
        yield "# agent-shim doctor: nothing to change."
    else:
        subject = "StatefulSet, Deployment or DaemonSet" if target == "template" else "pod"
        yield f"# agent-shim doctor: changes to the {subject} of this container."
    without_patch = [finding for finding in report.findings if finding.change and not finding.patch]
    if without_patch:
        yield "# Not included are these changes, which depend on the jobs, need a value or affect the node:"
    for finding in without_patch:
        text = safetext.line(f"{finding.topic}: {finding.change}")
        yield from textwrap.wrap(text, _WIDTH, initial_indent="# - ", subsequent_indent="#   ", break_long_words=False)


def _merged(one: Any, other: Any) -> Any:
    """Merge two changes. Mappings are merged key by key, and lists are concatenated without duplicates."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return {name: _merged(one.get(name), other.get(name)) for name in {**one, **other}}
    if isinstance(one, list) and isinstance(other, list):
        return [*one, *(item for item in other if item not in one)]
    return one if other is None else other
