"""Watch: rljax watch RUN [RUN2 ...] [--once]

Shows runs in the terminal while they are being written: curves as charts of text, and the newest
completions. It only reads, so it may run beside the run, over ssh, or on a folder that is finished,
and it ends when the runs do. The folder of a sweep stands for its runs.

Where the output is no terminal, each new step is a line. --once prints one picture and ends.
--metrics='reward/*,loss' says what is shown.
"""

from rljax.config.run_options import WatchOptions


def main(options: WatchOptions) -> None:
    """Shows the runs."""
    from rljax.report.watch import watch

    watch(options.runs, metrics=options.metrics, every_s=options.every_s, once=options.once)
