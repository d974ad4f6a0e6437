"""The training loop: train(config) runs a config to its end."""

from rljax.training.call import train
from rljax.training.result import RunStopped, TrainedRun

__all__ = ["RunStopped", "TrainedRun", "train"]
