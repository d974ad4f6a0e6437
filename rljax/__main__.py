"""`python -m rljax` is the command `rljax`."""

from rljax.command import main

if __name__ == "__main__":
    main()
