"""The HTTP side of ``vllm serve --plugin rl-coserve``: control endpoints, leases, metrics."""
