"""`rljax score steps`: rljax/command/score_steps.py."""

from rljax.command import run

if __name__ == "__main__":
    run("score steps")
