"""Bounds of one episode: contexts, time limits, what a run is bound by."""
