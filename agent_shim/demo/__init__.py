"""What stands around an agent in the demo, the tests and the benchmarks: a bus, a Director, a Health Monitor."""
