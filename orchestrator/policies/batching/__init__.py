"""What a batch is made of: rounds, staleness, filters, modes (RollPacker 3; RollArt 6)."""
