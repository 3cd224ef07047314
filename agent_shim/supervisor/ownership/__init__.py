"""Processes of services: whose each is (``keepers``), which of them a service watches, and the end of all of them."""
