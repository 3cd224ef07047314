"""Process supervision in place of monit: read monit files; start, watch, restart and stop processes."""
