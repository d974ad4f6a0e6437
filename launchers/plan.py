"""`rljax plan`: rljax/command/plan.py."""

import os
import sys

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from rljax.command import run

if __name__ == "__main__":
    run("plan")
