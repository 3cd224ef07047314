"""The scorecard of reliability as a program: faults on real parts, and what has to hold after each of them."""
