"""Fault injection into real parts, with a check of the reliability invariants after each fault."""
