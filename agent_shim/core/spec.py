"""Parses the apply spec, which describes the state that the Director wants the instance to have, and converts it to the
form in which it is stored and reported. This module performs no I/O.

Only the members that the Go agent supports are stored (agent/applier/applyspec/v1_apply_spec.go), so that ``get_state``
reports the same members to the Director as the Go agent does. ``networks`` and ``resource_pool`` are stored exactly as
received.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from agent_shim.core import wire
from agent_shim.core.digest import MultipleDigest
from agent_shim.core.errors import DigestError, errors_as
from agent_shim.core.wire import INT64, DigestText


class Template(msgspec.Struct, frozen=True):
    """A job from a release, rendered for this instance."""

    name: str = ""
    version: str = ""


class InstanceGroup(msgspec.Struct, frozen=True):
    """The instance group. ``templates`` are its jobs. ``template`` and ``version`` are the name and version of the
    first job.
    """

    name: str | None = None
    release: str = ""
    template: str = ""
    version: str = ""
    templates: list[Template] | None = None


class AppliedPackage(msgspec.Struct, frozen=True):
    name: str = ""
    version: str = ""
    sha1: DigestText = ""
    blobstore_id: str = ""
    signed_url: str = ""
    blobstore_headers: dict[str, str] | None = None


class Archive(msgspec.Struct, frozen=True):
    """The tarball with the rendered templates of all jobs.

    The digest may be empty only if the blob id is empty too. An empty digest is stored as null
    (applyspec/rendered_templates_archive_spec.go).
    """

    sha1: str | None = None
    blobstore_id: str = ""

    def __post_init__(self) -> None:
        """Check the digest if there is a digest or a blob id. Otherwise, replace an empty digest with None. Raises
        ``ValueError``, to which msgspec adds the JSON path.
        """
        if self.sha1 or self.blobstore_id:
            try:
                MultipleDigest.parse(self.sha1 or "")
            except DigestError as exc:
                raise ValueError(str(exc)) from exc
        elif self.sha1 is not None:
            msgspec.structs.force_setattr(self, "sha1", None)


class Logging(msgspec.Struct, frozen=True):
    max_log_file_size: str = ""


class Properties(msgspec.Struct, frozen=True):
    logging: Logging = Logging()


class ApplySpec(msgspec.Struct, frozen=True):
    """The stored form of an apply spec. The reply to ``get_state`` begins with these members, in this order."""

    properties: Properties = Properties()
    job: InstanceGroup = InstanceGroup()
    packages: dict[str, AppliedPackage] = {}
    configuration_hash: str = ""
    networks: dict[str, dict[str, Any] | None] = {}
    resource_pool: Any = {}
    deployment: str = ""
    name: str = ""
    index: Annotated[int, INT64] | None = None
    id: str = ""
    az: str = ""
    persistent_disk: Annotated[int, INT64] = 0
    rendered_templates_archive: Archive | None = None

    @property
    def jobs(self) -> list[Template]:
        """The jobs of the instance group, or an empty list if the spec has no rendered templates (v1_apply_spec.go,
        Jobs).
        """
        return [] if self.rendered_templates_archive is None else self.job.templates or []

    @property
    def job_names(self) -> list[str]:
        return [template.name for template in self.jobs]

    def members(self) -> dict[str, Any]:
        """The stored form as a JSON object."""
        members: dict[str, Any] = msgspec.to_builtins(self)
        return members


def parse(value: Any) -> ApplySpec:
    """Parse a spec from the wire or from disk. Raises ``ActionError`` with the JSON path of the error."""
    with errors_as("cannot read the apply spec", msgspec.ValidationError):
        return wire.convert(value, ApplySpec)


def decode(raw: bytes) -> ApplySpec:
    """Parse the content of ``spec.json``, the stored apply spec. Raises ``ActionError``."""
    with errors_as("cannot read the apply spec", ValueError):
        document = wire.decode_json(raw)
    packages = document.get("packages") if isinstance(document, dict) else None
    for package in packages.values() if isinstance(packages, dict) else ():
        # For a package without a digest, the stored digest is empty, which ``parse`` would reject.
        if isinstance(package, dict) and not package.get("sha1"):
            package.pop("sha1", None)
    return parse(document)
