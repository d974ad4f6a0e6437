"""Demo: rljax demo

Trains a small policy on this machine in a minute or three, and writes its report.

It is `rljax train quickstart:demo`: two layers learn to count letters, from demonstrations and then
by GRPO. Nothing is downloaded; the run folder is made under runs/ in the working folder.
"""

from rljax.command import train
from rljax.command.launch import Given
from rljax.config.declare import Options
from rljax.config.options import TrainOptions


def main(_: Options, given: Given) -> int:
    return train.main(TrainOptions(), given)
