"""`python -m rljax` is the command `rljax`."""

import os
import sys

if __name__ == "__main__":
    # Python puts the working folder first here, where its tokenizers.py would hide the library.
    sys.path[:] = [p for p in sys.path if p and os.path.abspath(p) != os.getcwd()]
    from rljax.command import main

    main()
