"""Serving clusters in virtual time, and the simulated workers that borrow from them (ROSE)."""
