"""`rljax scaling`: rljax/command/fit_scaling.py."""

from rljax.command import run

if __name__ == "__main__":
    run("scaling")
