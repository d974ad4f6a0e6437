"""`rljax chat`: rljax/command/chat.py."""

from rljax.command import run

if __name__ == "__main__":
    run("chat")
