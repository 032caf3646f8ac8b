"""What counts how much in a training step, and whether it still learns."""
