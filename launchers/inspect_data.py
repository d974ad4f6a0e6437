"""`rljax inspect`: rljax/command/inspect_data.py."""

from rljax.command import run

if __name__ == "__main__":
    run("inspect")
