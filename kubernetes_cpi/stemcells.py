"""Light stemcells, which only name an image in a registry.

A stemcell's cid is the image reference with its digest, followed by "#" and the architecture of the nodes that can run
it.
"""

from __future__ import annotations

import re
from typing import Any, Final

from kubernetes_cpi.config import Config
from kubernetes_cpi.errors import CpiError

DIGEST: Final = r"sha256:[0-9a-f]{64}"
_PART: Final = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
REFERENCE: Final = (
    r"(?:(?:localhost|[-a-zA-Z0-9]+(?=[.:])(?:\.[-a-zA-Z0-9]+)*)(?::[0-9]+)?/)?"
    rf"{_PART}(?:/{_PART})*(?::[A-Za-z0-9_][-A-Za-z0-9_.]{{0,127}})?"
)
"""Regular expression for an image reference as container runtimes parse it: an optional registry, a path in lower case,
and an optional tag.
"""

ARCHITECTURES: Final = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}
"""Values of the `kubernetes.io/arch` node label for the architecture names that stemcells use."""


def create(config: Config, _image_path: str | None, properties: dict[str, Any]) -> str:
    """Return the cid of a light stemcell, which consists of an image reference and a suffix for the `architecture`.

    The cloud properties name the image, either as `image_reference` and `digest` or as `image`. The image is not
    pulled, so a wrong reference is noticed only when the first VM is created. Other keys are meant for the stemcell
    builder and are ignored.
    """
    given = properties.get("image_reference") or properties.get("image")
    if not given:
        raise CpiError(
            "cannot create the stemcell: its cloud properties have neither `image_reference` nor `image`; only light "
            "stemcells (kubernetes-light, docker-light, warden-light) are supported"
        )
    reference, _, digest = str(given).partition("@")
    digest = str(properties.get("digest") or digest)
    if not re.fullmatch(REFERENCE, reference) or (digest and not re.fullmatch(DIGEST, digest)):
        raise CpiError(f"cannot create the stemcell: {given!r} with digest {digest!r} is not a reference to an image")
    if digest:
        return f"{reference}@{digest}{_suffix(properties)}"
    if not config.stemcells.allow_mutable_images:
        raise CpiError(
            f"cannot create the stemcell: {reference} has no digest, so VMs could differ; add `digest: sha256:…` to "
            "its cloud properties, or set `stemcells.allow_mutable_images`"
        )
    return f"{reference}{_suffix(properties)}"


def parts(cid: str) -> tuple[str, str]:
    """Return a stemcell's image and architecture.

    The architecture is written as in the `kubernetes.io/arch` node label, or is "" if the stemcell does not name one.
    """
    image, _, architecture = cid.partition("#")
    return image, architecture


def _suffix(properties: dict[str, Any]) -> str:
    """Return the suffix of the cid: "#" and the architecture, or "" if the properties do not name one."""
    named = str(properties.get("architecture") or "")
    if named and named not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise CpiError(f"cannot create the stemcell: its `architecture` is {named!r}, not one of {known}")
    return f"#{ARCHITECTURES[named]}" if named else ""


def delete(_config: Config, _stemcell: str) -> None:
    """Do nothing, because the image stays in its registry."""
