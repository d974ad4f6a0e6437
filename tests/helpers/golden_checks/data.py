"""Golden checks of the data room: how peers pack supervised examples."""

import numpy as np

from rljax.data.offline.packing import pack


def pack_dataset(case, dtype):
    """TRL's pack_dataset: the packed tokens, the rows' lengths, and those of the sequences in
    them."""
    lengths = np.asarray(case.inputs["input_lengths"]).tolist()
    flat, starts = np.asarray(case.inputs["input_flat"]), np.cumsum([0, *lengths])
    strategy = case.params["strategy"]
    rows = pack(lengths, case.params["seq_length"], strategy)
    pieces = [piece for row in rows for piece in row]
    got = {
        "output/packed_flat": np.concatenate(
            [flat[starts[p.index] + p.start : starts[p.index] + p.stop] for p in pieces]
        ),
        "output/packed_lengths": np.array([sum(p.stop - p.start for p in row) for row in rows]),
    }
    if strategy != "wrapped":  # there TRL keeps no borders
        got["output/seq_lengths_flat"] = np.array([p.stop - p.start for p in pieces])
        got["output/seq_lengths_counts"] = np.array([len(row) for row in rows])
    return got


CHECKS = {"trl/pack_dataset": pack_dataset}
