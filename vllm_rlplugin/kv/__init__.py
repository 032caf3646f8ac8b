"""KV blocks that move between engines (Heddle 5.3)."""
