"""``bosh-blobstore-s3 -c CONFIG get ID FILE`` and ``… put FILE ID``: a stemcell's command, reimplemented with boto3.

Runs with the interpreter in ``.tools``. CONFIG contains the options for an ``s3`` blobstore as the Director writes
them. Only the options for a store on this machine are supported. On failure the program exits with code 1 and a message
that contains the secret key, so that tests can check whether callers remove the key when they quote the message.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import boto3  # type: ignore[import-not-found, unused-ignore]
from botocore.config import Config  # type: ignore[import-not-found, unused-ignore]
from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-not-found, unused-ignore]


def main() -> None:
    flag, config, what, first, second = sys.argv[1:]
    assert flag == "-c"
    options = json.loads(Path(config).read_text())
    assert options["credentials_source"] == "static"
    scheme = "https" if options["use_ssl"] else "http"
    client = boto3.client(
        "s3",
        endpoint_url=f"{scheme}://{options['host']}:{options['port']}",
        region_name=options["region"],
        aws_access_key_id=options["access_key_id"],
        aws_secret_access_key=options["secret_access_key"],
        verify=options["ssl_verify_peer"],
        config=Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}),
    )
    try:
        if what == "get":
            client.download_file(options["bucket_name"], first, second)
        else:
            client.upload_file(first, options["bucket_name"], second)
    except (BotoCoreError, ClientError, OSError) as exc:
        sys.exit(f"cannot {what}: {exc}; key {options['secret_access_key']}")


main()
