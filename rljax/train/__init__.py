"""The training loop: train(config) runs a config to its end."""

from rljax.train.loop import train

__all__ = ["train"]
