"""`rljax evaluate`: rljax/command/evaluate.py."""

from rljax.command import run

if __name__ == "__main__":
    run("evaluate")
