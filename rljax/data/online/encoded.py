"""From a config to token arrays: the tokenizer of a run, and its prompts and examples.

One record is read by rljax.data.rows.sources and encoded by rljax.data.online.prompts.
"""

import contextlib
import dataclasses
import datetime
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
    evaluation_text,
    log_rewards_of_file,
    reads_reference,
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
from rljax.data.rows.columns import PAIR_SCORES, rows_of
from rljax.data.rows.sources import load_endless_prompts, load_prompts
from rljax.data.rows.split import held_out_fraction
from rljax.data.rows.unread import REWARDS
from rljax.data.text.tokenizer import CharTokenizer, Tokenizer, load_tokenizer
from rljax.errors import InputError
from rljax.files import parse_json

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
    notes: tuple[str, ...] = ()  # lines about the data that a run logs at its start
    pretraining: list | Stream = dataclasses.field(default_factory=list)  # of pretraining.data
    pretraining_tokens: int = 1  # of the longest one
    # The layouts of the images of sources, test_prompts and held_out, of examples, of pretraining;
    # None where none of these rows has an image.
    images: ImageLayout | None = None
    example_images: ImageLayout | None = None
    pretraining_images: ImageLayout | None = None

    @property
    def prompts(self) -> list[PromptRecord] | list[dict]:
        """Returns all training prompts, or rows, of the sources that are not streams."""
        return [p for source in self.sources if not isinstance(source, Stream) for p in source]

    @property
    def first(self) -> PromptRecord | dict | None:
        """Returns a prompt, or row, of the first source; None if it has none."""
        source = self.sources[0] if self.sources else []
        items = source.first(STREAM_ITEMS) if isinstance(source, Stream) else source[:1]
        return next((item for item in items if item is not None), None)

    @property
    def endless(self) -> bool:
        """Returns whether a source is a stream."""
        return any(isinstance(source, Stream) for source in self.sources)


def load_run_tokenizer(config: Config, now: datetime.datetime | None = None) -> Tokenizer:
    """Returns the tokenizer of the config's folder, else of the model's folder, else one of the
    characters of its tasks; `now` is the date that its chat template writes. Raises InputError if a
    built-in model reads a file, or a task without an alphabet, and for a folder that
    `load_tokenizer` refuses."""
    variables = template_variables(config)
    if config.tokenizer:
        return load_tokenizer(config.tokenizer, now=now, variables=variables)
    if is_path(config.model):
        return load_tokenizer(config.model, now=now, variables=variables)
    if is_path(config.data.train):
        raise InputError(
            "a built-in model has no tokenizer for a data file",
            value=config.data.train,
            fix="set tokenizer to a folder with tokenizer.json, or model to a Hugging Face folder",
        )
    alphabet = ""
    for spec in (config.data.train, *config.data.sources):
        task = None if is_path(spec) else resolve(spec, NAMESPACES["data"])()
        characters = vars(task).get("alphabet") if task is not None else None
        if not isinstance(characters, str):
            raise InputError(f"task {spec!r} has no alphabet", fix="set tokenizer to a folder")
        alphabet += "".join(character for character in characters if character not in alphabet)
    return CharTokenizer(alphabet)


def template_variables(config: Config) -> dict[str, object]:
    """Returns the variables of the chat template in data.template_variables, by name: JSON values,
    or texts. Raises InputError for an entry that is not NAME=VALUE."""
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
    """Returns the record with a target length, in tokens, in extra_info, and an instruction to
    reach it in the prompt (L1). The length is drawn by (seed, split, index)."""
    low, high = config.data.target_tokens
    seed = np.random.SeedSequence([config.seed, split == "test", int(record["index"])])
    target = int(np.random.default_rng(seed).integers(low, high + 1))
    instruction = config.data.target_instruction.format(target_tokens=target)
    prompt = record["prompt"]
    if isinstance(prompt, str):
        prompt = prompt + instruction
    else:
        # A turn of the assistant at the end is continued: the instruction stands before it.
        before_answer = [k for k, m in enumerate(prompt) if m["role"] != "assistant"]
        position = before_answer[-1] if before_answer else len(prompt) - 1
        message = {**prompt[position], "content": prompt[position].get("content", "") + instruction}
        prompt = [*prompt[:position], message, *prompt[position + 1 :]]
    extra_info = {**record["extra_info"], "target_tokens": target}
    return {**record, "prompt": prompt, "extra_info": extra_info}


def _records(spec: str, config: Config, split: str, notes: list[str]) -> list[dict] | Stream:
    options = {}
    if is_path(spec):
        texts = {training_text(config), evaluation_text(config)}
        need, check = reads_reference(texts), reference_check(texts)
        options = dict(need_ground_truth=need, check=check, notes=notes)
        options["test_fraction"] = held_out_fraction(config, spec)
        options |= {"stored": True} if split == "train" and config.data.stream else {}
    if split == "train":
        records = load_endless_prompts(spec, **options)
    else:
        records = load_prompts(spec, split, **options)
    if not config.data.target_tokens:
        return records
    if isinstance(records, Stream):

        def record_at(index):
            return with_target_length(records[index], config, split)

        return Stream(record_at, rows=records.rows)
    return [with_target_length(record, config, split) for record in records]


def load_data(config: Config, tokenizer: Tokenizer, kind: str = "rollouts") -> Data:
    """Returns the encoded data of every source of the config. Raises InputError for bad data or
    options, and names the source and row."""
    if kind not in SAMPLED:
        return _offline_data(config, tokenizer, kind)
    limits = dict(max_prompt_tokens=config.data.max_prompt_tokens, overlong=config.data.overlong)
    # Rows are checked before a model is opened.
    reader = functools.cache(lambda: image_reader(config, tokenizer))
    texts = {training_text(config), evaluation_text(config)}
    sources, counts, digested_records, next_id, notes = [], {}, [], 0, []
    for spec in (config.data.train, *config.data.sources):
        records = _records(spec, config, "train", notes)
        limits["images"] = reader()
        source_name = spec if config.data.sources else ""
        if isinstance(records, Stream):
            sources.append(_encoded_stream(records, tokenizer, limits, spec, source_name))
            digested_records += digested(records)
            sample = records.first(STREAM_ITEMS)
            log_rewards_of_file(config, spec, (record["data_source"] for record in sample))
            warn_unread(spec, sample, tokenizer)
            warn_hidden(spec, sample[: records.rows], texts)
            continue
        log_rewards_of_file(config, spec, (record["data_source"] for record in records))
        prompts, source_counts = in_source(spec, encode_prompts, records, tokenizer, **limits)
        numbered = enumerate(prompts, start=next_id)  # prompt_id: unique over all sources
        sources.append(
            [dataclasses.replace(prompt, source=source_name, prompt_id=i) for i, prompt in numbered]
        )
        next_id += len(prompts)
        counts = {k: counts.get(k, 0) + v for k, v in source_counts.items()}
        notes.append(kept_line(spec, "prompts", source_counts, config.data.max_prompt_tokens))
        if is_path(spec):
            _warn_of_bare_prompts(spec, records, tokenizer, kind)
            warn_unread(spec, records, tokenizer)
        warn_hidden(spec, records, texts)
        digested_records += records
    _warn_dropped(counts)
    test_records = _test_records(config, notes)
    test, test_counts, test_name = [], {}, config.data.test or "held out"
    if test_records:
        test, test_counts = in_source(test_name, encode_prompts, test_records, tokenizer, **limits)
        warn_hidden(test_name, test_records, texts)
        notes.append(
            kept_line(test_name, "test prompts", test_counts, config.data.max_prompt_tokens)
        )
    if test_counts.get("dropped_overlong"):
        counts["test_dropped_overlong"] = test_counts["dropped_overlong"]
    spec = config.sft.data or config.data.train
    examples = demonstrations_of(config, tokenizer, spec, notes, reader())
    pretraining = pretraining_of(config, tokenizer, notes, reader())
    digested_records += [*test_records, *examples.digested, *pretraining.digested]
    data = Data(
        sources=sources,
        test_prompts=test,
        examples=examples.items,
        counts={**counts, **examples.counts, **pretraining.counts},
        prompt_tokens=config.data.max_prompt_tokens,
        example_tokens=examples.tokens,
        digest=fingerprint([*digested_records, {"tokenizer": tokenizer.fingerprint()}]),
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
    longest = max(len(prompt.token_ids) for prompt in [*data.prompts, *test])
    return dataclasses.replace(data, prompt_tokens=longest)


def _images_of(reader: ImageReader | None, sources: list, most_tokens: int = 0):
    """Returns the layout of the images of all items of the sources. Of a stream it reads the first
    items; a further one has `most_tokens` at most."""
    if reader is None:
        return None
    endless = any(isinstance(source, Stream) for source in sources)
    items = [
        item
        for source in sources
        for item in (source.first(STREAM_ITEMS) if isinstance(source, Stream) else source)
    ]
    rows = [
        item_images(item["item"] if isinstance(item, dict) else item)
        for item in items
        if item is not None
    ]
    return layout_of(reader, rows, most_tokens if endless else 0)


def _encoded_stream(
    records: Stream, tokenizer: Tokenizer, limits: dict, spec: str, source_name: str
) -> Stream:
    def encoded(index: int) -> tuple[PromptRecord | None, dict[str, int]]:
        prompt, is_cut = in_source(spec, encode_prompt, records[index], tokenizer, **limits)
        counts = {"truncated": int(is_cut), "dropped_overlong": int(prompt is None)}
        return prompt and dataclasses.replace(prompt, source=source_name), counts

    return CountedStream(encoded, rows=records.rows)


def _stored_items(
    config: Config, tokenizer: Tokenizer, kind: str, spec: str, options: dict, notes: list[str]
) -> tuple[Stream, list[dict]]:
    """Returns encoded rows of a file as a stream, and the part of them that the digest covers."""
    columns = dict(
        unlearned=_unlearned_columns(config, kind), reads_margin=_reads_margin(config, kind)
    )
    records = load_stored_rows(spec, kind, notes, **columns)
    warn_unread(spec, records.first(STREAM_ITEMS), tokenizer)

    def encoded(index: int) -> tuple[dict | None, dict[str, int]]:
        item, counts = in_source(spec, encode_row, records[index], tokenizer, kind, **options)
        return item and {"prompt_id": index, "source": spec, "item": item}, counts

    return CountedStream(encoded, rows=records.rows), digested(records)


def _warn_of_bare_prompts(spec: str, records: list[dict], tokenizer: Tokenizer, kind: str) -> None:
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
    """Returns held-out prompts: those of data.test, else of the tasks' test splits, and of the
    files of which a part is held out, in equal shares."""
    specs, count = [config.data.test], config.evaluate.prompts
    if not config.data.test:
        all_specs = (config.data.train, *config.data.sources)
        specs = [spec for spec in all_specs if held_out_fraction(config, spec) or not is_path(spec)]
    records = []
    for number, spec in enumerate(specs):
        share = count * (number + 1) // len(specs) - count * number // len(specs)
        source = {"source": spec} if len(specs) > 1 else {}
        with _naming_test_data(config, "prompts"):
            records += [
                {**record, **source} for record in _records(spec, config, "test", notes)[:share]
            ]
    return records


def _naming_test_data(config: Config, kind: str):
    """Returns a context for code that reads data.test, or held-out rows where it is not set: its
    errors name the field."""
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
    """Returns the rows for eval/loss: of data.test, else those held out of the training files, in
    equal shares."""
    files = (config.data.train, *config.data.sources)
    specs = [spec for spec in files if held_out_fraction(config, spec)]
    specs, rows = [config.data.test] if config.data.test else specs, []
    for spec in specs:
        share = -(-config.evaluate.prompts // len(specs))
        with _naming_test_data(config, f"{kind}, as data.train"):
            fraction, reads_margin = held_out_fraction(config, spec), _reads_margin(config, kind)
            rows += load_rows(spec, "test", kind, None, fraction, reads_margin=reads_margin)[:share]
    return rows


def _held_out(
    config: Config, tokenizer: Tokenizer, kind: str, options: dict, notes: list[str]
) -> tuple[list[dict], list[dict]]:
    """Returns the rows for eval/loss, and their encoded items."""
    rows = _held_rows(config, kind)
    if not rows:
        return [], []
    source = config.data.test or "held-out rows"
    items, held_counts = in_source(source, encode_rows, rows, tokenizer, kind, **options)
    source_name = config.data.test or "held out"
    notes.append(kept_line(source_name, "held-out rows", held_counts, config.offline.max_tokens))
    if config.offline.packing:
        items = pack_examples(items, config.offline.max_tokens).rows
    return rows, [{"item": item} for item in items]


def _unlearned_columns(config: Config, kind: str) -> dict[str, tuple[str, ...]]:
    """Returns the columns that neither the dataflow nor the loss of a run reads, by what they hold
    ("margin", "reference", "logprobs" of pairs, "process_scores" and "outcome" of trajectories); {}
    for functions of the user's own, which may read the batch as they like."""
    if kind == "unpaired":
        return {"logprobs": ("ref_logps", "reference_logps")}
    if kind not in ("pairs", "trajectories"):
        return {}
    dataflow = resolve(config.dataflow, NAMESPACES["dataflow"])
    if kind == "trajectories":
        if not dataflow.function.__module__.startswith("rljax."):
            return {}
        reads_scores = contracts.spec(dataflow).token_rewards
        return {"outcome": REWARDS} if reads_scores else {"process_scores": ("process_scores",)}
    is_reward_model = "reward_model" in dataflow.parameters
    stage = "reward_loss" if is_reward_model else "preference_loss"
    loss = resolve(value_of(config, f"algorithm.{stage}"), NAMESPACES[stage])
    if not all(
        component.function.__module__.startswith("rljax.") for component in (dataflow, loss)
    ):
        return {}
    # Scores say which pairs tie, whatever the loss reads.
    margins = ("margin", *(sum(PAIR_SCORES, ()) if is_reward_model else ()))
    rows = max(contracts.spec(component).rows for component in (dataflow, loss))
    columns = {"margin": margins if "scores" not in contracts.spec(loss).reads else ()}
    if not is_reward_model:  # which has no reference
        sides = ("chosen_logps", "rejected_logps")
        columns["logprobs"] = tuple(f"{of}_{side}" for of in ("ref", "reference") for side in sides)
    return columns | {"reference": () if rows == 3 else ("reference",)}


def _reads_margin(config: Config, kind: str) -> bool:
    """Returns whether the loss of a reward model, one of rljax, reads the margins of pairs."""
    dataflow = resolve(config.dataflow, NAMESPACES["dataflow"])
    if kind != "pairs" or "reward_model" not in dataflow.parameters:
        return False
    loss = resolve(config.algorithm.reward_loss, NAMESPACES["reward_loss"])
    is_ours = loss.function.__module__.startswith("rljax.")
    return is_ours and "scores" in contracts.spec(loss).reads


def _offline_data(config: Config, tokenizer: Tokenizer, kind: str) -> Data:
    """Returns rows of one kind for training and, held out, for eval/loss; and prompts for greedy
    accuracy."""
    offline = config.offline
    reader = functools.cache(lambda: image_reader(config, tokenizer))  # once rows are checked
    options = dict(max_tokens=offline.max_tokens, ties=offline.ties)
    options |= dict(overlong=config.data.overlong, turns=config.data.turns)
    options["separator"] = offline.step_separator
    sources, counts, digested_records, notes = [], {}, [], []
    for spec in (config.data.train, *config.data.sources):
        if config.data.stream and is_path(spec):
            stored, stored_sample = _stored_items(config, tokenizer, kind, spec, options, notes)
            sources.append(stored)
            digested_records += stored_sample
            continue
        held_fraction = held_out_fraction(config, spec)
        columns = dict(
            unlearned=_unlearned_columns(config, kind), reads_margin=_reads_margin(config, kind)
        )
        rows = load_rows(spec, "train", kind, notes, held_fraction, **columns)
        options["images"] = reader()
        items, source_counts = in_source(spec, encode_rows, rows, tokenizer, kind, **options)
        notes.append(kept_line(spec, "rows", source_counts, offline.max_tokens))
        if is_path(spec):
            _warn_of_bare_prompts(spec, rows, tokenizer, kind)
            warn_unread(spec, rows, tokenizer)
        if config.offline.packing:
            tokens = sum(len(item.ids) for item in items)
            items = pack_examples(items, config.offline.max_tokens).rows
            source_counts = {**source_counts, "packed_rows": len(items), "packed_tokens": tokens}
        first_id = sum(len(source) for source in sources if not isinstance(source, Stream))
        numbered = [
            {"prompt_id": i, "source": spec, "item": item}
            for i, item in enumerate(items, start=first_id)
        ]
        sources.append(numbered)
        counts = {k: counts.get(k, 0) + v for k, v in source_counts.items()}
        digested_records += rows
    if "packed_rows" in counts:
        row_tokens = counts["packed_rows"] * config.offline.max_tokens
        counts["packing_efficiency"] = round(counts["packed_tokens"] / row_tokens, 4)
    options["images"] = reader()
    held_rows, held_out = _held_out(config, tokenizer, kind, options, notes)
    test, test_records = [], []
    if config.evaluate.prompts_from:
        prompts = "--config.evaluate.prompts_from=FILE of prompts with answers"
        with rows_of("evaluate.prompts_from", prompts):
            test_records = load_prompts(config.evaluate.prompts_from, "test")
        test_records = test_records[: config.evaluate.prompts]
        limit = config.data.max_prompt_tokens

        test, test_counts = in_source(
            config.evaluate.prompts_from,
            encode_prompts,
            test_records,
            tokenizer,
            max_prompt_tokens=limit,
            images=reader(),
        )
        notes.append(kept_line(config.evaluate.prompts_from, "test prompts", test_counts, limit))
    examples = demonstrations_of(config, tokenizer, config.sft.data, notes, reader())
    all_records = [*digested_records, *held_rows, *test_records, *examples.digested]
    return Data(
        sources=sources,
        test_prompts=test,
        examples=examples.items,
        counts={**counts, **examples.counts},
        prompt_tokens=max((len(p.token_ids) for p in test), default=1),
        example_tokens=examples.tokens,
        digest=fingerprint([*all_records, {"tokenizer": tokenizer.fingerprint()}]),
        kind=kind,
        held_out=held_out,
        notes=tuple(dict.fromkeys(notes)),
        images=_images_of(reader(), [*sources, held_out, test], offline.max_tokens),
        example_images=_images_of(reader(), [examples.items], examples.tokens),
    )
