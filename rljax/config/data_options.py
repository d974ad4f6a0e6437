"""Options of `rljax data prepare` and `rljax inspect`."""

import dataclasses

from rljax.config.declare import Options, option
from rljax.config.options import TrustOptions


@dataclasses.dataclass(frozen=True)
class PrepareOptions(Options):
    """Options of `rljax data prepare`."""

    source: str = option(
        "", "Path, folder, tfds:NAME, or a function that returns rows", path="data"
    )
    out: str = option(
        "", "Folder for train.parquet, test.parquet and counts.json", path="written_folder"
    )
    map: str = option("", "Function of (example, index); default: the columns are ours")
    data_source: str = option("", "Name of the data; default: what the map or source says")
    test_fraction: float = option(0.0, "Share held out; 0 = the source's own test split, if any")
    turns: str = option(
        "last",
        "Turns of the assistant in 'messages' that become prompts: the last, or each, with"
        " what was said before it as the prompt and its own text as the ground truth",
        choices=("last", "each"),
    )
    tokenizer: str = option(
        "", "Folder of the tokenizer that counts the tokens for --max_prompt_tokens"
    )
    max_prompt_tokens: int = option(
        0, "Largest length of a prompt, in tokens; longer ones are dropped; 0 = no limit"
    )


@dataclasses.dataclass(frozen=True)
class InspectOptions(TrustOptions):
    """Options of `rljax inspect`."""

    model: str = option(
        "",
        "Model, a folder or a name of the hub, whose tokenizer reads DATA: the argument is then"
        " a file of rows or a data set, and no config",
    )
    kind: str = option(
        "",
        "Kind of the rows of DATA; by default the one that their columns say",
        choices=(
            "",
            "rollouts",
            "examples",
            "pairs",
            "safety",
            "unpaired",
            "stepwise",
            "trajectories",
        ),
    )
    rows: int = option(3, "Number of rows of each source", low=1)
    split: str = option("train", "Rows to show: train or test", choices=("train", "test"))
    ids: bool = option(False, "Prints a table of position, id, token and mask instead")
