"""`rljax sweep`: rljax/command/sweep.py."""

from rljax.command import run

if __name__ == "__main__":
    run("sweep")
