"""Stands in for a stemcell's ``bosh-blobstore-gcs`` and ``bosh-blobstore-azure-storage``, storing blobs in a directory.

``PROGRAM DIRECTORY WANTED -c CONFIG get ID FILE`` or ``… put FILE ID``: CONFIG must contain exactly the options WANTED
(JSON). Otherwise the program exits with code 1, as if the store had rejected the credentials.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

directory, wanted, flag, config, what, first, second = sys.argv[1:]
assert flag == "-c"
if json.loads(Path(config).read_text()) != json.loads(wanted):
    sys.exit("403: these options are not those of an account")
if what == "get":
    if not Path(directory, first).exists():
        sys.exit(f"404: there is no {first}")
    shutil.copyfile(Path(directory, first), second)
else:
    shutil.copyfile(first, Path(directory, second))
