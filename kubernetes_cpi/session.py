"""The context of a method: the configuration, the cluster, and the caller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kubernetes_cpi import config as configuration
from kubernetes_cpi import credentials, log, names
from kubernetes_cpi.client import Client
from kubernetes_cpi.config import Config
from kubernetes_cpi.errors import InputError


class Session(msgspec.Struct, frozen=True):
    """The cluster as one request sees it; ``request_id`` differs from call to call and is "" from the CLI."""

    config: Config
    client: Client
    namespace: str
    director: str
    request_id: str

    def namespace_of(self, cid: str) -> str:
        """Return the namespace of a VM, disk or snapshot."""
        return names.namespace_of(cid, self.namespace)

    def close(self) -> None:
        """Close the connection to the cluster."""
        self.client.close()


def opened(config: Config, context: Mapping[str, Any]) -> Session:
    """Find the cluster, without a request to it."""
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
