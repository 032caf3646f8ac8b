"""Gradients from trajectories as they finish (RollPacker 4.4)."""
