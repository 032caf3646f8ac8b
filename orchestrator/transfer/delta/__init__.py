"""Weight changes on the wire: sparse, bit-exact, entropy-coded. A leaf of its own: NumPy and xxhash, a C library if built.

:mod:`.delta_codec` is what its users import:

change = encode_change(old, new, "bfloat16") # uint8 arrays; change.encoding goes into ShardKey.encoding
log = apply_change(change.data, base)        # in place, all or nothing
undo_change(log)                             # the old bits

for edit in read_edits(change.data): ...     # for a reader that hosts a slice: edit.positions, edit.new_values(old values)
opened = open_change(change.data)            # checks it once: all of these take it instead of the bytes
"""
