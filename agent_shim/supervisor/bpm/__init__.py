"""Parsers for bpm.yml, and for the commands ``bpm start`` and ``bpm stop`` in monit files."""
