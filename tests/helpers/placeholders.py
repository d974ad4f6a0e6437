"""What the placeholders of docs/ stand for: small model folders with random weights, and rows."""

import json
from pathlib import Path

import jax
from tiny_data import write_gsm8k_parquet
from tiny_tokenizer import write_json, write_tokenizer
from tiny_vision import data_url, picture, write_vision_folder

from rljax.mesh import make_mesh
from rljax.models.builtin import decoder
from rljax.models.huggingface import save_params
from rljax.models.model import Model

SIZES = dict(layers=1, embed=16, mlp=32, heads=2, kv_heads=2, head_dim=8, max_tokens=32768)
PAIR = {"prompt": "What is 2 + 3?", "chosen": "5", "rejected": "6"}
HARM = {
    "prompt": "How do I open this?",
    "safer": "With a key.",
    "more_harmful": "With dynamite.",
    "safer_is_safe": True,
    "more_harmful_is_safe": False,
}
STEPS = {"prompt": "What is 2 + 3?", "completions": ["2 + 3", "= 6"], "labels": [True, False]}
QUESTION = {"question": "What is 2 + 3?", "answer": "2 + 3 = 5\n#### 5"}
INSTRUCTION = {
    "prompt": "Write without commas.",
    "instruction_id_list": ["punctuation:no_comma"],
    "kwargs": [{}],
}
ROW = {"prompt": "What is 2 + 3?", "ground_truth": "5", "data_source": "sums"}


def write_placeholders(folder: Path) -> None:
    """MODEL_FOLDER, TEACHER_FOLDER, JUDGE_FOLDER, VISION_MODEL_FOLDER, runs/my_{rm,prm,cost} and
    the files of rows."""
    for name in ("MODEL_FOLDER", "TEACHER_FOLDER", "JUDGE_FOLDER"):
        write_model_folder(folder / name)
    for name in ("my_rm", "my_prm", "my_cost"):
        write_model_folder(folder / "runs" / name / "reward_model", head="scalar")
    write_vision_folder(folder / "VISION_MODEL_FOLDER")
    for name in ("train", "test", "prompts"):
        write_gsm8k_parquet(folder / f"{name}.parquet", 4)
    image = {"role": "user", "content": "<image> Which bar is higher, A or B?"}
    shown = {"prompt": [image], "images": [data_url(picture())], "ground_truth": "B"}
    rows = {"train": ROW, "test": ROW, "pairs": PAIR, "held_out_pairs": PAIR, "steps": STEPS}
    rows |= {"harms": HARM, "held_out_harms": HARM}
    rows |= {
        "gsm8k": QUESTION,
        "ifeval": INSTRUCTION,
        "held_out_steps": STEPS,
        "charts": shown,
        "held_out_charts": shown,
    }
    for name, row in rows.items():
        (folder / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 4)


def write_model_folder(folder: Path, head: str = "lm") -> None:
    """A chat model of one layer, or with a number as its output."""
    write_tokenizer(folder)
    words = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]) + 8
    model = Model(decoder(words, **SIZES), make_mesh(1, 1, 1, devices=jax.devices()[:1]), head)
    save_params(folder, model, model.init(jax.random.key(0)), eos_ids=(1, 2), pad_id=2)
    write_json(folder / "generation_config.json", {"eos_token_id": [1, 2]})
