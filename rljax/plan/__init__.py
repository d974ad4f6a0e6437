"""plan: what a config needs of a chip, before the chip is rented or a weight loaded.

memory: bytes per device counted from shapes; the one line of a run, and the refusal of one that
cannot fit. programs: the config's own programs, as they would be called. hlo: what the compiled
text moves and reads. flops: what the traced program computes. chips: what a chip has. compiled: all
of that of one program. alternatives: other meshes, remat and microbatches. table: text and JSON.
"""
