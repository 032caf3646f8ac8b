"""Probes of vLLM and of the plugin in it."""
