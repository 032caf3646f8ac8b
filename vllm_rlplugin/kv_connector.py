"""The old import path of :mod:`vllm_rlplugin.kv.connector`, which ``--kv-transfer-config`` of users may name."""

from vllm_rlplugin.kv.connector import BlockLoads, KVConnectorRole, PrefixConnector

__all__ = ["BlockLoads", "KVConnectorRole", "PrefixConnector"]
