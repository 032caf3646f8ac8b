"""Where the next turn goes, and which request goes first (ROSE 4.3; RollArt 5.2; Heddle 4.2)."""
