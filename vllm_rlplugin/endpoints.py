"""The old import path of the endpoint plugin, which an entry point of an earlier installation may name."""

from vllm_rlplugin.server.control_endpoints import ControlPlugin

__all__ = ["ControlPlugin"]
