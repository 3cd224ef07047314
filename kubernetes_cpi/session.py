"""Define the context of a request: the configuration, the connection to the cluster, and the Director that sent the
request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kubernetes_cpi import config as configuration
from kubernetes_cpi import credentials, log, names
from kubernetes_cpi.client import Client, Object, Resource
from kubernetes_cpi.config import Config
from kubernetes_cpi.errors import CpiError, InputError


class Session(msgspec.Struct, frozen=True):
    """The context of one request."""

    config: Config
    client: Client
    namespace: str
    director: str
    """The Director's UUID, or ""."""
    request_id: str
    """A random number that the Director chooses for each call, with a prefix. It is "" for requests from the CLI."""

    def namespace_of(self, cid: str) -> str:
        """Return the namespace of a VM, disk or snapshot."""
        return names.namespace_of(cid, self.namespace)

    def find(self, resource: Resource, cid: str, kind: str) -> Object | None:
        """Return the object with the cid ``cid``, or None if it does not exist or was not created by this CPI for this
        Director.
        """
        found = self.client.find(resource, self.namespace_of(cid), cid)
        return found if found is not None and names.is_ours(found, kind, self.director) else None

    def check_ours(self, found: Object | None, kind: str, error: Callable[[str], CpiError]) -> None:
        """Raise ``error`` if an object was not created by this CPI or belongs to another Director."""
        if found is not None and not names.is_ours(found, kind, self.director):
            wanted = ", ".join(f"{key}={value}" for key, value in names.labels(kind, self.director).items())
            name, type_name = found["metadata"]["name"], found.get("kind", "object")
            raise error(
                f"cannot use the {type_name} {name}: it lacks the labels of a {kind} of this Director, {wanted}"
            )

    def close(self) -> None:
        """Close the connection to the cluster."""
        self.client.close()


def opened(config: Config, context: Mapping[str, Any]) -> Session:
    """Open a session for a request. This sends no request to the cluster."""
    log.hide([config.agent.mbus, config.agent.blobstore])
    log.hide([config.cluster.token, config.cluster.client_key])
    access = credentials.access(config.cluster)
    namespace = config.namespace or access.namespace
    try:
        configuration.check_namespace(namespace)
    except ValueError as exc:
        raise InputError(f"cannot use the namespace of the kubeconfig or service account: {exc}") from None
    director, request_id = context.get("director_uuid"), context.get("request_id")
    return Session(
        config,
        Client(access, config.timeouts),
        namespace,
        director if isinstance(director, str) else "",
        request_id if isinstance(request_id, str) else "",
    )
