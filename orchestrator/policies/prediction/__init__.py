"""How long trajectories will be (Heddle 4.1)."""
