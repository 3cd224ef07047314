"""Parsers for bpm.yml, and for the ``bpm start`` and ``bpm stop`` commands in monit files."""
