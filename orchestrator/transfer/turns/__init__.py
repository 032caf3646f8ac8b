"""Turns on their way to a worker in another process, and their answers: what is new in them, in binary."""

from orchestrator.transfer.turns.context_session import ContextSession
from orchestrator.transfer.turns.held_contexts import HeldContexts
from orchestrator.transfer.turns.turn_messages import (
    TurnMessage,
    decode_completions,
    decode_turns,
    encode_completions,
    encode_turns,
)

__all__ = [
    "ContextSession",
    "HeldContexts",
    "TurnMessage",
    "decode_completions",
    "decode_turns",
    "encode_completions",
    "encode_turns",
]
