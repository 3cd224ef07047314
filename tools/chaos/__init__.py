"""The scorecard of reliability as a program: faults on real parts, and the invariants checked after each of them."""
