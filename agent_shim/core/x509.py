"""Finds the certificates in PEM text, and the start and end of their validity periods. Parses only as much DER (X.690,
RFC 5280) as is needed for this.

Certificates are not verified here.
"""

from __future__ import annotations

import base64
import binascii
import ssl
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from typing import NamedTuple

_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
_SEQUENCE, _VERSION, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18


class Validity(NamedTuple):
    """Start and end of a certificate's validity, in seconds since 1970."""

    begins: int
    ends: int


def blocks(pem: str) -> Iterator[str]:
    """Yield each certificate block of ``pem``, valid or not, in linear time. A block without an end line is skipped,
    and the blocks after it are still found.
    """
    end = 0
    while (begin := pem.find(_BEGIN, end)) >= 0 and (end := pem.find(_END, begin)) >= 0:
        begin, end = pem.rfind(_BEGIN, begin, end), end + len(_END)
        yield pem[begin:end]


def readable(pem: str) -> tuple[list[str], list[int]]:
    """Return the certificate blocks of ``pem`` that OpenSSL can read, and the numbers (starting at 1) of the blocks
    that it cannot read.
    """
    good, bad = [], []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for number, block in enumerate(blocks(pem), 1):
        try:
            context.load_verify_locations(cadata=block)
        except (ssl.SSLError, TypeError, ValueError):
            bad.append(number)
        else:
            good.append(f"{block}\n")
    return good, bad


def validity(pem: str) -> Validity:
    """Return the validity of the first certificate in ``pem``. Raises ``ValueError`` if none is readable."""
    for block in blocks(pem):
        return _block_validity(block)
    raise ValueError("there is no PEM certificate")


def validities(pem: str) -> list[Validity]:
    """Return the validity of all certificates in ``pem``, in order. Unreadable ones are skipped."""
    found = []
    for block in blocks(pem):
        with suppress(ValueError):
            found.append(_block_validity(block))
    return found


def _block_validity(block: str) -> Validity:
    """Return the validity of one PEM certificate. Raises ``ValueError`` if it is unreadable."""
    try:
        return _validity(base64.b64decode(block.removeprefix(_BEGIN).removesuffix(_END)))
    except (IndexError, binascii.Error, UnicodeDecodeError) as exc:
        raise ValueError("the certificate cannot be read") from exc


def _validity(certificate: bytes) -> Validity:
    """Read the validity from the DER structure Certificate { tbsCertificate { [0] version, serial, algorithm, issuer,
    validity { begin, end }, … } … }.
    """
    whole, _ = _inside(certificate, 0, _SEQUENCE)
    signed, _ = _inside(whole, 0, _SEQUENCE)
    at = 0
    if signed[0] == _VERSION:
        _, at = _inside(signed, 0, _VERSION)
    for _ in range(3):  # skip the serial number, the algorithm and the issuer
        _, at = _inside(signed, at)
    stamps, _ = _inside(signed, at, _SEQUENCE)
    begins, after = _inside(stamps, 0)
    ends, _ = _inside(stamps, after)
    return Validity(_seconds(stamps[0], begins), _seconds(stamps[after], ends))


def _inside(data: bytes, at: int, wanted: int | None = None) -> tuple[bytes, int]:
    """Return the content of the DER element at offset ``at``, and the offset of the next element. Raises ``ValueError``
    if the element's tag is not ``wanted``.
    """
    tag, size, at = data[at], data[at + 1], at + 2
    if wanted is not None and tag != wanted:
        raise ValueError("the certificate has an unexpected structure")
    if size & 0x80:  # a long element: the lower bits are the number of bytes that contain the size
        count = size & 0x7F
        size, at = int.from_bytes(data[at : at + count]), at + count
    if at + size > len(data):
        raise ValueError("the certificate is truncated")
    return data[at : at + size], at + size


def _seconds(tag: int, stamp: bytes) -> int:
    """Convert ``YYMMDDhhmmssZ`` (1950 to 2049) or ``YYYYMMDDhhmmssZ`` to seconds since 1970."""
    text = stamp.decode("ascii")
    if tag not in (_UTC_TIME, _GENERALIZED_TIME) or not text.endswith("Z"):
        raise ValueError("the certificate has no validity")
    if tag == _UTC_TIME:
        text = ("19" if text[:2] >= "50" else "20") + text
    return int(datetime.fromisoformat(f"{text[:8]}T{text[8:]}").timestamp())  # not strptime, which would use 0.3 MB
