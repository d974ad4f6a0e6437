"""`rljax data prepare`: rljax/command/prepare_data.py."""

from rljax.command import run

if __name__ == "__main__":
    run("data prepare")
