"""Job log files: archives for ``fetch_logs``, a combined stream of lines, and rotation."""
