"""Losses and advantages: pure functions of log-probs and rewards."""
