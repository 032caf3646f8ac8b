"""Rollout and training on the same devices, and training while the rollout runs (RollPacker 4.4)."""
