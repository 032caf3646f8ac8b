"""Benchmarks that answer to a figure of the papers."""
