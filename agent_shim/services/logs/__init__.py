"""Log files of jobs: archives for ``fetch_logs``, one stream of lines, rotation."""
