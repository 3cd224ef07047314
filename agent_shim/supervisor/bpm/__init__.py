"""bpm: reading bpm.yml and running its processes without runc."""
