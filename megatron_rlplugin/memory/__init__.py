"""What a rank of the trainer will need of memory, known before a device is touched: its own step, run on fake tensors."""
