"""Policies on disk, and sampling a policy on a list of prompts.

A run may still be training: nothing here writes into its folder.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
import optax

from rljax import hub
from rljax.arrays import fetch
from rljax.batch import LIMITS, FinishReason
from rljax.config import Config, MeshConfig, from_dict
from rljax.config.trust import refuse_own_code, untrained, vouched
from rljax.data.images.encode import ImageLayout, ImageReader, image_reader, layout_of
from rljax.data.online.encoded import load_run_tokenizer
from rljax.data.online.prompts import PromptRecord, Prompts, encode_prompts
from rljax.data.text.tokenizer import Tokenizer
from rljax.errors import InputError
from rljax.files import read_json_object
from rljax.gguf import is_gguf
from rljax.keys import fold_in
from rljax.learn.state import new_train_state
from rljax.models.huggingface import load_params
from rljax.models.model import Model
from rljax.models.trees import merged
from rljax.reasoning import response_of
from rljax.roles import Actor
from rljax.rollout import Environment, Reward, sample_scored
from rljax.sampler import Sampling, held_weights
from rljax.sampler.memory import slots_that_fit
from rljax.setup.checkpoint import Checkpoints, Damaged
from rljax.setup.decoding import decoding_of
from rljax.setup.rewards import model_scorer, text_scorer
from rljax.setup.scoring import make_environment
from rljax.setup.setup import check_length, load_model, make_sampling
from rljax.setup.weights import initial_params
from rljax.tracking.mirror import local_copy
from rljax.tracking.store import is_folder, is_url

ROWS_PER_CALL = 256  # sampled at once, where nobody says how many
_SCORED_ROWS = 8  # by a reward model at once, on each device


@dataclasses.dataclass(frozen=True)
class Policy:
    """What `sample_all` samples: an actor, the tokenizer of its texts, how it samples, the columns
    that prompts are padded to, and the layout of their images."""

    actor: Actor
    tokenizer: Tokenizer
    sampling: Sampling
    prompt_tokens: int
    images: ImageLayout | None = None  # of the prompts, where they have any

    def greedy(self) -> "Policy":
        return dataclasses.replace(self, sampling=self.sampling.greedy())

    def continuing(self, prompt_tokens: int) -> "Policy":
        """The policy on prompts that end with the beginning of a response: its thinking budget
        would be counted anew there, so it has none."""
        sampling = dataclasses.replace(self.sampling, thinking_tokens=())
        return dataclasses.replace(self, sampling=sampling, prompt_tokens=prompt_tokens)


@dataclasses.dataclass(frozen=True)
class SavedPolicy:
    """A policy opened from a folder. `step` is None for a Hugging Face folder."""

    config: Config  # the run's, or the default one around a Hugging Face folder
    model: Model
    params: dict
    tokenizer: Tokenizer
    step: int | None
    images: ImageReader | None = None  # how the model reads images
    # generation_config.json of a Hugging Face folder; {} where there is none, and of a run.
    generation: dict = dataclasses.field(default_factory=dict)

    def actor(self) -> Actor:
        """An actor without an optimizer."""
        optimizer = optax.identity()
        state = dataclasses.replace(new_train_state({}, optimizer), params=self.params)
        decoding = decoding_of(self.config, self.tokenizer)
        return Actor(state, self.model, optimizer, self.config.sampler.temperature, decoding)

    def sampling(
        self, *, temperature: float | None = None, max_response_tokens: int | None = None
    ) -> Sampling:
        """How the policy samples: as its config says (top_k, stop strings, ...), but for what is
        given."""
        changes = {"temperature": temperature, "max_response_tokens": max_response_tokens}
        changes = {name: value for name, value in changes.items() if value is not None}
        sampler = dataclasses.replace(self.config.sampler, **changes)
        return make_sampling(dataclasses.replace(self.config, sampler=sampler), self.tokenizer)

    def encode(
        self, records: Sequence[dict], *, max_tokens: int | None = None, overlong: str = "drop"
    ) -> tuple[list[PromptRecord], dict[str, int]]:
        """Prompts as `sample_all` reads them, and counts. Prompts of more than `max_tokens` (None:
        data.max_prompt_tokens) are dropped."""
        limit = max_tokens or self.config.data.max_prompt_tokens
        how = dict(max_prompt_tokens=limit, overlong=overlong, images=self.images)
        return encode_prompts(records, self.tokenizer, **how)

    def ready(self, prompts: Sequence[PromptRecord], **sampling) -> Policy:
        """The policy as it samples on `prompts`; `sampling` are arguments of `sampling`. It has as
        many slots as have room in memory, where the config does not say how many: they change no
        sample. Raises InputError where a response would not fit into the model's context."""
        longest = max(len(prompt.token_ids) for prompt in prompts)
        how = self.sampling(**sampling)
        check_length(longest, how.max_response_tokens, self.model)
        images = layout_of(self.images, [prompt.images for prompt in prompts])
        actor, columns = self.actor(), longest + how.max_response_tokens
        decoding = actor.decoding
        if not decoding.slots and not decoding.page_tokens:
            room = (decoding.of(self.model), ROWS_PER_CALL, columns, decoding.kv_dtype)
            if (slots := slots_that_fit(*room)) < ROWS_PER_CALL:
                decoding = dataclasses.replace(decoding, slots=slots)
                actor = dataclasses.replace(actor, decoding=decoding)
        return Policy(actor, self.tokenizer, how, longest, images)

    def reward(self, text: str) -> Reward | Environment:
        """The reward `text` of this policy's samples, with the score of the config's reward.model
        where it reads that; the environment of the config, if it has one. Close it: it runs in
        processes of its own."""
        mesh = self.model.mesh

        def opened() -> Reward:
            rows = _SCORED_ROWS * mesh.size
            model = model_scorer(self.config, self.model, self.tokenizer, text, rows)
            return Reward(text_scorer(self.config, text, mesh), self.tokenizer, mesh, model=model)

        if not self.config.environment.function:
            return opened()
        how = self.sampling()
        return make_environment(self.config, self.tokenizer, mesh, how, opened)


# -- opening --


def load_policy(
    folder: str | Path, step: str = "latest", *, trust_code: bool = False,
    read: Callable[[Config], Config] = untrained,
) -> SavedPolicy:  # fmt: skip
    """The policy of a run folder (config.json, checkpoints/) or of a Hugging Face folder; either
    may be a URL, and the latter a repository of the hub. `step` of a run: latest, best, or a
    number.

    A run folder is data: where its config names functions outside of rljax it is refused, unless
    trust_code says that they may run. `read` returns what of the run's config is used.

    All devices here share the weights, whatever mesh the run was trained on.
    """
    if not is_folder(folder) and not is_gguf(folder) and hub.model_name(folder) is None:
        fix = (
            "give a run folder, a Hugging Face folder, a .gguf file, or a model of the hub: "
            "hf://OWNER/NAME"
        )
        raise InputError("no such folder", value=str(folder), fix=fix)
    if not is_url(folder):
        folder = hub.model_folder(folder)
    with local_copy(folder) as here:
        saved = read_json_object(here / "config.json")
        if "model_type" not in saved:
            path = here / "config.json"
            return _run_policy(saved, path, f"{folder}/checkpoints", step, trust_code, read)
        config = Config(model=str(here))
        tokenizer = load_run_tokenizer(config)
        model = load_model(config, tokenizer)
        reader = image_reader(config, tokenizer)
        path = here / "generation_config.json"
        generation = read_json_object(path) if path.is_file() else {}
        params = load_params(here, model)
        return SavedPolicy(config, model, params, tokenizer, None, reader, generation)


def _run_policy(
    saved: dict, path: Path, checkpoints: str, step: str, trust_code: bool,
    read: Callable[[Config], Config],
) -> SavedPolicy:  # fmt: skip
    """The policy of a run with the config `saved`, which lies at `path`."""
    if "dataflow" not in saved:
        raise InputError(
            f"{path} is neither a run's nor a Hugging Face model's",
            value=sorted(saved)[:8],
            fix="give a run folder or a Hugging Face folder",
        )
    config = from_dict(saved, str(path))
    place = f"{checkpoints.removesuffix('checkpoints')}config.json"
    known = trust_code or vouched(config, place, path.parent)
    config = read(config)
    if not known:
        refuse_own_code(config, str(path))
    # The run's layouts were for its devices.
    sampler = dataclasses.replace(config.sampler, layout="")
    config = dataclasses.replace(config, mesh=MeshConfig(), sampler=sampler)
    found = Checkpoints(checkpoints, best_metric=config.checkpoint.best_metric)
    number = _find_step(found, step)
    tokenizer = load_run_tokenizer(config)
    model = load_model(config, tokenizer)
    while True:
        try:
            params = _read_params(found, number, model)
            break
        except Damaged:  # shows when arrays are read: the step before, then
            if step != "latest":
                raise
            number = _find_step(found, step)
    if model.config.has_frozen:  # a checkpoint holds what is trained alone
        params = merged(params, model.split(initial_params(config, model))[1])
    reader = image_reader(config, tokenizer)
    return SavedPolicy(config, model, params, tokenizer, number, reader)


def load_named_policy(name: str, *, trust_code: bool = False) -> SavedPolicy:
    """The policy of a folder or of a repository of the hub, or of RUN@STEP: a step of a run, latest
    or best."""
    folder, at, step = name.rpartition("@")
    if at and not is_folder(name) and (is_folder(folder) or hub.model_name(name) is None):
        return load_policy(folder, step, trust_code=trust_code)
    return load_policy(name, trust_code=trust_code)


def _find_step(checkpoints: Checkpoints, wanted: str) -> int:
    folder, steps = checkpoints.folder, checkpoints.steps()
    if not steps:
        raise InputError(
            f"{folder} holds no checkpoint",
            fix="wait for the run's first one, or give its policy/ folder",
        )
    if wanted == "latest":
        return checkpoints.latest()
    if wanted == "best":
        step = checkpoints.best()
        if step is None:
            rule = f"checkpoint.best_metric is {checkpoints.best_metric!r} in its config.json"
            raise InputError(f"{folder}: no step is the best", rule=rule, fix="--step=latest")
    else:
        step = int(wanted)
    if step not in steps:
        raise InputError(f"{folder} has no step {step}", fix=f"one of {', '.join(map(str, steps))}")
    damage = checkpoints.damage(step)
    if damage:
        raise InputError(f"the checkpoint of step {step} is damaged: {damage}", fix="another step")
    return step


def _read_params(checkpoints: Checkpoints, step: int, model: Model) -> dict:
    """The actor's parameters of a checkpoint; optimizer state and critic stay where they are."""
    like = {"actor": {"params": model.split(model.abstract())[0]}}
    try:
        return checkpoints.read_arrays(step, like, some=True)["actor"]["params"]
    except Damaged:
        raise
    except InputError as error:
        raise InputError(
            f"{checkpoints.path(step)} does not hold the weights of the model in the run's "
            "config.json",
            rule=str(error),
            fix="use the model folder that the run was started with",
        ) from error


# -- sampling --


@dataclasses.dataclass(frozen=True)
class Sample:
    """One completion of a prompt; `prompt` is an index into the prompts that were sampled.

    logprobs: of the sampler, one per id, NaN where the token was forced. reward: NaN where it
    failed, or where there is none. parts: the named parts of its score.
    """

    prompt: int
    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str  # the name of a FinishReason: stop, length, turns, ...
    reward: float = float("nan")
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    turns: int = 1  # of an episode: replies of the policy, and tool calls in them
    calls: int = 0

    @property
    def truncated(self) -> bool:
        return self.finish_reason != "stop"

    @property
    def cut_off(self) -> bool:
        """Whether a limit ended it: of tokens, or of an episode's turns or seconds."""
        return FinishReason[self.finish_reason.upper()] in LIMITS


def filled_chunks(items: Sequence, size: int) -> Iterator[tuple[int, list]]:
    """(where it starts, items) of every chunk of `size`; the last one is filled up with its last
    item, so that all have one shape and one compiled program."""
    for start in range(0, len(items), size):
        chunk = list(items[start : start + size])
        yield start, chunk + [chunk[-1]] * (size - len(chunk))


def _per_call(prompts: int, most: int) -> int:
    """The prompts of each call where none holds more than `most`: as equal as calls can be."""
    return -(-prompts // -(-prompts // most))


@held_weights()
def sample_all(
    policy: Policy,
    prompts: Sequence[PromptRecord],
    n: int = 1,
    reward: Reward | Environment | None = None,
    *,
    key: jax.Array,
    starts: Sequence[int] | None = None,
    prompts_per_call: int | None = None,
) -> list[Sample]:
    """n completions of every prompt, those of one prompt after another; scored where a `reward` is
    given.

    `prompts` are encoded records. `starts`, in tokens, says where the response begins that the
    reward reads: before the prompt's end where a prompt ends with the beginning of a response.
    `prompts_per_call` bounds memory; None: so many that about ROWS_PER_CALL rows are sampled by one
    call. With an environment a completion is an episode: its first
    seat's row, and the text of its last turn.
    """
    if not prompts:
        raise InputError("there are no prompts to sample", fix="check the data and its split")
    size = prompts_per_call or _per_call(len(prompts), max(ROWS_PER_CALL // n, 1))
    begins = [len(prompt.token_ids) for prompt in prompts] if starts is None else starts
    samples = []
    for first, chunk in filled_chunks(list(zip(prompts, begins, strict=True)), size):
        how = dict(length=policy.prompt_tokens, images=policy.images)
        part = Prompts.from_records([p for p, _ in chunk], **how)
        part = dataclasses.replace(part, starts=np.array([b for _, b in chunk], np.int32))
        draw = (fold_in(key, first), policy.sampling)
        live = min(size, len(prompts) - first) * n  # the rows that do not just fill the shape
        scores = [(float("nan"), {})] * live
        if reward is None:
            batch = policy.actor.generate(part, *draw, n=n)
        elif isinstance(reward, Environment):
            samples += _episodes(policy, reward, part, draw, n, first)[:live]
            continue
        else:
            batch, report = sample_scored(policy.actor, reward, part, *draw, n=n)
            scores = [(row.score.value, row.score.parts) for row in report.rows[:live]]
        lengths = np.repeat(part.lengths, n)[:live]
        records = [prompt for prompt, _ in chunk for _ in range(n)]
        rows = zip(_read_rows(batch, lengths, policy.tokenizer, records), scores, strict=True)
        for row, (fields, score) in enumerate(rows):
            samples.append(Sample(first + row // n, *fields, *score))
    return samples


def _episodes(
    policy: Policy, environment: Environment, part: Prompts, draw: tuple, n: int, first: int
) -> list[Sample]:
    """n episodes of every prompt, those of the first seat."""
    each, seats = environment.rules.rows, len(environment.rules.seats)
    batch, report = environment.play(policy.actor, part, *draw, n=n * each)
    rows = list(range(0, batch.rows, each))
    one = jax.tree.map(lambda x: x[rows], fetch(batch))
    starts = np.argmax(one.mask > 0, axis=1)
    samples = []
    for i, (fields, row) in enumerate(
        zip(
            _read_rows(one, starts, policy.tokenizer, np.repeat(part.records, n)),
            report.rows[::seats],
            strict=True,
        )
    ):
        _, *numbers = fields
        score = (row.score.value, row.score.parts, row.sample["turns"], row.sample["calls"])
        samples.append(Sample(first + i // n, row.sample["response"], *numbers, *score))
    return samples


def _read_rows(
    batch, lengths: np.ndarray, tokenizer: Tokenizer, records: Sequence[PromptRecord]
) -> Iterator[tuple]:
    """(text, ids, logprobs, finish_reason) of the responses of the first rows, which begin after
    `lengths` tokens and answer `records`."""
    fields = (batch.tokens, batch.mask, batch.segment_ids, batch.finish_reason)
    tokens, mask, segments, finish = fetch(fields)
    logprobs = np.full(tokens.shape, np.nan)
    if batch.sampler_logprobs is not None:
        logprobs = np.where(mask > 0, fetch(batch.sampler_logprobs), np.nan)
    for row, (start, record) in enumerate(zip(lengths, records, strict=False)):
        at = slice(int(start), int(np.sum(segments[row] > 0)))
        ids = tokens[row, at].tolist()
        yield (
            response_of(tokenizer, ids, record.prompt_text, record.messages), tuple(ids),
            tuple(logprobs[row, at].tolist()), FinishReason(int(finish[row])).name.lower(),
        )  # fmt: skip
