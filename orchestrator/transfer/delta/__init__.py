"""Weight changes on the wire: sparse, bit-exact, entropy-coded. A leaf of its own: NumPy and xxhash, a C library if built.

change = encode(old, new, "bfloat16")        # uint8 arrays; change.encoding goes into ShardKey.encoding
log = apply(change.data, base)               # in place, all or nothing
undo(log)                                    # the old bits

for edit in edits(change.data): ...          # for a reader that hosts a slice: edit.positions, edit.new(old values)
opened = open_change(change.data)            # checks it once: all of these take it instead of the bytes
"""

from orchestrator.transfer.delta.bf16_line import advance_values, retreat_values, steps_between
from orchestrator.transfer.delta.delta_codec import (
    ShardChange,
    ShardEdit,
    UndoLog,
    apply_change,
    encode_change,
    encode_steps,
    encoded_sizes,
    read_changes,
    read_edits,
    read_steps,
    undo_change,
)
from orchestrator.transfer.delta.delta_format import ENCODINGS, NEEDS_BASE, ChangeHeader, OpenedChange, open_change
from orchestrator.transfer.delta.native_codec import native_status

__all__ = [
    "ENCODINGS",
    "NEEDS_BASE",
    "ChangeHeader",
    "OpenedChange",
    "ShardChange",
    "ShardEdit",
    "UndoLog",
    "advance_values",
    "apply_change",
    "encode_change",
    "encode_steps",
    "encoded_sizes",
    "native_status",
    "open_change",
    "read_changes",
    "read_edits",
    "read_steps",
    "retreat_values",
    "steps_between",
    "undo_change",
]
