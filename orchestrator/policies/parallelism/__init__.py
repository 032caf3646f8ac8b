"""Over how many devices an engine runs, and what its steps cost (RollPacker 4; Heddle 6.2)."""
