"""Device memory that an engine gives up for a while (RollPacker 4.4; ROSE 4.1, activation)."""
