"""`rljax train`: rljax/command/train.py."""

from rljax.command import run

if __name__ == "__main__":
    run("train")
