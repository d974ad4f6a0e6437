"""`rljax push`: rljax/command/push.py."""

from rljax.command import run

if __name__ == "__main__":
    run("push")
