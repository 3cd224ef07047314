"""Determines which processes belong to which service (``keepers``) and which of them a service watches, and ends all
processes of a service.
"""
