"""Support for bpm: reads bpm.yml and runs its processes without runc."""
