"""Rollout workers on serving GPUs that others own: found, leased, exchanged (ROSE 4). See docs/coserving.md."""
