"""The GSM8K configs cut to a few small steps, on a golden checkpoint with a small tokenizer."""

import shutil
from pathlib import Path

from conftest import REPO, golden
from tiny_data import write_gsm8k_parquet
from tiny_tokenizer import write_tokenizer

# Random weights write no `####`: any number in the response earns half, so that rewards differ.
TINY = {
    "steps": 2,
    "data.max_prompt_tokens": 100,
    "sampler.max_response_tokens": 12,
    "sampler.temperature": 4.0,  # the golden weights are peaked: at 1.0 every sample is the same
    "batch.prompts_per_step": 8,
    "batch.samples_per_prompt": 2,
    "batch.sequences_per_optimizer_step": 8,
    "batch.tokens_per_microbatch": 1024,
    "reward.function": "gsm8k(method='flexible', format_score=0.5)",
    "reward.workers": 1,
    "model_settings.dtype": "float32",
    "model_settings.remat": "none",  # compiles faster
    "evaluate.prompts": 4,
}


def write_model(folder, family: str) -> Path:
    """A model folder as a user has it: golden weights and config.json, and a tokenizer."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(golden("hf", family, name), folder / name)
    return write_tokenizer(folder)


def gsm8k_flags(config: str, family: str, folder: Path, **more) -> list[str]:
    """The command line of a tiny run in folder/run, on files that are written here."""
    train = write_gsm8k_parquet(folder / "train.parquet", 16)
    test = write_gsm8k_parquet(folder / "test.parquet", 4)
    fields = {
        **TINY,
        "model": write_model(folder / family, family),
        "data.train": train,
        "data.test": test,
        "run_dir": folder / "run",
        **more,
    }
    flags = [f"--config.{name}={value}" for name, value in fields.items()]
    return [f"--config={REPO}/configs/{config}.py", *flags]
