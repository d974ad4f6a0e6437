"""From a config to token arrays: the tokenizer of a run, and its prompts and examples, encoded
once.

What lives here: which sources a config names and what is done to their records. What does not: how
one record is read (sources), templated (chat) or encoded (prompts).
"""

import dataclasses

import numpy as np

from rljax.components import resolve
from rljax.config import HOMES, Config, is_path
from rljax.data.loader import fingerprint
from rljax.data.packing import pack_examples
from rljax.data.preference_rows import load_rows
from rljax.data.preferences import encode_rows
from rljax.data.prompts import encode_prompts, encode_worked_examples
from rljax.data.sources import load_prompts, load_worked_examples
from rljax.data.tokenizer import CharTokenizer, Tokenizer, load_tokenizer
from rljax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Data:
    """Encoded once. Lengths are those of the longest row, so that a run has one shape."""

    sources: list[list[dict]]  # the prompts of every source; one list where nothing is mixed
    test_prompts: list[dict]
    examples: list
    counts: dict[str, float]
    prompt_tokens: int
    example_tokens: int
    digest: str
    kind: str = "prompts"  # of sources: rljax.data.kinds
    held_out: list[dict] = dataclasses.field(default_factory=list)  # records too, for eval/loss

    @property
    def prompts(self) -> list[dict]:
        """All training prompts."""
        return [prompt for source in self.sources for prompt in source]


def load_run_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer folder of the config, else the model's folder, else the alphabet of the
    task."""
    if config.tokenizer:
        return load_tokenizer(config.tokenizer)
    if is_path(config.model):
        return load_tokenizer(config.model)
    if is_path(config.data.train):
        raise InputError(
            "a built-in model has no tokenizer for a data file",
            value=config.data.train,
            fix="set tokenizer to a folder with tokenizer.json, or model to a Hugging Face folder",
        )
    alphabet = ""
    for spec in (config.data.train, *config.data.sources):
        task = None if is_path(spec) else resolve(spec, HOMES["data"])()
        letters = vars(task).get("alphabet") if task is not None else None
        if not isinstance(letters, str):
            raise InputError(f"task {spec!r} has no alphabet", fix="set tokenizer to a folder")
        alphabet += "".join(c for c in letters if c not in alphabet)
    return CharTokenizer(alphabet)


def with_target_length(record: dict, config: Config, split: str) -> dict:
    """The record with a length to aim at: in extra_info, and asked for in the prompt (L1,
    ALGORITHMS H3). The draw is a function of (seed, split, index)."""
    low, high = config.data.target_tokens
    seed = np.random.SeedSequence([config.seed, split == "test", int(record["index"])])
    target = int(np.random.default_rng(seed).integers(low, high + 1))
    asked = config.data.target_instruction.format(target_tokens=target)
    prompt = record["prompt"]
    if isinstance(prompt, str):
        prompt = prompt + asked
    else:
        last = {**prompt[-1], "content": prompt[-1].get("content", "") + asked}
        prompt = [*prompt[:-1], last]
    extra = {**record["extra_info"], "target_tokens": target}
    return {**record, "prompt": prompt, "extra_info": extra}


def _records(spec: str, config: Config, split: str) -> list[dict]:
    records = load_prompts(spec, split)
    if config.data.target_tokens:
        records = [with_target_length(r, config, split) for r in records]
    return list(records)


def load_data(config: Config, tokenizer: Tokenizer, kind: str = "prompts") -> Data:
    """Every source of the config, encoded. Raises InputError for what the user can mend."""
    if kind != "prompts":
        return _offline_data(config, tokenizer, kind)
    limits = dict(max_prompt_tokens=config.data.max_prompt_tokens, overlong=config.data.overlong)
    sources, counts, seen = [], {}, []
    for spec in (config.data.train, *config.data.sources):
        records = _records(spec, config, "train")
        prompts, found = encode_prompts(records, tokenizer, **limits)
        first = sum(len(s) for s in sources)  # prompt_id: unique over all sources
        mixed = {"source": spec} if config.data.sources else {}
        sources.append([{**p, **mixed, "prompt_id": first + i} for i, p in enumerate(prompts)])
        counts = {k: counts.get(k, 0) + v for k, v in found.items()}
        seen += records
    test_records, test = [], []
    test_spec = config.data.test or ("" if is_path(config.data.train) else config.data.train)
    if test_spec:
        test_records = _records(test_spec, config, "test")[: config.evaluate.prompts]
        test, _ = encode_prompts(test_records, tokenizer, **limits)
    worked, examples, found = _worked(config, tokenizer, config.sft.data or config.data.train)
    return Data(
        sources=sources,
        test_prompts=test,
        examples=examples,
        counts={**counts, **found},
        prompt_tokens=max(len(p["token_ids"]) for p in [*sum(sources, []), *test]),
        example_tokens=max((len(ids) for ids, _ in examples), default=1),
        digest=fingerprint([*seen, *test_records, *worked, {"tokenizer": tokenizer.fingerprint()}]),
    )


def _worked(config: Config, tokenizer: Tokenizer, spec: str) -> tuple[list[dict], list, dict]:
    """Records, encoded examples and counts of the supervised phase; nothing where it has no
    steps."""
    if not config.sft.steps:
        return [], [], {}
    worked = load_worked_examples(spec, "train")
    total = config.data.max_prompt_tokens + config.sampler.max_response_tokens
    examples, found = encode_worked_examples(worked, tokenizer, max_tokens=total)
    return worked, examples, {f"examples_{k}": v for k, v in found.items()}


def _offline_data(config: Config, tokenizer: Tokenizer, kind: str) -> Data:
    """Rows of one kind for training and, held out, for eval/loss; prompts for greedy accuracy."""
    offline = config.offline
    wish = dict(
        max_tokens=offline.max_tokens, overlong=config.data.overlong, ties=offline.ties,
        separator=offline.step_separator,
    )  # fmt: skip
    sources, counts, seen = [], {}, []
    for spec in (config.data.train, *config.data.sources):
        rows = load_rows(spec, "train", kind)
        items, found = encode_rows(rows, tokenizer, kind, **wish)
        if config.offline.packing:
            tokens = sum(len(ids) for ids, _ in items)
            items = pack_examples(items, config.offline.max_tokens).rows
            found = {**found, "packed_rows": len(items), "packed_tokens": tokens}
        first = sum(len(s) for s in sources)
        named = [{"prompt_id": first + i, "source": spec, "item": x} for i, x in enumerate(items)]
        sources.append(named)
        counts = {k: counts.get(k, 0) + v for k, v in found.items()}
        seen += rows
    if "packed_rows" in counts:
        room = counts["packed_rows"] * config.offline.max_tokens
        counts["packing_efficiency"] = round(counts["packed_tokens"] / room, 4)
    held_out, held_rows = [], []
    if config.data.test:
        held_rows = load_rows(config.data.test, "test", kind)[: config.evaluate.prompts]
        held_out, _ = encode_rows(held_rows, tokenizer, kind, **wish)
        if config.offline.packing:
            held_out = pack_examples(held_out, config.offline.max_tokens).rows
    test, test_records = [], []
    if config.evaluate.prompts_from:
        test_records = load_prompts(config.evaluate.prompts_from, "test")[: config.evaluate.prompts]
        limit = config.data.max_prompt_tokens
        test, _ = encode_prompts(test_records, tokenizer, max_prompt_tokens=limit)
    worked, examples, found = _worked(config, tokenizer, config.sft.data)
    every = [*seen, *held_rows, *test_records, *worked, {"tokenizer": tokenizer.fingerprint()}]
    return Data(
        sources=sources,
        test_prompts=test,
        examples=examples,
        counts={**counts, **found},
        prompt_tokens=max((len(p["token_ids"]) for p in test), default=1),
        example_tokens=max((len(ids) for ids, _ in examples), default=1),
        digest=fingerprint(every),
        kind=kind,
        held_out=[{"item": item} for item in held_out],
    )
