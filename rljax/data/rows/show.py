"""Shows what a config's data looks like as tokens: each coloured by whether it is learned.

Encoding is rljax.data.online.encoded; no weights are read, a tokenizer is enough.

Learned tokens are green, the others dim; every second token is underlined, so that borders show.
Where there are no colours, what is learned stands between [[ and ]].
"""

import copy
import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rljax.components import resolve
from rljax.config import NAMESPACES, Config
from rljax.contracts import spec
from rljax.data.kinds import SAMPLED
from rljax.data.online.encoded import load_data, load_run_tokenizer
from rljax.data.online.loader import make_loader
from rljax.data.online.prompts import PromptRecord
from rljax.data.online.stream import Stream
from rljax.data.text.tokenizer import Tokenizer
from rljax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Shown:
    """One sequence: ids [n], mask [n] (1 = learned), and what stands beside it."""

    title: str
    ids: np.ndarray
    mask: np.ndarray
    metadata: dict[str, object]


def shown_rows(
    config: Config, *, rows: int, split: str = "train"
) -> tuple[list[Shown], dict, tuple[str, ...]]:
    """The first rows of the split as the run would read them (training prompts in its order), with
    the supervised examples of sft.steps behind them; the counts of what was dropped; and what a run
    would say of the data."""
    kind = spec(resolve(config.dataflow, NAMESPACES["dataflow"])).data
    config = copy.deepcopy(config)
    config.offline.packing = False  # rows of one example each
    data = load_data(config, load_run_tokenizer(config), kind)
    if kind not in SAMPLED:
        items = data.held_out if split == "test" else data.prompts
        if data.endless and split == "train":
            items = make_loader(data.sources[0], batch_size=1, seed=config.seed).take(rows)
        shown = [s for i, x in enumerate(items[:rows]) for s in _of_kind(kind, i, x["item"])]
        return _required(shown, split), data.counts, data.notes
    if split == "test":
        shown = [_of_prompt(p) for p in data.test_prompts[:rows]]
        return _required(shown, split), data.counts, data.notes
    shown, counts = [], dict(data.counts)
    for source in data.sources:
        loader = make_loader(source, batch_size=1, seed=config.seed)
        enough = rows if isinstance(source, Stream) else min(rows, len(source))
        shown += [_of_prompt(p) for p in loader.take(enough)]
        if loader.dropped:
            counts["dropped_overlong_of_stream"] = loader.dropped
    if data.examples:
        enough = rows if isinstance(data.examples, Stream) else min(rows, len(data.examples))
        examples = make_loader(data.examples, batch_size=1, seed=config.seed, shuffle=False)
        taken = enumerate(examples.take(enough))
        shown += [s for number, example in taken for s in _of_kind("examples", number, example)]
    return shown, counts, data.notes


def _required(shown: list[Shown], split: str) -> list[Shown]:
    if not shown:
        raise InputError(f"the config has no {split} rows", fix="set data.test, or --split=train")
    return shown


def _of_prompt(prompt: PromptRecord) -> Shown:
    ids = prompt.token_ids
    names = ("data_source", "ground_truth", "extra_info")
    fields = vars(prompt)
    facts = {name: fields[name] for name in names if fields[name] not in ("", {})}
    return Shown(f"prompt {prompt.index}", ids, np.zeros(len(ids)), facts)


_ONE = dict(
    examples="example",
    pairs="pair",
    safety="pair",
    unpaired="answer",
    stepwise="solution",
    trajectories="trajectory",
)


def _of_kind(kind: str, index: int, item) -> list[Shown]:
    """The sequences of one item of rljax.data.offline.encode."""
    title = f"{_ONE[kind]} {index}"
    if kind == "examples":
        return [Shown(title, *item, {})]
    if kind == "stepwise":
        labels = [float(x) for x, m in zip(item.labels, item.mask, strict=True) if m]
        return [Shown(title, item.ids, item.mask, {"labels": labels})]
    if kind == "safety":
        labels = zip(("chosen", "rejected"), ("safer", "more harmful"), item.unsafe, strict=True)
        return [
            _joined(f"{title}, {text}", item, name, {"unsafe": unsafe})
            for name, text, unsafe in labels
        ]
    if kind == "pairs":
        names = [
            n for n in ("chosen", "rejected", "reference") if vars(item)[f"{n}_ids"] is not None
        ]
        facts = {"margin": item.margin}
        return [_joined(f"{title}, {name}", item, name, facts) for name in names]
    facts = {"label": item.label} if kind == "unpaired" else {"reward": item.reward}
    return [_joined(title, item, "completion", facts)]


def _joined(title: str, item, name: str, metadata: dict) -> Shown:
    fields = vars(item)
    prompt, ids, mask = item.prompt_ids, fields[f"{name}_ids"], fields[f"{name}_mask"]
    whole = np.concatenate([np.zeros(len(prompt)), mask])
    return Shown(title, np.concatenate([prompt, ids]), whole, metadata)


# -- drawing --


def pieces(ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """The text of each token; a character that several tokens spell stands at the last of them."""
    out, pending = [], []
    for token in ids:
        pending.append(int(token))
        text = tokenizer.decode(pending, skip_special_tokens=False)
        whole = not text.endswith("\ufffd")
        out.append(text if whole or len(pending) > 4 else "")
        pending = [] if whole or len(pending) > 4 else pending
    if pending:
        out[-1] = tokenizer.decode(pending, skip_special_tokens=False)
    return out


def coloured(shown: Shown, tokenizer: Tokenizer, *, colours: bool) -> Text:
    """One sequence as text: line breaks as \u21b5, learned tokens green or in [[ ]]."""
    texts = [t.replace("\n", "\u21b5\n") for t in pieces(shown.ids, tokenizer)]
    out = Text()
    runs = itertools.groupby(enumerate(texts), key=lambda x: bool(shown.mask[x[0]]))
    for learned, run in runs:
        out.append("[[" if learned and not colours else "")
        for number, text in run:
            line = " underline" if number % 2 else ""
            out.append(text, ("bold green" if learned else "dim") + line)
        out.append("]]" if learned and not colours else "")
    return out


def id_table(shown: Shown, tokenizer: Tokenizer) -> Table:
    """Position, id, text and mask of every token."""
    table = Table()
    for column in ("position", "id", "token", "mask"):
        table.add_column(column, justify="left" if column == "token" else "right")
    for number, text in enumerate(pieces(shown.ids, tokenizer)):
        learned = bool(shown.mask[number])
        cells = (str(number), str(int(shown.ids[number])), repr(text), f"{shown.mask[number]:g}")
        table.add_row(*map(Text, cells), style="bold green" if learned else "dim")
    return table


def show(config: Config, console: Console, *, rows: int, split: str, ids: bool) -> None:
    """Prints rows and counts."""
    tokenizer = load_run_tokenizer(config)
    rows_shown, counts, notes = shown_rows(config, rows=rows, split=split)
    colours = console.is_terminal and not console.no_color
    for shown in rows_shown:
        fields = ", ".join(f"{name}={value!r}" for name, value in shown.metadata.items())
        learned = int(np.sum(np.asarray(shown.mask) > 0))
        title = f"--- {shown.title}: {len(shown.ids)} tokens, {learned} learned"
        console.print(Text(title + (f"; {fields}" if fields else ""), style="bold"), soft_wrap=True)
        text = id_table(shown, tokenizer) if ids else coloured(shown, tokenizer, colours=colours)
        console.print(text, soft_wrap=not ids)
    for note in notes:
        console.print(Text(f"data: {note}"), soft_wrap=True)
    listed = ", ".join(f"{name}={value:g}" for name, value in counts.items())
    console.print(Text(f"counts: {listed or 'an endless stream'}", style="bold"), soft_wrap=True)
