"""Errors of the CPI, one class for each type that a Director knows (clouds/errors.rb, external_cpi.rb).

Texts read ``cannot X: why`` and end with a next step where there is one.
"""

from __future__ import annotations


class CpiError(Exception):
    """Any failure of a call; ``type_name`` is what the Director decides by, ``ok_to_retry`` what it retries by."""

    type_name = "Bosh::Clouds::CloudError"
    ok_to_retry = False

    def __init__(self, message: str, *, ok_to_retry: bool | None = None) -> None:
        super().__init__(message)
        if ok_to_retry is not None:
            self.ok_to_retry = ok_to_retry


class InputError(CpiError):
    """The request, the configuration, cloud properties or networks are wrong; the text names the place."""

    type_name = "Bosh::Clouds::CpiError"


class NotSupportedError(CpiError):
    """The CPI has the method, but this cluster or VM does not allow what is asked."""

    type_name = "Bosh::Clouds::NotSupported"


class NotImplementedByCpiError(CpiError):
    """The CPI, or this cluster, does not have the method; Directors use another way where they know one."""

    type_name = "Bosh::Clouds::NotImplemented"


class VMNotFoundError(CpiError):
    type_name = "Bosh::Clouds::VMNotFound"


class VMCreationFailedError(CpiError):
    """No VM was made and nothing of it is left; with ``ok_to_retry`` a Director tries again at once."""

    type_name = "Bosh::Clouds::VMCreationFailed"


class DiskNotFoundError(CpiError):
    type_name = "Bosh::Clouds::DiskNotFound"


class DiskNotAttachedError(CpiError):
    type_name = "Bosh::Clouds::DiskNotAttached"


class ApiError(CpiError):
    """The API server refused a request; ``status`` and ``reason`` are those of its Status object."""

    def __init__(self, message: str, *, status: int, reason: str = "", ok_to_retry: bool | None = None) -> None:
        super().__init__(message, ok_to_retry=ok_to_retry)
        self.status = status
        self.reason = reason


class UnreachableError(CpiError):
    """The API server did not answer within the bound of all attempts."""

    ok_to_retry = True
