"""`rljax serve`: rljax/command/serve.py."""

from rljax.command import run

if __name__ == "__main__":
    run("serve")
