"""The CPI's errors. Each ``type_name`` is an error type that the Director knows (clouds/errors.rb, external_cpi.rb).

Messages have the form ``cannot X: reason``, followed by what to do next if there is something to do.
"""

from __future__ import annotations


class CpiError(Exception):
    """A CPI call failed. The Director's reaction depends on ``type_name``. The Director reads ``ok_to_retry`` only if
    create_vm fails with a ``VMCreationFailedError``.
    """

    type_name = "Bosh::Clouds::CloudError"
    ok_to_retry = False

    def __init__(self, message: str, *, ok_to_retry: bool | None = None) -> None:
        super().__init__(message)
        if ok_to_retry is not None:
            self.ok_to_retry = ok_to_retry


class InputError(CpiError):
    """An invalid request, configuration, cloud property or network. The message names the invalid member."""

    type_name = "Bosh::Clouds::CpiError"


class NotSupportedError(CpiError):
    """The cluster or the VM does not support the method with these arguments."""

    type_name = "Bosh::Clouds::NotSupported"


class NotImplementedByCpiError(CpiError):
    """The CPI or this cluster does not implement the method. The Director then uses its fallback, if it has one."""

    type_name = "Bosh::Clouds::NotImplemented"


class VMNotFoundError(CpiError):
    type_name = "Bosh::Clouds::VMNotFound"


class VMCreationFailedError(CpiError):
    """A pod cannot start, or another object of a VM cannot be created.

    By the time create_vm reports this error, it has removed the VM's objects. The Director retries create_vm
    immediately if ``ok_to_retry`` is True.
    """

    type_name = "Bosh::Clouds::VMCreationFailed"


class DiskNotFoundError(CpiError):
    type_name = "Bosh::Clouds::DiskNotFound"


class DiskNotAttachedError(CpiError):
    type_name = "Bosh::Clouds::DiskNotAttached"


class ApiError(CpiError):
    """The API server rejected a request. ``status`` and ``reason`` come from its Status object."""

    def __init__(self, message: str, *, status: int, reason: str = "", ok_to_retry: bool | None = None) -> None:
        super().__init__(message, ok_to_retry=ok_to_retry)
        self.status = status
        self.reason = reason


class UnreachableError(CpiError):
    """The API server did not respond to any attempt within the time limit for all attempts (`timeouts.retry`)."""

    ok_to_retry = True
