"""The memory behind pages: host or CUDA, reserved once, mapped and unmapped."""
