"""`rljax pipeline`: rljax/command/pipeline.py."""

from rljax.command import run

if __name__ == "__main__":
    run("pipeline")
