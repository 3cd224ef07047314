"""Processes of services: to which service each belongs (``keepers``), which one a service watches, and how all of them
are ended.
"""
