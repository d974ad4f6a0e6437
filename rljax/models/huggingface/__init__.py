"""Hugging Face folders: configs, weights, names and adapters, read and written."""

from rljax.models.huggingface.load import load_config, load_params, load_with_report, save_params

__all__ = ["load_config", "load_params", "load_with_report", "save_params"]
