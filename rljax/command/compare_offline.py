"""Compare offline algorithms: rljax compare --out=runs/compare_offline
[--config=compare_offline --seeds=0,1,2 --steps=100]

Trains every method of the config file's methods() from one file of the base policy's samples, and
prints greedy and sampled accuracy on held-out prompts with 95 % intervals. The same command again
goes on: finished cells are kept. --capabilities prints what the dataflows need and can use.
"""

from rljax.command.launch import ConfigSource, print_table
from rljax.config.flags import config_module, load_config_file
from rljax.config.policy_options import ComparisonOptions
from rljax.errors import InputError

_DEFAULT = "compare_offline"  # ships with the library
_CAPABILITIES_OF = {"PPO": "ppo", "DPO": "preference", "KTO": "kto", "DQO": "dqo"}


def main(options: ComparisonOptions, source: ConfigSource) -> None:
    """Trains and measures the methods of a config file, and prints the table. Raises InputError for
    a file without methods()."""
    if options.capabilities:
        from rljax.experiments.capabilities import PROPERTIES, capability_table

        table = capability_table(_CAPABILITIES_OF)
        rows = [(row["method"], *("yes" if row[p] else "no" for p in PROPERTIES)) for row in table]
        print_table(("method", *PROPERTIES), rows)
        return
    from rljax.experiments.comparison import compare, read_methods

    path = source.path or _DEFAULT
    config = source.config or load_config_file(path)
    module = config_module(path)
    if not callable(vars(module).get("methods")):
        fix = 'define methods() that yields {"name": ..., "rows": ..., "dataflow": ...}'
        raise InputError(f"{path} has no methods()", fix=fix)
    methods = read_methods(module.methods(), path)
    config.compilation_cache = options.compilation_cache
    columns = ("greedy", "sampled", "greedy_gain", "sampled_gain")
    result = compare(config, methods, options, on_cell=_print_cell)
    rows = [
        (row["method"], *(_shown(row.get(name)) for name in columns)) for row in result["table"]
    ]
    names = ("method", "greedy", "sample", "greedy - base", "sample - base")
    print_table(names, rows, "accuracy in %, and its 95 % interval")


def _print_cell(cell: dict) -> None:
    accuracies = [[x for x in cell[name] if x is not None] for name in ("greedy", "sampled")]
    greedy, sampled = (sum(values) / max(len(values), 1) for values in accuracies)
    print(f"seed {cell['seed']}: {cell['method']}: {greedy:.3f} / {sampled:.3f}", flush=True)


def _shown(estimate: dict | None) -> str:
    if estimate is None:
        return ""
    low, value, high = (100 * estimate[name] for name in ("low", "value", "high"))
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"
