"""`rljax play`: rljax/command/play.py."""

from rljax.command import run

if __name__ == "__main__":
    run("play")
