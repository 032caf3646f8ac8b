"""Programs that measure inside an engine's process, run by benchmarks and tests."""
