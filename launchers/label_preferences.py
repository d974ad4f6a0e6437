"""`rljax label preferences`: rljax/command/label_preferences.py."""

from rljax.command import run

if __name__ == "__main__":
    run("label preferences")
