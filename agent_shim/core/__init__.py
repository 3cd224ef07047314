"""Values, errors and helpers that all other packages use."""
