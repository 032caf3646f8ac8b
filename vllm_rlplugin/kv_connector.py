"""The old import path of :mod:`vllm_rlplugin.kv.connector`, which ``--kv-transfer-config`` of users may name."""

from vllm_rlplugin.kv.connector import KVConnectorRole, Loads, PrefixConnector

__all__ = ["KVConnectorRole", "Loads", "PrefixConnector"]
