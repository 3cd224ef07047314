"""The worker: a separate process that executes heavy requests. When it exits, the system gets all of its memory back.

``python -m agent_shim.bulk.worker PARENT`` reads requests from standard input, one line each, executes them one after
the other, and writes the answers to standard output (``bulk.protocol``; the other end is ``bulk.workers``). Expected
failures are part of the answer. After any other failure, the worker exits with a traceback. A worker removes its
temporary files when it is terminated or when its parent dies.

An action has to wait until its worker has started, so each kind of request imports only the modules that it needs.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from agent_shim.bulk.protocol import CopyTree, Done, Get, Install, Outcome, Pack, Progress, Put, Request, Rotate
from agent_shim.core.errors import HostError, ShimError
from agent_shim.core.paths import Paths
from agent_shim.host import files, process
from agent_shim.host.descriptors import closing

PR_SET_PDEATHSIG: Final = 1  # include/uapi/linux/prctl.h
OOM_SCORE: Final = 500
"""Minimum oom_score_adj for a worker."""


def main() -> int:
    """Execute requests until standard input ends. Return the exit code, which is 143 after SIGTERM."""
    become_worker(int(sys.argv[1]))
    while line := sys.stdin.buffer.readline():
        temps: list[Path] = []
        try:
            done = asyncio.run(execute(msgspec.json.decode(line, type=Request), temps))
        except asyncio.CancelledError:
            return 128 + signal.SIGTERM
        finally:
            # The files can be removed here, because no thread is still writing to them. Each thread fails when its file
            # is closed, and the event loop has waited for all threads.
            for temp in temps:
                files.remove_tree(temp)
        _send(done)
    return 0


def become_worker(parent: int) -> None:
    """Turn this process into a worker that dies with ``parent``, is killed by the OOM killer before the agent, and does
    not dump core.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent died before the call above
        raise SystemExit(128 + signal.SIGTERM)
    process.disable_core_dumps(for_good=True)
    with suppress(OSError, ValueError):
        score = Path("/proc/self/oom_score_adj")
        # Do not lower a higher score. The kubelet may give all processes in a container a score of up to 1000.
        score.write_text(str(max(OOM_SCORE, int(score.read_text()))))


def _send(message: Progress | Done) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


async def execute(request: Request, temps: list[Path]) -> Done:
    """Execute ``request``. SIGTERM cancels it. Temporary files, which the caller has to remove even after a failure,
    are added to ``temps``.
    """
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await _execute(request, temps)


async def _execute(request: Request, temps: list[Path]) -> Done:
    """Execute ``request``. Expected failures are returned as ``Done.error`` instead of being raised."""
    try:
        match request:
            case Install():
                from agent_shim.bulk import install

                return Done(outcomes=await install.install(request, temps))
            case Get():
                return await _get(request)
            case Put():
                return await _put(request)
            case Pack():
                packed = await _pack(request)
                if request.put is None:
                    return packed
                _send(Progress("uploading"))
                put = await _execute(request.put, temps)
                return msgspec.structs.replace(packed, blob_id=put.blob_id, put_error=put.error)
            case CopyTree():
                return _copy_tree(request)
            case Rotate():
                return _rotate(request)
    except (ShimError, HostError) as exc:
        return Done(error=str(exc))
    except OSError as exc:
        return Done(error=_system_error_text(request, exc))


def _system_error_text(request: Request, exc: OSError) -> str:
    """Describe a failed system call. An error without a file name probably comes from writing the requested file, so
    describe it with that file's path and the free space.
    """
    if exc.filename is not None or not isinstance(request, Get | Pack):
        return f"cannot use {exc.filename or 'a file'}: {exc.strerror}"
    free = shutil.disk_usage(Path(request.path).parent).free
    return f"cannot write {request.path}: {exc.strerror}, {free // (1 << 20)} MiB are free"


async def _get(request: Get) -> Done:
    """Download a blob and, once its digest is verified, store it at the requested path."""
    from agent_shim.bulk.blobs import Blobs

    async with Blobs(request.store, Paths(Path(request.base))) as blobs, blobs.fetched(request.source) as file:
        with files.replacing(Path(request.path), mode=request.mode) as out:
            # Use lseek, because seek() on the file object may only move the position in its buffer, not that of the
            # descriptor.
            os.lseek(file.fileno(), 0, os.SEEK_SET)
            files.copy_data(file.fileno(), out.fileno())
    return Done()


async def _put(request: Put) -> Done:
    """Upload a file, and answer with the id of the new blob."""
    from agent_shim.bulk.blobs import Blobs

    async with Blobs(request.store, Paths(Path(request.base))) as blobs:
        return Done(blob_id=await blobs.put(Path(request.path), request.signed_url, request.headers))


async def _pack(request: Pack) -> Done:
    from agent_shim.bulk import packing

    # A file that is only uploaded is not synced, because it is removed afterwards. If the blobstore is local, the
    # provider syncs its own copy.
    with files.replacing(Path(request.path), mode=request.mode, is_synced=request.put is None) as out:
        newest, remarks = request.newest, request.remarks
        digest = await asyncio.to_thread(
            packing.pack, out, request.trees, compressed=request.compressed, newest=newest, remarks=remarks
        )
    sha1, sha512 = (part.value for part in digest.digests)
    return Done(sha1=sha1, sha512=sha512)


def _copy_tree(request: CopyTree) -> Done:
    from agent_shim.bulk import copytree

    # Let SIGTERM kill the process immediately. No clean-up is needed, because the next copy begins by emptying the
    # target.
    asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
    losses = copytree.mirror(Path(request.source), Path(request.target), spared=request.spared, report=_send)
    return Done(losses=losses)


def _rotate(request: Rotate) -> Done:
    from agent_shim.bulk import copytruncate

    # Let SIGTERM kill the process immediately. A log is truncated only once its archive contains everything, so at
    # worst, the archive has no checksum.
    asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
    outcomes = []
    with closing(os.open(request.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as root:
        for path in request.paths:
            try:
                moved = copytruncate.rotate(root, os.fsdecode(path), request.keep, request.most)
                outcomes.append(Outcome(left_out=moved.left_out))
            except HostError as exc:
                outcomes.append(Outcome(error=str(exc)))
    return Done(outcomes=outcomes)


if __name__ == "__main__":
    os._exit(main())  # a regular exit takes 35 ms to free memory that the kernel frees anyway
