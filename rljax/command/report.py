"""Report: rljax report RUN, or several: rljax report RUN RUN2 ... [--out=FILE]

Writes report.html of a run folder anew, also of a run that goes on or was killed. Several runs, or
the folder of a sweep, are compared on one page, comparison.html.
"""

from rljax.config.run_options import ReportOptions


def main(options: ReportOptions) -> None:
    """Writes the page and prints its path."""
    from rljax.report.comparison import write_pages

    print(write_pages(options.runs, options.out or None))
