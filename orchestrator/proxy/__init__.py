"""The gateway between environments and rollout workers (RollArt 6.1), and what may be added to it. See :mod:`.gateway`."""
