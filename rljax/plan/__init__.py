"""Predicts what a config needs of a chip, before the chip is rented or a weight is loaded.

`memory` counts bytes per device from shapes, writes the line that a run begins with, and refuses a
run that cannot fit. `programs` makes the config's own programs, with the arguments that a run calls
them with. `hlo` counts what the compiled text moves and reads, `flops` what the traced program
computes, and `chips` has the figures of chips. `compiled` reports all of that for one program.
`alternatives` tries other meshes, remat policies and microbatches. `table` writes a plan as text
and as JSON.
"""
