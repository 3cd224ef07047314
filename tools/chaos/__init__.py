"""Programs that look for faults in the agent and for gaps in its tests: fuzzing, mutation testing and a soak test."""
