"""Which worker or device gets what (Heddle 5; RollArt 5.2)."""
