"""Determines which processes belong to a service (``keepers``) and which one it watches (``process_finder``), and
terminates all of a service's processes.
"""
