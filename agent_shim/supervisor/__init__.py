"""Process supervision in place of monit: reads monit files, and starts, watches, restarts and stops processes."""
