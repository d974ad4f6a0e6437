"""The training loop: train(config) runs a config to its end."""

from rljax.training.call import train
from rljax.training.result import TrainedRun

__all__ = ["TrainedRun", "train"]
