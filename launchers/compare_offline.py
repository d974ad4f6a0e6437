"""`rljax compare`: rljax/command/compare_offline.py."""

from rljax.command import run

if __name__ == "__main__":
    run("compare")
