"""The training loop: train(config) runs a config to its end."""

from rljax.training.loop import train

__all__ = ["train"]
