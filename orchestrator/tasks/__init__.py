"""Tasks: what an agent is trained on. Importing this package imports nothing else."""
