"""Benchmarks: ratios against a named baseline, interleaved in one run."""
