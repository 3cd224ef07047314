"""Tests that trusted CAs are installed for TLS clients on the machine, and removed again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agent_shim.demo.pki import Authority
from tests.root.conftest import Inside
from tests.support.machine import Machine

pytestmark = pytest.mark.root

PLACE = "usr/local/share/ca-certificates"
TRUSTED = "etc/ssl/certs/ca-certificates.crt"
COMMAND = "/usr/sbin/update-ca-certificates"
TELLING = """\
import logging
said = []
trusting = logging.getLogger("agent_shim.services.trusted_cas")
trusting.addFilter(lambda record: said.append(record.getMessage()) is None)
"""
FIRST, SECOND, THIRD = (Authority(f"authority {number}") for number in range(3))


@pytest.fixture(autouse=True)
def place(box: Machine) -> Iterator[None]:
    """Mount an empty directory for local CAs, and create the CA bundle, which then contains no local CA."""
    box.run(f"mount -t tmpfs -o mode=0755 tmpfs /{PLACE} && {COMMAND} -f >/dev/null")
    yield
    box.run(f"umount /{PLACE}")


@pytest.fixture
def fake(box: Machine) -> Iterator[None]:
    """Replace the command that updates the CA bundle with the script ``/mnt/fake``, which tests overwrite."""
    box.write("/mnt/fake", "", mode=0o755)
    box.run(f"mount --bind /mnt/fake {COMMAND}")
    yield
    box.run(f"umount {COMMAND}")


def install(*authorities: Authority, tries: int = 3, patience: float = 60, between: str = "and then\n") -> str:
    bundle = between.join(authority.ca for authority in authorities)
    return (
        "from agent_shim.services import trusted_cas\n"
        f"trusted_cas.UPDATE_TIMEOUT_S = {patience}\n"
        "trusted_cas.GRACE_S = 0.1\n"
        f"return await trusted_cas.TrustedCas(Paths()).install({bundle!r}, tries={tries})"
    )


def is_trusted(box: Machine, authority: Authority) -> bool:
    """Return True if OpenSSL trusts a server certificate from the CA, both via the CA bundle and via the directory of
    hashed links.
    """
    box.write("/mnt/leaf.pem", "")
    (box.root / "mnt/leaf.pem").write_text(authority.server().certificate)
    verify = "openssl verify -no-CAstore /mnt/leaf.pem >/dev/null 2>&1 && echo yes || echo no"
    both = [
        box.run(verify.replace("-no-CAstore", "-no-CAstore -no-CAfile -CApath /etc/ssl/certs")),
        box.run(verify.replace("-no-CAstore", f"-no-CAstore -no-CApath -CAfile /{TRUSTED}")),
    ]
    assert both[0] == both[1]
    return both[0] == "yes\n"


def names(box: Machine) -> list[str]:
    return sorted(path.name for path in (box.root / PLACE).iterdir())


def test_trusted_cas_replace_the_previous_cas(box: Machine, inside: Inside) -> None:
    (box.root / PLACE / "own.crt").write_text(THIRD.ca)
    assert inside(install(FIRST, SECOND)) is None
    assert names(box) == ["bosh-trusted-cert-1.crt", "bosh-trusted-cert-2.crt", "own.crt"]
    assert [is_trusted(box, each) for each in (FIRST, SECOND, THIRD)] == [True, True, True]

    assert inside(install(SECOND)) is None
    assert names(box) == ["bosh-trusted-cert-1.crt", "own.crt"]
    assert [is_trusted(box, each) for each in (FIRST, SECOND, THIRD)] == [False, True, True]

    assert inside(install()) is None
    assert names(box) == ["own.crt"]
    assert [is_trusted(box, each) for each in (FIRST, SECOND, THIRD)] == [False, False, True]


def test_invalid_trusted_ca_is_reported_and_skipped(box: Machine, inside: Inside) -> None:
    """If the invalid certificate were put into the bundle, some clients could not read any certificate in it."""
    bad = "-----BEGIN CERTIFICATE-----\nbm9uc2Vuc2U=\n-----END CERTIFICATE-----\n"
    said = inside(TELLING + install(FIRST, SECOND, between=bad).replace("return await", "await") + "\nreturn said")

    assert said == ["cannot trust certificate 2 of the Director: it is not a certificate; the others are used"]
    assert names(box) == ["bosh-trusted-cert-1.crt", "bosh-trusted-cert-2.crt"]
    assert [is_trusted(box, each) for each in (FIRST, SECOND)] == [True, True]


def test_unchanged_cas_are_not_installed_again(box: Machine, inside: Inside) -> None:
    """Directors send the same CAs to every machine whenever settings change."""
    inside(install(FIRST))
    before = (box.root / TRUSTED).stat()
    inside(install(FIRST))
    after = (box.root / TRUSTED).stat()

    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_new_container_installs_the_trusted_cas_again(box: Machine, inside: Inside) -> None:
    """The stored state says that the CAs are installed, but a new container has the image's trust store, without these
    CAs.
    """
    inside(install(FIRST))
    box.run(f"rm /{PLACE}/* && {COMMAND} -f >/dev/null")
    assert not is_trusted(box, FIRST)

    inside(install(FIRST, tries=1))
    assert is_trusted(box, FIRST)


@pytest.mark.parametrize("were", [[], [SECOND]])
def test_interrupted_ca_installation_is_completed(box: Machine, inside: Inside, were: list[Authority]) -> None:
    """The agent was killed after it had changed the certificate files, but before it had updated the bundle."""
    inside(install(*were))
    box.run(f"rm -f /{PLACE}/*")
    if not were:
        (box.root / PLACE / "bosh-trusted-cert-1.crt").write_text(FIRST.ca)
    inside(install(*([] if were else [FIRST])))

    assert [is_trusted(box, each) for each in (FIRST, SECOND)] == [not were, False]


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("tries", [1, 3])
def test_hanging_ca_update_command_is_killed_and_retried(box: Machine, inside: Inside, tries: int) -> None:
    (box.root / "mnt/fake").write_text("#!/bin/sh\ntrap '' TERM\necho $$ $* >>/mnt/calls\nsleep 1000\n")
    error = inside(install(FIRST, tries=tries, patience=0.2))
    calls = (box.root / "mnt/calls").read_text().splitlines()
    (box.root / "mnt/calls").unlink()
    (box.root / "mnt/fake").write_text("#!/bin/sh\necho again >>/mnt/calls\n")

    assert error == f"Updating certificates with retries: cannot run {COMMAND}: no result within 0 seconds"
    assert [call.split()[1:] for call in calls] == [["-f"]] * tries
    assert not [call for call in calls if (box.root / "proc" / call.split()[0]).exists()]
    assert inside(install(FIRST)) is None
    assert (box.root / "mnt/calls").read_text() == "again\n"
    (box.root / "mnt/calls").unlink()


@pytest.mark.usefixtures("fake")
def test_ca_update_succeeds_at_the_second_attempt(box: Machine, inside: Inside) -> None:
    (box.root / "mnt/fake").write_text("#!/bin/sh\n[ -e /mnt/once ] || { touch /mnt/once; echo no; exit 3; }\n")

    assert inside(install(FIRST)) is None


def test_missing_ca_update_command_is_an_error_only_if_there_are_cas(box: Machine, inside: Inside) -> None:
    box.run("mount --bind /dev/null /usr/sbin/update-ca-certificates")
    try:
        assert inside(install()) is None
        assert inside(install(FIRST)) == (
            f"Updating certificates with retries: cannot run {COMMAND}: Permission denied"
        )
    finally:
        box.run("umount /usr/sbin/update-ca-certificates")


def test_unwritable_ca_directory_is_reported(box: Machine, inside: Inside) -> None:
    box.run(f"mount -o remount,ro /{PLACE}")

    error = inside(install(FIRST))
    assert error.startswith(f"cannot install trusted certificates: cannot write /{PLACE}/bosh-trusted-cert-1.crt: ")
