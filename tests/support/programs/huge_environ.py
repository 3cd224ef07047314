"""huge_environ.py PIDFILE [GIB]: claim to have huge arguments and a huge environment, write the pid, and sleep.

The arguments and the environment share an area of GIB gibibytes (by default 16 tebibytes). PR_SET_MM_MAP needs no
privilege, so any process may declare where its environment begins and ends.
"""

import ctypes
import os
import signal
import struct
import sys
from pathlib import Path

PR_SET_MM, PR_SET_MM_MAP = 35, 14
NORESERVE, PRIVATE_ANONYMOUS, PROT_READ = 0x4000, 0x22, 1
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
size = (int(sys.argv[2]) if len(sys.argv) > 2 else 16 << 10) << 30
address = libc.mmap(None, size, PROT_READ, PRIVATE_ANONYMOUS | NORESERVE, -1, 0)
if address in (None, 2**64 - 1):
    sys.exit(f"cannot map: {ctypes.get_errno()}")
fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
# The positions are those in proc(5), which counts from 1. ``fields`` begins with the third field.
code_start, code_end, stack, data_start, data_end, brk_start = (int(fields[at - 3]) for at in (26, 27, 28, 45, 46, 47))
brk = libc.sbrk
brk.restype = ctypes.c_void_p
ends = [address, address + size]
layout = struct.pack(
    "11QQIi", code_start, code_end, data_start, data_end, brk_start, brk(0), stack, *ends, *ends, 0, 0, -1
)
if libc.prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.c_char_p(layout), ctypes.c_ulong(len(layout)), 0):
    sys.exit(f"cannot say so: {ctypes.get_errno()}")
Path(sys.argv[1]).write_text(f"{os.getpid()}\n")
signal.pause()
