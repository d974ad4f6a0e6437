"""Replay: rljax replay RUN_DIR [--step=120]

The first batch whose loss or gradient is not finite is kept in RUN_DIR/bad. This computes its
learning again on this host, operation by operation, and names the one that made the first NaN or
infinity of those that reached the loss or the gradient: its line, its loops, its operands.
Exit code 0: found; 3: the step is finite here.
"""

from rljax.config.run_options import ReplayOptions


def main(options: ReplayOptions) -> int:
    """Prints the operations of the replay; returns the exit code."""
    from rljax.training.replay import replay

    step = None if options.step == "first" else int(options.step)
    result = replay(options.run, step, trust_code=options.trust_code)
    print("\n".join(result.lines()))
    return 0 if result.origins else 3
