"""Benchmarks: a parity check first, then speed, as ratios within one run."""
