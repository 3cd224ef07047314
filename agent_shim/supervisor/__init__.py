"""Process supervision in place of monit: read monit files. Start, watch, restart and stop processes."""
