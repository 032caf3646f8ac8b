"""Environments: where they run, how many there are, and how they are kept in order (RollArt 6.1 and 8)."""
