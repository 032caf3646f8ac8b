"""Serving and rollout on one device: slack, admission, lending (ROSE 4.1)."""
