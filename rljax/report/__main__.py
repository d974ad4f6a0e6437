"""python -m rljax.report RUN: writes RUN/report.html, also of a run that was killed or goes on.
Several folders, or the folder of a sweep, are compared on one page: RUN RUN2 ... [--out=FILE]."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rljax.errors import InputError
from rljax.report.comparison import run_folders, write_comparison
from rljax.report.page import write_report


def main(arguments: Sequence[str]) -> int:
    folders = [one for one in arguments if not one.startswith("-")]
    out = [one.removeprefix("--out=") for one in arguments if one.startswith("--out=")]
    if not folders or len(folders) + len(out) != len(arguments) or len(out) > 1:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        if len(folders) == 1 and run_folders(folders) == [Path(folders[0])] and not out:
            print(write_report(folders[0]))
        else:
            print(write_comparison(folders, *out))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:  # the page cannot be written there
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
