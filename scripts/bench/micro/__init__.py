"""Benchmarks of one mechanism each: overheads, pauses, bytes, soaks."""
