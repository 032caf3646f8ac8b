"""Weight changes on the wire: sparse, bit-exact, entropy-coded. A leaf of its own: NumPy and xxhash, a C library if built.

change = encode(old, new, "bfloat16")        # uint8 arrays; change.encoding goes into ShardKey.encoding
log = apply(change.data, base)               # in place, all or nothing
undo(log)                                    # the old bits

for positions, step in steps(change.data): ...   # for a reader that hosts a slice; advance(values, step)
"""

from orchestrator.transfer.delta.codec import Change, UndoLog, apply, changes, encode, encode_steps, sizes, steps, undo
from orchestrator.transfer.delta.format import ENCODINGS, NEEDS_BASE, Header, open_change
from orchestrator.transfer.delta.line import advance, retreat, steps_between
from orchestrator.transfer.delta.native import native_status

__all__ = [
    "ENCODINGS",
    "NEEDS_BASE",
    "Change",
    "Header",
    "UndoLog",
    "advance",
    "apply",
    "changes",
    "encode",
    "encode_steps",
    "native_status",
    "open_change",
    "retreat",
    "sizes",
    "steps",
    "steps_between",
    "undo",
]
