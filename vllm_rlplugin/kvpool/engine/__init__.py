"""A vLLM engine whose KV cache lies in a pool."""
