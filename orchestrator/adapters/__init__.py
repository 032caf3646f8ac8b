"""The rollout side for training loops of others: their own classes, in front of our proxy and workers. See docs/adapters.md."""
