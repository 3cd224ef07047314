"""Tests which symlinks in a path are followed.

``test_files.py`` tests how directories are created through symlinks, and ``root/test_attacks.py`` uses real users'
symlinks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections import deque
from pathlib import Path

import pytest

from agent_shim.host import trusted_path, user_namespace


def status(mode: int, owner: int) -> os.stat_result:
    return os.stat_result((mode, 1, 1, 1, owner, 0, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("us", "owner", "of_directory", "mode", "is_followed"),
    [
        (0, 0, 0, 0o755, True),
        (0, 1000, 0, 0o755, True),
        (0, 1000, 1000, 0o755, False),
        (0, 0, 1000, 0o755, False),
        (0, 0, 0, 0o777, False),
        (0, 0, 0, 0o775, False),
        (0, 0, 0, 0o757, False),
        (0, 0, 0, 0o1777, True),
        (0, 1000, 0, 0o1777, False),
        (1000, 1000, 1000, 0o777, True),
        (1000, 0, 1001, 0o755, True),
        (1000, 1001, 1000, 0o755, True),
        (1000, 1001, 1000, 0o775, False),
        (1000, 1000, 1000, 0o775, True),
    ],
)
def test_trusted_path_rejects_symlinks_that_an_untrusted_user_may_have_created(
    monkeypatch: pytest.MonkeyPatch, us: int, owner: int, of_directory: int, mode: int, is_followed: bool
) -> None:
    """An agent that runs as root also rejects a symlink that another user may have moved into the directory."""
    monkeypatch.setattr(os, "geteuid", lambda: us)
    monkeypatch.setattr(user_namespace, "is_inside", lambda: False)
    link, directory = status(stat.S_IFLNK | 0o777, owner), status(stat.S_IFDIR | mode, of_directory)
    with contextlib.nullcontext() if is_followed else pytest.raises(OSError, match="contains a link, 'x'"):
        trusted_path.refuse_link("x", link, directory)


def test_trusted_path_in_a_user_namespace_follows_symlinks_owned_by_outside_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Users outside the namespace, such as the machine's root, appear as the overflow user."""
    monkeypatch.setattr(user_namespace, "overflow_user", lambda: 65534)
    for is_inside, more in ((False, set()), (True, {65534})):
        monkeypatch.setattr(user_namespace, "is_inside", lambda is_inside=is_inside: is_inside)
        assert trusted_path.trusted_users() == {0, os.geteuid()} | more


def test_trusted_path_limits_the_number_of_symlinks_like_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    for number in range(41):
        (tmp_path / str(number + 1)).symlink_to(str(number) if number % 2 else tmp_path / str(number))
    for make in (None, 0o700):
        os.close(trusted_path.hold(tmp_path / "40" / "..", make=make))
        with pytest.raises(OSError, match=os.strerror(errno.ELOOP)) as caught:
            trusted_path.hold(tmp_path / "41" / "..", make=make)
        assert caught.value.filename == str(tmp_path / "41" / "..")


def test_trusted_path_reports_a_root_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the open fails, no descriptor may be closed twice, because another thread may have got the same number in
    the meantime.
    """
    (tmp_path / "link").symlink_to("/etc")
    opened = os.open

    def refuse(path: str, flags: int, *more: int, dir_fd: int | None = None) -> int:
        if path == "/" and dir_fd is not None:
            raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))
        return opened(path, flags, *more, dir_fd=dir_fd)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        with pytest.raises(OSError, match=os.strerror(errno.ENFILE)):
            trusted_path.hold(tmp_path / "link")


def test_trusted_path_may_start_from_an_open_descriptor() -> None:
    assert trusted_path.start("/proc/self/fd/7/a/b") == ("/proc/self/fd/7", deque(["a", "b"]))
    assert trusted_path.start("/proc/self/fd/x/a") == ("/", deque(["proc", "self", "fd", "x", "a"]))
    assert trusted_path.start("/a/./b/") == ("/", deque(["a", "b"]))
    assert trusted_path.start("a") == (".", deque(["a"]))
