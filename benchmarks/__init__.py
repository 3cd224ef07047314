"""What an agent costs and how long it makes one wait, measured through the wire alone."""
