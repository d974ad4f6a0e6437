"""`rljax plan`: rljax/command/plan.py."""

from rljax.command import run

if __name__ == "__main__":
    run("plan")
