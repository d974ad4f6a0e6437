"""Prepare data: python launchers/prepare_data.py --source=rows.jsonl --map=my_maps.f --out=FOLDER

Maps every row with a function of yours, checks it, and writes train.parquet and test.parquet in
verl's columns, which data.train and data.test read. The map is a function of (example, index) that
returns {"prompt", "ground_truth"} and maybe "extra_info", or None to drop the row, or a call that
returns such a function: --map="my_maps.make_map_fn(split='train')" (examples/limr.py is one).
gsm8k() and math() are there for the published columns of those data sets:

    python launchers/prepare_data.py --source=tfds:gsm8k --map="gsm8k()" --out=data/gsm8k
    python launchers/prepare_data.py --source=examples/limr_sample.jsonl \\
        --map="examples.limr.make_map_fn(split='train')" --data_source=limr --test_fraction=0.25 \\
        --out=data/limr

--test_fraction splits by a hash of the prompt: no row changes sides when rows are added.
"""

from absl import flags

from rljax.config import flags as launch

_FLAGS = flags.FLAGS
flags.DEFINE_string("source", "", "Path, folder, tfds:NAME, or a function that returns rows")
flags.DEFINE_string("out", "", "Folder for train.parquet, test.parquet and counts.json")
flags.DEFINE_string("map", "", "Function of (example, index); default: the columns are ours")
flags.DEFINE_string("data_source", "", "Name of the data; default: what the map or source says")
flags.DEFINE_float("test_fraction", 0.0, "Share held out; 0 = the source's own test split, if any")
flags.DEFINE_string("tokenizer", "", "Folder, to drop prompts over --max_prompt_tokens")
flags.DEFINE_integer("max_prompt_tokens", 0, "Longer prompts are dropped; 0 = no limit")


def main(_: list[str]) -> int:
    from rljax.data.rows.prepare import PrepareOptions, prepare

    names = PrepareOptions.__dataclass_fields__
    counts = prepare(PrepareOptions(**{name: _FLAGS[name].value for name in names}))
    width = max(map(len, counts))
    for name, count in counts.items():
        print(f"{name:<{width}}  {count}")
    return 0


if __name__ == "__main__":
    launch.run(main, needs_config=False)
