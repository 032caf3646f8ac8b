"""Over how many devices each rollout engine runs, changed between steps (RollPacker 4.2, Heddle 6.2)."""
