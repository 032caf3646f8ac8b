"""How the packed data sets of the benchmarks were recorded."""
