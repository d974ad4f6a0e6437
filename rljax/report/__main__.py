"""python -m rljax.report RUN: writes RUN/report.html, also of a run that was killed or goes on.
Several folders, or the folder of a sweep, are compared on one page: RUN RUN2 ... [--out=FILE]."""

import sys
from collections.abc import Sequence

from rljax.errors import InputError
from rljax.report.comparison import write_pages


def main(arguments: Sequence[str]) -> int:
    folders = [text for text in arguments if not text.startswith("-")]
    out = [text.removeprefix("--out=") for text in arguments if text.startswith("--out=")]
    if not folders or len(folders) + len(out) != len(arguments) or len(out) > 1:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        print(write_pages(folders, *out))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
