"""Errors of the CPI, one class for each type that a Director knows (clouds/errors.rb, external_cpi.rb).

Messages read ``cannot X: why`` and end with a next step if there is one.
"""

from __future__ import annotations


class CpiError(Exception):
    """A failed call. The Director's reaction depends on ``type_name``; it retries only if ``ok_to_retry`` is set."""

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
    """The cluster or VM does not support the method for these arguments."""

    type_name = "Bosh::Clouds::NotSupported"


class NotImplementedByCpiError(CpiError):
    """The CPI or this cluster lacks the method. Directors then use a fallback if they have one."""

    type_name = "Bosh::Clouds::NotImplemented"


class VMNotFoundError(CpiError):
    type_name = "Bosh::Clouds::VMNotFound"


class VMCreationFailedError(CpiError):
    """A VM could not be created, and all its objects were removed. With ``ok_to_retry`` a Director retries at once."""

    type_name = "Bosh::Clouds::VMCreationFailed"


class DiskNotFoundError(CpiError):
    type_name = "Bosh::Clouds::DiskNotFound"


class DiskNotAttachedError(CpiError):
    type_name = "Bosh::Clouds::DiskNotAttached"


class ApiError(CpiError):
    """The API server refused a request. ``status`` and ``reason`` come from its Status object."""

    def __init__(self, message: str, *, status: int, reason: str = "", ok_to_retry: bool | None = None) -> None:
        super().__init__(message, ok_to_retry=ok_to_retry)
        self.status = status
        self.reason = reason


class UnreachableError(CpiError):
    """The API server did not respond within the time limit of all attempts."""

    ok_to_retry = True
