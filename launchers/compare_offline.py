"""Compare offline algorithms: python launchers/compare_offline.py --out=runs/compare_offline
[--config=configs/compare_offline.py --seeds=0,1,2 --steps=100]

Trains every method of the config file's methods() from one file of the base policy's samples, and
prints greedy and sampled accuracy on held-out prompts with 95 % intervals. The same command again
goes on: finished cells are kept. --capabilities prints what the dataflows need and can use.
"""

import sys
from pathlib import Path

from absl import flags

from rljax.config import Config
from rljax.config import flags as launch

_FLAGS = flags.FLAGS
flags.DEFINE_string("out", "", "Folder of the comparison")
flags.DEFINE_string("seeds", "0,1,2", "Each has a base policy, a file and a run of every method")
flags.DEFINE_integer("prompts", 1024, "Of the training split, that the base policy samples on")
flags.DEFINE_integer("samples", 4, "Per prompt")
flags.DEFINE_integer("process_samples", 4, "Completions per prefix, for the process scores")
flags.DEFINE_integer("steps", 100, "Optimizer steps of every method")
flags.DEFINE_integer("test_prompts", 256, "Held-out prompts")
flags.DEFINE_integer("test_samples", 8, "Per held-out prompt, for the sampled accuracy")
flags.DEFINE_string("compilation_cache", Config().compilation_cache, "A folder; empty = off")
flags.DEFINE_boolean("capabilities", False, "Print what PPO, DPO, KTO and DQO need, and stop")

_DEFAULT = Path(__file__).resolve().parent.parent / "configs" / "compare_offline.py"
_CAPABILITIES_OF = {"PPO": "ppo", "DPO": "preference", "KTO": "kto", "DQO": "dqo"}


def main(_: list[str]) -> int:
    if _FLAGS.capabilities:
        _show_capabilities()
        return 0
    from rljax.errors import InputError
    from rljax.evaluation.saved import parse_ks
    from rljax.experiments.comparison import ComparisonOptions, compare, read_methods
    from rljax.tracking import compiles

    path = launch.config_path(sys.argv[1:])
    config = launch.parsed_config() if path else launch.load_config_file(str(_DEFAULT))
    module = launch.config_module(path or str(_DEFAULT))
    if not callable(vars(module).get("methods")):
        fix = 'define methods() that yields {"name": ..., "rows": ..., "dataflow": ...}'
        raise InputError(f"{path} has no methods()", fix=fix)
    methods = read_methods(module.methods(), path or _DEFAULT.name)
    try:
        seeds = parse_ks(_FLAGS.seeds)
    except InputError:
        raise InputError("--seeds", value=_FLAGS.seeds, fix="--seeds=0,1,2") from None
    names = ("out", "prompts", "samples", "process_samples", "steps")
    numbers = {name: _FLAGS[name].value for name in (*names, "test_prompts", "test_samples")}
    options = ComparisonOptions(seeds=seeds, **numbers)
    config.compilation_cache = _FLAGS.compilation_cache
    compiles.use_cache(_FLAGS.compilation_cache)

    def say(cell: dict) -> None:
        greedy, sampled = (_mean(cell[name]) for name in ("greedy", "sampled"))
        print(f"seed {cell['seed']}: {cell['method']}: {greedy:.3f} / {sampled:.3f}", flush=True)

    _show(compare(config, methods, options, on_cell=say))
    return 0


def _mean(values: list) -> float:
    known = [x for x in values if x is not None]
    return sum(known) / max(len(known), 1)


def _show(result: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="accuracy in %, and its 95 % interval", title_justify="left")
    for name in ("method", "greedy", "sample", "greedy - base", "sample - base"):
        table.add_column(name, justify="left" if name == "method" else "right")

    def shown(found: dict | None) -> str:
        if found is None:
            return ""
        low, value, high = (100 * found[name] for name in ("low", "value", "high"))
        return f"{value:.2f} [{low:.2f}, {high:.2f}]"

    for row in result["table"]:
        cells = ("greedy", "sampled", "greedy_gain", "sampled_gain")
        table.add_row(row["method"], *(shown(row.get(name)) for name in cells))
    Console().print(table)


def _show_capabilities() -> None:
    from rich.console import Console
    from rich.table import Table

    from rljax.experiments.capabilities import PROPERTIES, capability_table

    table = Table()
    for name in ("method", *PROPERTIES):
        table.add_column(name)
    for row in capability_table(_CAPABILITIES_OF):
        table.add_row(row["method"], *("yes" if row[name] else "no" for name in PROPERTIES))
    Console().print(table)


if __name__ == "__main__":
    launch.run(main, needs_config=False)
