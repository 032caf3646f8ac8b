"""An LLM judge whose layers come from host memory (RollPacker 4.3)."""
