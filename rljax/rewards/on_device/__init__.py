"""Rewards on the device: forms of rewards that are functions of arrays, for `program_steps`.

This is the one part of rljax.rewards that imports jax; workers that score texts do not import it.
"""

from rljax.rewards.on_device.form import DeviceForm, Responses, bytes_of
from rljax.rewards.on_device.scorer import DeviceScorer, device_scorer, without_form

__all__ = ["DeviceForm", "DeviceScorer", "Responses", "bytes_of", "device_scorer", "without_form"]
