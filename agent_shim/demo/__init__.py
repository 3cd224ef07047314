"""An agent's peers for the demo, the tests and the benchmarks: a bus, a Director and a Health Monitor."""
