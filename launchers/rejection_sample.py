"""`rljax sample`: rljax/command/rejection_sample.py."""

from rljax.command import run

if __name__ == "__main__":
    run("sample")
