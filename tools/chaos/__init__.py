"""Fault injection: real parts are broken, and the reliability invariants are checked after each fault."""
