"""Supervision in place of monit: reading monit files, and starting, watching, restarting and stopping job processes."""
