"""Probes of Megatron-Core and of the plugin in it."""
