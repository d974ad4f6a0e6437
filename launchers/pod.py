"""`rljax pod`: rljax/command/pod.py."""

from rljax.command import run

if __name__ == "__main__":
    run("pod")
