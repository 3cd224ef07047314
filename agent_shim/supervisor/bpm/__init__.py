"""bpm support: reads bpm.yml and runs its processes without runc."""
