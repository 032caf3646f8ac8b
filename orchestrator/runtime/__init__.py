"""Adapters behind the ports: Ray actors, child processes, and the assembly of a real run from them."""
