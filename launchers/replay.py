"""`rljax replay`: rljax/command/replay.py."""

from rljax.command import run

if __name__ == "__main__":
    run("replay")
