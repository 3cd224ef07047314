"""Values, errors and helpers that every floor uses."""
