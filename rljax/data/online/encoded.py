"""From a config to token arrays: the tokenizer of a run, and its prompts and examples.

One record is read by rljax.data.rows.sources and encoded by rljax.data.online.prompts.
"""

import contextlib
import dataclasses
import functools
import logging

import numpy as np

from rljax import contracts
from rljax.components import resolve
from rljax.config import NAMESPACES, Config, is_path, value_of
from rljax.data.images.encode import ImageLayout, ImageReader, image_reader, layout_of
from rljax.data.kinds import SAMPLED
from rljax.data.offline.batches import item_images
from rljax.data.offline.encode import encode_row, encode_rows
from rljax.data.offline.packing import pack_examples
from rljax.data.offline.rows import load_rows, load_stored_rows
from rljax.data.online.default_rewards import (
    OF_FILES,
    evaluation_text,
    log_rewards_of_file,
    training_text,
)
from rljax.data.online.examples import (
    STREAM_ITEMS,
    demonstrations_of,
    digested,
    in_source,
    pretraining_of,
)
from rljax.data.online.kept import (
    bare_prompts,
    kept_line,
    reference_check,
    warn_hidden,
    warn_unread,
)
from rljax.data.online.loader import fingerprint
from rljax.data.online.prompts import PromptRecord, encode_prompt, encode_prompts
from rljax.data.online.stream import CountedStream, Stream
from rljax.data.rows.columns import rows_of
from rljax.data.rows.sources import load_endless_prompts, load_prompts
from rljax.data.rows.split import held_out_fraction
from rljax.data.text.tokenizer import CharTokenizer, Tokenizer, load_tokenizer
from rljax.errors import InputError
from rljax.files import parse_json
from rljax.rewards.pool.calling import wanted_fields

LOG = logging.getLogger("rljax")
_WARN_ABOVE = 0.1  # share of the prompts that are dropped


@dataclasses.dataclass(frozen=True)
class Data:
    """The encoded data of a run. Its lengths, in tokens, are those of the longest row, so that all
    steps have one shape."""

    # One entry per source: its prompts, or rows of a file: {"prompt_id", "source", "item"}. A
    # stream encodes its prompts when they are drawn.
    sources: list[list[PromptRecord] | list[dict] | Stream]
    test_prompts: list[PromptRecord]
    examples: list | Stream
    counts: dict[str, float]
    prompt_tokens: int
    example_tokens: int
    digest: str
    kind: str = "rollouts"  # the kind of data in `sources`: rljax.data.kinds
    held_out: list[dict] = dataclasses.field(default_factory=list)  # rows for eval/loss
    notes: tuple[str, ...] = ()  # what is said of it when a run starts
    pretraining: list | Stream = dataclasses.field(default_factory=list)  # of pretraining.data
    pretraining_tokens: int = 1  # of the longest one
    # The layouts of the images of sources, test_prompts and held_out, of examples, of pretraining;
    # None where none of these rows has an image.
    images: ImageLayout | None = None
    example_images: ImageLayout | None = None
    pretraining_images: ImageLayout | None = None

    @property
    def prompts(self) -> list[PromptRecord] | list[dict]:
        """All training prompts, or rows, of the sources that are not streams."""
        return [p for source in self.sources if not isinstance(source, Stream) for p in source]

    @property
    def first(self) -> PromptRecord | dict | None:
        """A prompt, or row, of the first source; None if it has none."""
        source = self.sources[0] if self.sources else []
        some = source.first(STREAM_ITEMS) if isinstance(source, Stream) else source[:1]
        return next((one for one in some if one is not None), None)

    @property
    def endless(self) -> bool:
        """Returns whether a source is a stream."""
        return any(isinstance(source, Stream) for source in self.sources)


def load_run_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer of the config's folder, else of the model's folder, else one of the characters
    of its tasks. Raises InputError if a built-in model reads a file, or a task without an alphabet,
    and for a folder that `load_tokenizer` refuses."""
    variables = template_variables(config)
    if config.tokenizer:
        return load_tokenizer(config.tokenizer, variables=variables)
    if is_path(config.model):
        return load_tokenizer(config.model, variables=variables)
    if is_path(config.data.train):
        raise InputError(
            "a built-in model has no tokenizer for a data file",
            value=config.data.train,
            fix="set tokenizer to a folder with tokenizer.json, or model to a Hugging Face folder",
        )
    alphabet = ""
    for spec in (config.data.train, *config.data.sources):
        task = None if is_path(spec) else resolve(spec, NAMESPACES["data"])()
        letters = vars(task).get("alphabet") if task is not None else None
        if not isinstance(letters, str):
            raise InputError(f"task {spec!r} has no alphabet", fix="set tokenizer to a folder")
        alphabet += "".join(c for c in letters if c not in alphabet)
    return CharTokenizer(alphabet)


def template_variables(config: Config) -> dict[str, object]:
    """The variables of the chat template in data.template_variables, by name: JSON values, or
    texts. Raises InputError for an entry that is not NAME=VALUE."""
    variables = {}
    for text in config.data.template_variables:
        name, equals, value = text.partition("=")
        if not equals:
            rule = "each is NAME=VALUE"
            fix = "write for instance 'enable_thinking=false'"
            raise InputError("data.template_variables", value=text, rule=rule, fix=fix)
        try:
            variables[name.strip()] = parse_json(value, "data.template_variables")
        except InputError:
            variables[name.strip()] = {"True": True, "False": False, "None": None}.get(value, value)
    return variables


def with_target_length(record: dict, config: Config, split: str) -> dict:
    """The record with a target length in extra_info, and an instruction to reach it in the prompt
    (L1). The length is drawn by (seed, split, index)."""
    low, high = config.data.target_tokens
    seed = np.random.SeedSequence([config.seed, split == "test", int(record["index"])])
    target = int(np.random.default_rng(seed).integers(low, high + 1))
    asked = config.data.target_instruction.format(target_tokens=target)
    prompt = record["prompt"]
    if isinstance(prompt, str):
        prompt = prompt + asked
    else:
        # A turn of the assistant at the end is continued: what asks stands before it.
        asking = [k for k, m in enumerate(prompt) if m["role"] != "assistant"]
        at = asking[-1] if asking else len(prompt) - 1
        told = {**prompt[at], "content": prompt[at].get("content", "") + asked}
        prompt = [*prompt[:at], told, *prompt[at + 1 :]]
    extra = {**record["extra_info"], "target_tokens": target}
    return {**record, "prompt": prompt, "extra_info": extra}


def _records(spec: str, config: Config, split: str, notes: list[str]) -> list[dict] | Stream:
    options = {}
    if is_path(spec):
        check = reference_check({training_text(config), evaluation_text(config)})
        options = dict(need_ground_truth=needs_ground_truth(config), check=check, notes=notes)
        options["test_fraction"] = held_out_fraction(config, spec)
        options |= {"stored": True} if split == "train" and config.data.stream else {}
    if split == "train":
        records = load_endless_prompts(spec, **options)
    else:
        records = load_prompts(spec, split, **options)
    if not config.data.target_tokens:
        return records
    if isinstance(records, Stream):

        def asked(index):
            return with_target_length(records[index], config, split)

        return Stream(asked, rows=records.rows)
    return [with_target_length(r, config, split) for r in records]


def needs_ground_truth(config: Config) -> bool:
    """Returns whether the rewards of a file's prompts compare the answer with a reference. A reward
    model does not, nor does a function without the parameter `ground_truth`."""
    texts = {evaluation_text(config), training_text(config)} - {""}
    if OF_FILES in texts:
        return True
    fields = [wanted_fields(resolve(text, NAMESPACES["reward"])) for text in texts]
    return any(names is None or "ground_truth" in required for names, required in fields)


def load_data(config: Config, tokenizer: Tokenizer, kind: str = "rollouts") -> Data:
    """The encoded data of every source of the config. Raises InputError for bad data or options,
    and names the source and row."""
    if kind not in SAMPLED:
        return _offline_data(config, tokenizer, kind)
    limits = dict(max_prompt_tokens=config.data.max_prompt_tokens, overlong=config.data.overlong)
    # Rows are checked before a model is opened.
    reader = functools.cache(lambda: image_reader(config, tokenizer))
    texts = {training_text(config), evaluation_text(config)}
    sources, counts, raw, ids, notes = [], {}, [], 0, []
    for spec in (config.data.train, *config.data.sources):
        records = _records(spec, config, "train", notes)
        limits["images"] = reader()
        mixed = spec if config.data.sources else ""
        if isinstance(records, Stream):
            sources.append(_encoded_stream(records, tokenizer, limits, spec, mixed))
            raw += digested(records)
            first = records.first(STREAM_ITEMS)
            log_rewards_of_file(config, spec, (record["data_source"] for record in first))
            warn_unread(spec, first, tokenizer)
            warn_hidden(spec, first[: records.rows], texts)
            continue
        log_rewards_of_file(config, spec, (record["data_source"] for record in records))
        prompts, more = in_source(spec, encode_prompts, records, tokenizer, **limits)
        numbered = enumerate(prompts, start=ids)  # prompt_id: unique over all sources
        sources.append([dataclasses.replace(p, source=mixed, prompt_id=i) for i, p in numbered])
        ids += len(prompts)
        counts = {k: counts.get(k, 0) + v for k, v in more.items()}
        notes.append(kept_line(spec, "prompts", more, config.data.max_prompt_tokens))
        if is_path(spec):
            _warn_bare(spec, records, tokenizer, kind)
            warn_unread(spec, records, tokenizer)
        warn_hidden(spec, records, texts)
        raw += records
    _warn_dropped(counts)
    test_records = _test_records(config, notes)
    test, cut, held = [], {}, config.data.test or "held out"
    if test_records:
        test, cut = in_source(held, encode_prompts, test_records, tokenizer, **limits)
        warn_hidden(held, test_records, texts)
        notes.append(kept_line(held, "test prompts", cut, config.data.max_prompt_tokens))
    if cut.get("dropped_overlong"):
        counts["test_dropped_overlong"] = cut["dropped_overlong"]
    spec = config.sft.data or config.data.train
    examples = demonstrations_of(config, tokenizer, spec, notes, reader())
    pretraining = pretraining_of(config, tokenizer, notes, reader())
    raw += [*test_records, *examples.digested, *pretraining.digested]
    data = Data(
        sources=sources,
        test_prompts=test,
        examples=examples.items,
        counts={**counts, **examples.counts, **pretraining.counts},
        prompt_tokens=config.data.max_prompt_tokens,
        example_tokens=examples.tokens,
        digest=fingerprint([*raw, {"tokenizer": tokenizer.fingerprint()}]),
        kind=kind,
        notes=tuple(dict.fromkeys(notes)),
        pretraining=pretraining.items,
        pretraining_tokens=pretraining.tokens,
        images=_images_of(reader(), [*sources, test], config.data.max_prompt_tokens),
        example_images=_images_of(reader(), [examples.items], examples.tokens),
        pretraining_images=_images_of(reader(), [pretraining.items], pretraining.tokens),
    )
    if data.endless:  # the length of the longest prompt is not known
        return data
    longest = max(len(p.token_ids) for p in [*data.prompts, *test])
    return dataclasses.replace(data, prompt_tokens=longest)


def _images_of(reader: ImageReader | None, sources: list, most_tokens: int = 0):
    """The layout of the images of all items of the sources; of a stream of its first ones, of which
    any further one has `most_tokens` at most."""
    if reader is None:
        return None
    endless = any(isinstance(source, Stream) for source in sources)
    items = [
        item
        for source in sources
        for item in (source.first(STREAM_ITEMS) if isinstance(source, Stream) else source)
    ]
    rows = [item_images(x["item"] if isinstance(x, dict) else x) for x in items if x is not None]
    return layout_of(reader, rows, most_tokens if endless else 0)


def _encoded_stream(
    records: Stream, tokenizer: Tokenizer, limits: dict, spec: str, mixed: str
) -> Stream:
    def encoded(index: int) -> tuple[PromptRecord | None, dict[str, int]]:
        prompt, cut = in_source(spec, encode_prompt, records[index], tokenizer, **limits)
        counts = {"truncated": int(cut), "dropped_overlong": int(prompt is None)}
        return prompt and dataclasses.replace(prompt, source=mixed), counts

    return CountedStream(encoded, rows=records.rows)


def _stored_items(
    config: Config, tokenizer: Tokenizer, kind: str, spec: str, options: dict, notes: list[str]
) -> tuple[Stream, list[dict]]:
    """Encoded rows of a file as a stream, and what of them is in the digest."""
    records = load_stored_rows(spec, kind, notes, _unlearned(config, kind))
    warn_unread(spec, records.first(STREAM_ITEMS), tokenizer)

    def encoded(index: int) -> tuple[dict | None, dict[str, int]]:
        item, counts = in_source(spec, encode_row, records[index], tokenizer, kind, **options)
        return item and {"prompt_id": index, "source": spec, "item": item}, counts

    return CountedStream(encoded, rows=records.rows), digested(records)


def _warn_bare(spec: str, records: list[dict], tokenizer: Tokenizer, kind: str) -> None:
    if count := bare_prompts(records, tokenizer):
        fix = (
            f"rljax data prepare --source={spec} --out=FOLDER writes each as a user's message"
            " (--map='gsm8k()' adds GSM8K's instruction)"
            if kind in SAMPLED
            else 'write [{"role": "user", "content": ...}] for the prompt and'
            ' [{"role": "assistant", "content": ...}] for what answers it'
        )
        text = (
            "%s: %d prompts are bare text, and the model has a chat template: it reads them outside"
            " of any turn. Fix: %s"
        )
        LOG.warning(text, spec, count, fix)


def _test_records(config: Config, notes: list[str]) -> list[dict]:
    """Held-out prompts: those of data.test, else of the tasks' test splits, and of the files of
    which a part is held out, in equal shares."""
    specs, count = [config.data.test], config.evaluate.prompts
    if not config.data.test:
        every = (config.data.train, *config.data.sources)
        specs = [s for s in every if held_out_fraction(config, s) or not is_path(s)]
    records = []
    for number, spec in enumerate(specs):
        share = count * (number + 1) // len(specs) - count * number // len(specs)
        mixed = {"source": spec} if len(specs) > 1 else {}
        with _of_test(config, "prompts"):
            records += [{**r, **mixed} for r in _records(spec, config, "test", notes)[:share]]
    return records


def _of_test(config: Config, kind: str):
    """Wraps code that reads data.test, or what is held out where it is not set."""
    if not config.data.test:
        return contextlib.nullcontext()
    return rows_of("data.test", f"--config.data.test=FILE of {kind}")


def _warn_dropped(counts: dict) -> None:
    dropped, total = counts.get("dropped_overlong", 0), counts.get("total", 0)
    if dropped > _WARN_ABOVE * total:
        LOG.warning(
            "%d of %d prompts are dropped: longer than data.max_prompt_tokens", dropped, total
        )


def _held_rows(config: Config, kind: str) -> list[dict]:
    """Rows for eval/loss: of data.test, else what is held out of the training files, in equal
    shares."""
    files = (config.data.train, *config.data.sources)
    specs = [spec for spec in files if held_out_fraction(config, spec)]
    specs, rows = [config.data.test] if config.data.test else specs, []
    for spec in specs:
        share = -(-config.evaluate.prompts // len(specs))
        with _of_test(config, f"{kind}, as data.train"):
            rows += load_rows(spec, "test", kind, None, held_out_fraction(config, spec))[:share]
    return rows


def _held_out(
    config: Config, tokenizer: Tokenizer, kind: str, options: dict, notes: list[str]
) -> tuple[list[dict], list[dict]]:
    """The rows for eval/loss, and what they are encoded."""
    rows = _held_rows(config, kind)
    if not rows:
        return [], []
    source = config.data.test or "held-out rows"
    items, cut = in_source(source, encode_rows, rows, tokenizer, kind, **options)
    held = config.data.test or "held out"
    notes.append(kept_line(held, "held-out rows", cut, config.offline.max_tokens))
    if config.offline.packing:
        items = pack_examples(items, config.offline.max_tokens).rows
    return rows, [{"item": item} for item in items]


def _unlearned(config: Config, kind: str) -> dict[str, tuple[str, ...]]:
    """Columns of pairs that neither the dataflow nor the loss of a run reads, by what they hold; {}
    for functions of the user's own, which may read the batch as they like."""
    if kind != "pairs":
        return {}
    dataflow = resolve(config.dataflow, NAMESPACES["dataflow"])
    scores_rows = "reward_model" in dataflow.parameters
    stage = "reward_loss" if scores_rows else "preference_loss"
    loss = resolve(value_of(config, f"algorithm.{stage}"), NAMESPACES[stage])
    if not all(one.function.__module__.startswith("rljax.") for one in (dataflow, loss)):
        return {}
    # The scores of a policy's pairs say which of them tie.
    margins = ("margin", *(("score_chosen", "score_rejected") if scores_rows else ()))
    rows = max(contracts.spec(one).rows for one in (dataflow, loss))
    found = {"margin": margins if "scores" not in contracts.spec(loss).reads else ()}
    return found | {"reference": () if rows == 3 else ("reference",)}


def _offline_data(config: Config, tokenizer: Tokenizer, kind: str) -> Data:
    """Rows of one kind for training and, held out, for eval/loss; prompts for greedy accuracy."""
    offline = config.offline
    reader = functools.cache(lambda: image_reader(config, tokenizer))  # once rows are checked
    options = dict(max_tokens=offline.max_tokens, ties=offline.ties)
    options |= dict(overlong=config.data.overlong, turns=config.data.turns)
    options["separator"] = offline.step_separator
    sources, counts, raw, notes = [], {}, [], []
    for spec in (config.data.train, *config.data.sources):
        if config.data.stream and is_path(spec):
            stored, first = _stored_items(config, tokenizer, kind, spec, options, notes)
            sources.append(stored)
            raw += first
            continue
        held = held_out_fraction(config, spec)
        rows = load_rows(spec, "train", kind, notes, held, _unlearned(config, kind))
        options["images"] = reader()
        items, more = in_source(spec, encode_rows, rows, tokenizer, kind, **options)
        notes.append(kept_line(spec, "rows", more, offline.max_tokens))
        if is_path(spec):
            _warn_bare(spec, rows, tokenizer, kind)
            warn_unread(spec, rows, tokenizer)
        if config.offline.packing:
            tokens = sum(len(item.ids) for item in items)
            items = pack_examples(items, config.offline.max_tokens).rows
            more = {**more, "packed_rows": len(items), "packed_tokens": tokens}
        first = sum(len(s) for s in sources if not isinstance(s, Stream))
        named = [{"prompt_id": first + i, "source": spec, "item": x} for i, x in enumerate(items)]
        sources.append(named)
        counts = {k: counts.get(k, 0) + v for k, v in more.items()}
        raw += rows
    if "packed_rows" in counts:
        room = counts["packed_rows"] * config.offline.max_tokens
        counts["packing_efficiency"] = round(counts["packed_tokens"] / room, 4)
    options["images"] = reader()
    held_rows, held = _held_out(config, tokenizer, kind, options, notes)
    test, test_records = [], []
    if config.evaluate.prompts_from:
        prompts = "--config.evaluate.prompts_from=FILE of prompts with answers"
        with rows_of("evaluate.prompts_from", prompts):
            test_records = load_prompts(config.evaluate.prompts_from, "test")
        test_records = test_records[: config.evaluate.prompts]
        limit = config.data.max_prompt_tokens
        how = dict(max_prompt_tokens=limit, images=reader())
        test, cut = in_source(
            config.evaluate.prompts_from, encode_prompts, test_records, tokenizer, **how
        )
        notes.append(kept_line(config.evaluate.prompts_from, "test prompts", cut, limit))
    examples = demonstrations_of(config, tokenizer, config.sft.data, notes, reader())
    every = [*raw, *held_rows, *test_records, *examples.digested]
    return Data(
        sources=sources,
        test_prompts=test,
        examples=examples.items,
        counts={**counts, **examples.counts},
        prompt_tokens=max((len(p.token_ids) for p in test), default=1),
        example_tokens=examples.tokens,
        digest=fingerprint([*every, {"tokenizer": tokenizer.fingerprint()}]),
        kind=kind,
        held_out=held,
        notes=tuple(dict.fromkeys(notes)),
        images=_images_of(reader(), [*sources, held, test], offline.max_tokens),
        example_images=_images_of(reader(), [examples.items], examples.tokens),
    )
