"""Policies: plain classes, inputs in and decision out. No I/O, no clock, no threads. The same object runs in production,
in a test and in the simulator. Standard library and numpy only, because some run inside an engine."""
