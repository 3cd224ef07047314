"""Decompresses archives in all formats that GNU tar detects (src/buffer.c).

Gzip is decompressed in this process, which is faster than running a program. For the other formats, this module runs
the same programs as tar.
"""

from __future__ import annotations

import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, BinaryIO, Final, Self

from isal import igzip

from agent_shim.core.errors import ArchiveError
from agent_shim.host import files
from agent_shim.host.command import ENVIRONMENT

GZIP: Final = b"\x1f\x8b"
PROGRAMS: Final[Mapping[bytes, tuple[str, ...]]] = {
    b"\x1f\x9d": ("gzip", "-dc"),  # the format of the compress program
    b"BZh": ("bzip2", "-dc"),
    b"\xfd7zXZ": ("xz", "-dc"),
    b"\x5d\0\0": ("xz", "-dc", "--format=lzma"),
    b"LZIP": ("lzip", "-dc"),
    b"\x89LZO": ("lzop", "-dc"),
    b"\x28\xb5\x2f\xfd": ("zstd", "-dc"),
}
"""Programs that decompress, keyed by the first bytes of the archive."""
USTAR: Final = slice(257, 262)
"""Position of ``ustar`` in the first header of an uncompressed archive."""
MAX_TEXT_BYTES: Final = 1000


def is_compressed(source: BinaryIO) -> bool:
    """Return True unless the file is an uncompressed tar (bosh-utils fileutil/tarball_compressor.go,
    IsNonCompressedTarball).
    """
    return _start(source)[USTAR] != b"ustar"


def is_gzip(source: BinaryIO) -> bool:
    """Return True if a file starts with the gzip signature. The file is rewound."""
    return _start(source).startswith(GZIP)


def _start(source: BinaryIO) -> bytes:
    """Return the first block of a file, and rewind the file."""
    source.seek(0)
    block = source.read(tarfile.BLOCKSIZE)
    source.seek(0)
    return block


@contextmanager
def decompressed(source: BinaryIO) -> Iterator[Any]:
    """Yield a stream of the decompressed tar file ``source`` that supports ``read``, ``tell`` and forward ``seek``.

    The stream's methods raise ``ArchiveError`` or, for gzip, the errors of ``isal``.
    """
    start = _start(source)
    program = next((argv for magic, argv in PROGRAMS.items() if start.startswith(magic)), None)
    # Check this first, because a tar header begins with a file name, which may look like the signature of a compressed
    # file.
    if start[USTAR] == b"ustar":
        yield source
    elif start.startswith(GZIP):
        yield igzip.IGzipFile(fileobj=source)  # type: ignore[no-untyped-call]
    elif program is None:
        yield source  # either an old tar format without ``ustar``, or not an archive, which ``tarfile`` will report
    else:
        with _Piped(source, program) as piped:
            yield piped


class _Piped:
    """A stream of the output that ``program`` produces from the file ``source``."""

    def __init__(self, source: BinaryIO, program: tuple[str, ...]) -> None:
        self._name = program[0]
        self._offset = 0
        with ExitStack() as stack:
            self._messages = stack.enter_context(tempfile.TemporaryFile())
            # Open the file again for the program. If the program shared the file position with ``source``, its reads
            # would move that position, and the buffer of ``source`` would be wrong.
            stdin = stack.enter_context(open(f"/proc/self/fd/{source.fileno()}", "rb"))
            try:
                self._process = subprocess.Popen(
                    program, env=ENVIRONMENT, stdin=stdin, stdout=subprocess.PIPE, stderr=self._messages
                )
            except FileNotFoundError:
                raise ArchiveError(f"it is compressed, and there is no program {self._name}") from None
            self._stack = stack.pop_all()
        assert self._process.stdout
        self._output = self._process.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # if the archive is invalid, the program may still be running
        self._output.close()
        self._process.wait()
        self._stack.close()

    def tell(self) -> int:
        return self._offset

    def seek(self, offset: int) -> int:
        """Read and discard everything up to ``offset``."""
        while self._offset < offset and self.read(min(offset - self._offset, files.CHUNK_BYTES)):
            pass
        return self._offset

    def read(self, size: int) -> bytes:
        """Read ``size`` bytes, or fewer at the end of the stream. Raises ``ArchiveError`` if the program has failed by
        then.
        """
        data = self._output.read(size)
        self._offset += len(data)
        if len(data) < size and (status := self._process.wait()):
            self._messages.seek(0)
            text = self._messages.read(MAX_TEXT_BYTES).decode(errors="replace").partition("\n")[0]
            raise ArchiveError(text or f"{self._name} ended with {status}")
        return data
