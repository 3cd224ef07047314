"""The languages of bpm: bpm.yml, and the commands ``bpm start`` and ``bpm stop`` in monit files."""
