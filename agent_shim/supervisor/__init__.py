"""Replaces monit: reads monit files, and starts, watches, restarts and stops job processes."""
