"""Shows a config's data as tokens: whether each is learned, the tokens that end a turn, and the
lengths of rows.

Rows are encoded by rljax.data.online.encoded. No weights are read; a tokenizer is enough. The same
page is in the report of a run (`data_page`).

Learned tokens are green, the others dim; every second token is underlined, so that borders show.
Without colours, learned tokens stand between [[ and ]].
"""

import collections
import copy
import dataclasses
import itertools
import os
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rljax.components import resolve
from rljax.config import NAMESPACES, Config, is_path
from rljax.contracts import spec
from rljax.data import kinds
from rljax.data.online.encoded import Data, load_data, load_run_tokenizer
from rljax.data.online.loader import Loader
from rljax.data.online.prompts import PromptRecord
from rljax.data.online.stream import Stream
from rljax.data.rows.formats import understood
from rljax.data.rows.read import read_rows
from rljax.data.text.tokenizer import Tokenizer
from rljax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Shown:
    """One sequence to show: ids [n], mask [n] (1 = learned), and metadata to print beside it."""

    title: str
    ids: np.ndarray
    mask: np.ndarray
    metadata: dict[str, object]


def load_shown(config: Config) -> tuple[Data, Tokenizer]:
    """Returns the data and the tokenizer of a config, with rows of one example each."""
    kind = spec(resolve(config.dataflow, NAMESPACES["dataflow"])).data
    config = copy.deepcopy(config)
    config.offline.packing = False
    tokenizer = load_run_tokenizer(config)
    return load_data(config, tokenizer, kind), tokenizer


def shown_rows(
    data: Data, *, rows: int, split: str = "train", seed: int = 0
) -> tuple[list[Shown], dict]:
    """Returns (the first rows of the split in the order of the run, with the supervised examples of
    sft.steps behind them; counts of the rows that were dropped). Raises InputError for a split
    without rows."""
    counts = dict(data.counts)
    if data.kind not in kinds.SAMPLED:
        items = data.held_out if split == "test" else data.prompts
        if data.endless and split == "train":
            loader = Loader(data.sources[0], batch_size=1, seed=seed)
            items = loader.take(rows)
            counts = _with_stream_counts(counts, loader.counts)
        sequences = [
            sequence
            for number, record in enumerate(items[:rows])
            for sequence in _shown_item(data.kind, number, record["item"])
        ]
        return _require_rows(sequences, split), counts
    if split == "test":
        sequences = [_shown_prompt(prompt) for prompt in data.test_prompts[:rows]]
        return _require_rows(sequences, split), counts
    sequences, stream_counts = [], collections.Counter()
    for source in data.sources:
        loader = Loader(source, batch_size=1, seed=seed, repeat=False)
        sequences += [_shown_prompt(prompt) for prompt in loader.take(rows)]
        stream_counts.update(loader.counts)
    if data.examples:
        examples = Loader(data.examples, batch_size=1, seed=seed, shuffle=False, repeat=False)
        numbered = enumerate(examples.take(rows))
        sequences += [
            sequence
            for number, example in numbered
            for sequence in _shown_item("examples", number, example)
        ]
        stream_counts.update({f"examples_{name}": count for name, count in examples.counts.items()})
    return sequences, _with_stream_counts(counts, stream_counts)


def _with_stream_counts(counts: dict, stream_counts: dict[str, int]) -> dict:
    """Returns the counts, with those of the rows of streams that were drawn to be shown."""
    return counts | {f"{name}_of_stream": count for name, count in stream_counts.items() if count}


def turn_lines(tokenizer: Tokenizer) -> list[str]:
    """Returns lines that name the ends of a turn, the stop tokens and the chat template's
    variables."""

    def text(ids):
        return " ".join(repr(tokenizer.decode([i], skip_special_tokens=False)) for i in ids)

    end_of_text = tokenizer.eos_ids[:1]
    if not tokenizer.has_chat_template:
        return [f"no chat template; a response ends with {text(end_of_text)}, learned last"]
    ends = [end.id for end in tokenizer.turn_ends]
    if not ends:
        rule = (
            f"the chat template ends a turn with no token: {text(end_of_text)} is learned behind it"
        )
    elif tokenizer.turn_ends[0].next_role:
        rule = (
            f"a turn ends with the token that begins the next message, learned last: {text(ends)}"
        )
    else:
        rule = f"a turn ends with {text(ends)} of the chat template, learned last"
    lines = [f"{rule}; decoding stops at {text(tokenizer.eos_ids)}"]
    if tokenizer.variables:
        variables = ", ".join(f"{name}={value!r}" for name, value in tokenizer.variables.items())
        lines.append(f"the chat template is given {variables}")
    return lines


PERCENTILES = (50, 90, 99, 100)
MOST_MEASURED = 20_000  # rows
MOST_TOKENS_SHOWN = 2_000  # of a row in a page


def lengths_of(data: Data) -> dict[str, list[int]]:
    """Returns {name: percentiles 50, 90, 99 and 100 in tokens} of the rows' lengths.

    Rows that are drawn from a stream are left out; of many rows, MOST_MEASURED, evenly spaced,
    are measured."""
    lengths: dict[str, list[int]] = {}

    def add(name, value):
        lengths.setdefault(name, []).append(int(value))

    for item in _sample(data.prompts):
        if isinstance(item, PromptRecord):
            add("prompt tokens", len(item.token_ids))
            continue
        for shown in _shown_item(data.kind, 0, item["item"]):
            add("tokens of a row", len(shown.ids))
            add("learned tokens of a row", np.sum(np.asarray(shown.mask) > 0))
    if not isinstance(data.examples, Stream):
        for example in _sample(data.examples):
            add("tokens of a demonstration", len(example.ids))
            add("learned tokens of a demonstration", np.sum(example.mask > 0))
    return {
        name: [int(np.percentile(values, q, method="higher")) for q in PERCENTILES]
        for name, values in lengths.items()
    }


def _sample(items: Sequence) -> Sequence:
    return items[:: max(1, len(items) // MOST_MEASURED)]


def data_page(data: Data, tokenizer: Tokenizer, *, seed: int = 0) -> dict:
    """Returns the data page of a report, as JSON: `notes`, `counts`, `lengths`, `conversations`
    (whether the rows are), and `rows` with a title, fields and pieces [text, whether it is
    learned]."""
    sequences, counts = shown_rows(data, rows=3, seed=seed)
    return {
        "conversations": _are_conversations(data, sequences, tokenizer),
        "notes": [*turn_lines(tokenizer), *data.notes],
        "counts": counts,
        "lengths": lengths_of(data),
        "rows": [
            {
                "title": sequence.title,
                "tokens": len(sequence.ids),
                "fields": {name: repr(value)[:1_000] for name, value in sequence.metadata.items()},
                "pieces": [[text, learned] for text, learned in _runs(sequence, tokenizer)],
            }
            for sequence in sequences
        ],
    }


def _are_conversations(data: Data, sequences: Sequence[Shown], tokenizer: Tokenizer) -> bool:
    """Returns whether the chat template has made the rows: prompts are messages, or a turn ends
    within a row."""
    if not tokenizer.has_chat_template:
        return False
    records = [record for record in _sample(data.prompts) if isinstance(record, PromptRecord)]
    if records:
        return any(record.messages is not None for record in records)
    ends = [end.id for end in tokenizer.turn_ends]
    return any(np.isin(sequence.ids[:-1], ends).any() for sequence in sequences)


def _runs(shown: Shown, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """Returns the text of a sequence in runs (text, whether it is learned)."""
    learned = np.asarray(shown.mask)[:MOST_TOKENS_SHOWN] > 0
    texts = pieces(shown.ids[:MOST_TOKENS_SHOWN], tokenizer)
    runs = itertools.groupby(range(len(texts)), key=lambda t: bool(learned[t]))
    run_texts = [("".join(texts[t] for t in run), is_learned) for is_learned, run in runs]
    return [*run_texts, (" ...", False)] if len(shown.ids) > MOST_TOKENS_SHOWN else run_texts


def _require_rows(shown: list[Shown], split: str) -> list[Shown]:
    if not shown:
        raise InputError(f"the config has no {split} rows", fix="set data.test, or --split=train")
    return shown


def _shown_prompt(prompt: PromptRecord) -> Shown:
    ids = prompt.token_ids
    names = ("data_source", "ground_truth", "extra_info")
    values = vars(prompt)
    metadata = {name: values[name] for name in names if values[name] not in ("", {})}
    return Shown(f"prompt {prompt.index}", ids, np.zeros(len(ids)), metadata)


_ONE = dict(examples="example", pairs="pair", safety="pair", unpaired="answer")
_ONE |= dict(stepwise="solution", trajectories="trajectory")


def _shown_item(kind: str, index: int, item) -> list[Shown]:
    """Returns the sequences of one item of rljax.data.offline.encode."""
    title = f"{_ONE[kind]} {index}"
    if kind == "examples":
        sequences = item if isinstance(item, list) else [item]  # of a packed row
        return [Shown(title, *sequence, {}) for sequence in sequences]
    if kind == "stepwise":
        labels = [float(x) for x, m in zip(item.labels, item.mask, strict=True) if m]
        return [Shown(title, item.ids, item.mask, {"labels": labels})]
    if kind == "safety":
        labels = zip(("chosen", "rejected"), ("safer", "more harmful"), item.unsafe, strict=True)
        return [
            _shown_completion(f"{title}, {text}", item, name, {"unsafe": unsafe})
            for name, text, unsafe in labels
        ]
    if kind == "pairs":
        names = ("chosen", "rejected", "reference")
        names = [name for name in names if vars(item)[f"{name}_ids"] is not None]
        metadata = {"margin": item.margin}
        return [_shown_completion(f"{title}, {name}", item, name, metadata) for name in names]
    metadata = {"label": item.label} if kind == "unpaired" else {"reward": item.reward}
    return [_shown_completion(title, item, "completion", metadata)]


def _shown_completion(title: str, item, name: str, metadata: dict) -> Shown:
    values = vars(item)
    prompt, ids, mask = item.prompt_ids, values[f"{name}_ids"], values[f"{name}_mask"]
    row_mask = np.concatenate([np.zeros(len(prompt)), mask])
    return Shown(title, np.concatenate([prompt, ids]), row_mask, metadata)


# -- drawing --


def pieces(ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """Returns the text of each token; a character that several tokens spell stands at the last of
    them."""
    texts, pending = [], []
    for token in ids:
        pending.append(int(token))
        text = tokenizer.decode(pending, skip_special_tokens=False)
        is_whole = not text.endswith("\ufffd")
        texts.append(text if is_whole or len(pending) > 4 else "")
        pending = [] if is_whole or len(pending) > 4 else pending
    if pending:
        texts[-1] = tokenizer.decode(pending, skip_special_tokens=False)
    return texts


def coloured(shown: Shown, tokenizer: Tokenizer, *, colours: bool) -> Text:
    """Returns one sequence as text: line breaks as \u21b5, learned tokens green or in [[ ]]."""
    texts = [t.replace("\n", "\u21b5\n") for t in pieces(shown.ids, tokenizer)]
    coloured_text = Text()
    runs = itertools.groupby(enumerate(texts), key=lambda x: bool(shown.mask[x[0]]))
    for learned, run in runs:
        coloured_text.append("[[" if learned and not colours else "")
        for number, text in run:
            underline = " underline" if number % 2 else ""
            coloured_text.append(text, ("bold green" if learned else "dim") + underline)
        coloured_text.append("]]" if learned and not colours else "")
    return coloured_text


def id_table(shown: Shown, tokenizer: Tokenizer) -> Table:
    """Returns a table of position, id, text and mask of every token."""
    table = Table()
    for column in ("position", "id", "token", "mask"):
        table.add_column(column, justify="left" if column == "token" else "right")
    for number, text in enumerate(pieces(shown.ids, tokenizer)):
        learned = bool(shown.mask[number])
        cells = (str(number), str(int(shown.ids[number])), repr(text), f"{shown.mask[number]:g}")
        table.add_row(*map(Text, cells), style="bold green" if learned else "dim")
    return table


def show(config: Config, console: Console, *, rows: int, split: str, ids: bool) -> None:
    """Prints rows, the tokens that end a turn, notes, lengths and counts."""
    data, tokenizer = load_shown(config)
    rows_shown, counts = shown_rows(data, rows=rows, split=split, seed=config.seed)
    colours = console.is_terminal and not console.no_color
    for shown in rows_shown:
        fields = ", ".join(f"{name}={value!r}" for name, value in shown.metadata.items())
        learned = int(np.sum(np.asarray(shown.mask) > 0))
        title = f"--- {shown.title}: {len(shown.ids)} tokens, {learned} learned"
        console.print(Text(title + (f"; {fields}" if fields else ""), style="bold"), soft_wrap=True)
        text = id_table(shown, tokenizer) if ids else coloured(shown, tokenizer, colours=colours)
        console.print(text, soft_wrap=not ids)
    for note in (*turn_lines(tokenizer), *data.notes):
        console.print(Text(f"data: {note}"), soft_wrap=True)
    for name, values in lengths_of(data).items():
        shares = ", ".join(f"{q} %: {n:,}" for q, n in zip(PERCENTILES, values, strict=True))
        console.print(Text(f"data: {name}, percentiles: {shares}"), soft_wrap=True)
    listed = ", ".join(f"{name}={value:g}" for name, value in counts.items())
    console.print(Text(f"counts: {listed or 'an endless stream'}", style="bold"), soft_wrap=True)


# -- rows of which nothing else is known --

_KINDS = {  # the beginning of `understood` (rljax.data.rows.formats): the kind of the rows
    "verl's prompts": "rollouts",
    "prompts": "rollouts",
    "safety pairs": "safety",
    "preference": "pairs",
    "stepwise supervision": "stepwise",
    "language modeling": "examples",
    "prompt-completion": "examples",
    "unpaired preference": "unpaired",
}


def config_of_data(spec: str, model: str, kind: str, config: Config) -> Config:
    """Returns the config with the rows of `spec`, the tokenizer of `model`, and a dataflow that
    learns from rows of this kind. If `kind` is "", it is found from the columns of the first
    row."""
    config = copy.deepcopy(config)
    config.data.train, config.tokenizer = spec, model
    only_tokenizer = os.path.isdir(model) and not os.path.exists(os.path.join(model, "config.json"))
    config.model = "" if only_tokenizer else model  # which says how images are read
    if not kind and is_path(spec):
        row = read_rows(spec, "train").rows[0]
        name = understood(row).partition(",")[0]
        answers = {"completion", "response", "steps"}
        has_reward = {"reward", "score"} & row.keys() and answers & row.keys()
        kind = "trajectories" if has_reward else _KINDS.get(name, "examples")
    config.dataflow = kinds.KINDS[kind or "rollouts"].dataflow
    return config
