"""Prepare data: rljax data prepare --source=rows.jsonl --map=my_maps.f --out=FOLDER

Maps every row with a function of yours, checks it, and writes train.parquet and test.parquet in
verl's columns, which data.train and data.test read. The map is a function of (example, index) that
returns {"prompt", "ground_truth"} and maybe "extra_info", or None to drop the row, or a call that
returns such a function: --map="my_maps.make_map_fn(split='train')" (examples/limr.py is one).
gsm8k() and math() are there for the published columns of those data sets:

    rljax data prepare --source=tfds:gsm8k --map="gsm8k()" --out=data/gsm8k
    rljax data prepare --source=examples/limr_sample.jsonl \\
        --map="examples.limr.make_map_fn(split='train')" --data_source=limr --test_fraction=0.25 \\
        --out=data/limr

--test_fraction splits by a hash of the prompt: no row changes sides when rows are added.
"""

from rljax.config.data_options import PrepareOptions


def main(options: PrepareOptions) -> None:
    """Writes the files and prints the counts."""
    from rljax.data.rows.prepare import prepare

    counts = prepare(options)
    width = max(map(len, counts))
    for name, count in counts.items():
        print(f"{name:<{width}}  {count}")
