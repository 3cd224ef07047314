"""Processes of services: whose each is and why (``evidence``), which is watched, and the proof that none is left."""
