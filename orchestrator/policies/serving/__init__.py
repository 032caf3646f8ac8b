"""Rollouts beside serving engines under their SLOs (ROSE 4)."""
