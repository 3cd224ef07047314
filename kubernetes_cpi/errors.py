"""Errors of the CPI, one class for each type that a Director knows (clouds/errors.rb, external_cpi.rb).

Messages read ``cannot X: why`` and end with a next step if there is one.
"""

from __future__ import annotations


class CpiError(Exception):
    """A failed call. The Director decides by ``type_name`` and retries by ``ok_to_retry``."""

    type_name = "Bosh::Clouds::CloudError"
    ok_to_retry = False

    def __init__(self, message: str, *, ok_to_retry: bool | None = None) -> None:
        super().__init__(message)
        if ok_to_retry is not None:
            self.ok_to_retry = ok_to_retry


class InputError(CpiError):
    """An invalid request, configuration, cloud property or network. The message names the place."""

    type_name = "Bosh::Clouds::CpiError"


class NotSupportedError(CpiError):
    """A method that this cluster or VM does not support for these arguments."""

    type_name = "Bosh::Clouds::NotSupported"


class NotImplementedByCpiError(CpiError):
    """A method that the CPI or this cluster does not have. Directors fall back to another way if they know one."""

    type_name = "Bosh::Clouds::NotImplemented"


class VMNotFoundError(CpiError):
    type_name = "Bosh::Clouds::VMNotFound"


class VMCreationFailedError(CpiError):
    """A VM that could not be created and left nothing behind. With ``ok_to_retry`` a Director retries at once."""

    type_name = "Bosh::Clouds::VMCreationFailed"


class DiskNotFoundError(CpiError):
    type_name = "Bosh::Clouds::DiskNotFound"


class DiskNotAttachedError(CpiError):
    type_name = "Bosh::Clouds::DiskNotAttached"


class ApiError(CpiError):
    """A request that the API server refused. ``status`` and ``reason`` come from its Status object."""

    def __init__(self, message: str, *, status: int, reason: str = "", ok_to_retry: bool | None = None) -> None:
        super().__init__(message, ok_to_retry=ok_to_retry)
        self.status = status
        self.reason = reason


class UnreachableError(CpiError):
    """An API server that did not respond within the time limit of all attempts."""

    ok_to_retry = True
