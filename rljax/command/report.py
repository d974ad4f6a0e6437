"""Report: rljax report RUN

Writes report.html of a run folder anew, also of a run that goes on or was killed.
"""

from rljax.config.options import ReportOptions


def main(options: ReportOptions) -> None:
    from rljax.report.page import write_report

    for folder in options.runs:
        print(write_report(folder))
