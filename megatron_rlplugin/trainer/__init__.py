"""The trainer behind the ``Trainer`` port: one rank of it, on stock Megatron-Core."""
