"""Determines which processes belong to which service (``keepers``) and which of them a service watches, and terminates
all processes of a service.
"""
