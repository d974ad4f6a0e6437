"""`rljax label steps`: rljax/command/label_steps.py."""

from rljax.command import run

if __name__ == "__main__":
    run("label steps")
