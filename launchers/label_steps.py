"""`rljax label steps`: rljax/command/label_steps.py."""

import os
import sys

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from rljax.command import run

if __name__ == "__main__":
    run("label steps")
