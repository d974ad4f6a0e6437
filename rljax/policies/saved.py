"""Policies on disk. Their run may still be training: nothing here writes into its folder."""

import dataclasses
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import optax

from rljax import hub
from rljax.checkpoint.checkpoint import Checkpoints, Damaged
from rljax.components import resolve
from rljax.config import NAMESPACES, Config, MeshConfig, from_dict, is_path
from rljax.config.trust import refuse_own_code, untrained, vouched
from rljax.data.images.encode import ImageReader, image_reader, layout_of
from rljax.data.online.encoded import load_run_tokenizer
from rljax.data.online.kept import kept_line
from rljax.data.online.prompts import PromptRecord, encode_prompts
from rljax.data.text.tokenizer import Tokenizer
from rljax.errors import InputError
from rljax.files import read_json_object
from rljax.gguf import is_gguf
from rljax.learn.state import new_train_state
from rljax.models.huggingface import load_params
from rljax.models.huggingface.load import look_for_adapter
from rljax.models.model import Model
from rljax.models.trees import merged
from rljax.policies.sampling import ROWS_PER_CALL, Policy
from rljax.report.starts import read_starts, run_date
from rljax.roles import Actor
from rljax.rollout import Player, Reward, player_of
from rljax.runs.mirror import local_copy
from rljax.runs.store import is_folder, is_url
from rljax.sampler import Sampling
from rljax.sampler.memory import slots_that_fit
from rljax.setup.decoding import decoding_of
from rljax.setup.model_record import check_model_configs
from rljax.setup.rewards import model_scorer, text_scorer
from rljax.setup.scoring import make_episodes
from rljax.setup.setup import check_length, load_model, make_sampling
from rljax.setup.weights import initial_params

LOG = logging.getLogger("rljax")
_SCORED_ROWS = 8  # by a reward model at once, on each device


@dataclasses.dataclass(frozen=True)
class SavedPolicy:
    """A policy opened from a folder. `step` is None for a Hugging Face folder."""

    config: Config  # the run's, or the default one around a Hugging Face folder
    model: Model
    params: dict
    tokenizer: Tokenizer
    step: int | None
    images: ImageReader | None = None  # reader of the model's images
    # generation_config.json of a Hugging Face folder; {} where there is none, and of a run.
    generation: dict = dataclasses.field(default_factory=dict)

    def actor(self) -> Actor:
        """Returns an actor without an optimizer."""
        optimizer = optax.identity()
        state = dataclasses.replace(new_train_state({}, optimizer), params=self.params)
        decoding = decoding_of(self.config, self.tokenizer)
        return Actor(state, self.model, optimizer, self.config.sampler.temperature, decoding)

    def sampling(
        self, *, temperature: float | None = None, max_response_tokens: int | None = None
    ) -> Sampling:
        """Returns the policy's sampling rules: those of its config (top_k, stop strings, ...),
        except for the arguments that are given."""
        changes = {"temperature": temperature, "max_response_tokens": max_response_tokens}
        changes = {name: value for name, value in changes.items() if value is not None}
        sampler = dataclasses.replace(self.config.sampler, **changes)
        return make_sampling(dataclasses.replace(self.config, sampler=sampler), self.tokenizer)

    def encode(
        self, records: Sequence[dict], *, max_tokens: int | None = None, overlong: str = "drop"
    ) -> tuple[list[PromptRecord], dict[str, int]]:
        """Returns prompts as `sample_all` reads them, and counts. `overlong` says what becomes of
        prompts of more than `max_tokens` (None: data.max_prompt_tokens), as data.overlong does;
        dropped ones are a warning. Raises InputError if no prompt is left."""
        limit = max_tokens or self.config.data.max_prompt_tokens
        options = dict(max_prompt_tokens=limit, overlong=overlong, images=self.images)
        prompts, counts = encode_prompts(records, self.tokenizer, **options)
        if counts["dropped_overlong"]:
            LOG.warning("%s", kept_line("prompts", "rows", counts, limit))
        return prompts, counts

    def ready(self, prompts: Sequence[PromptRecord], **sampling) -> Policy:
        """Returns the policy that samples on `prompts`; `sampling` are arguments of `sampling`. It
        has as many slots as have room in memory, if the config does not say how many: they change
        no sample. Raises InputError if a response would not fit into the model's context."""
        longest = max(len(prompt.token_ids) for prompt in prompts)
        rules = self.sampling(**sampling)
        limits = ("--max_prompt_tokens", "--max_response_tokens")
        check_length(longest, rules.max_response_tokens, self.model, limits)
        images = layout_of(self.images, [prompt.images for prompt in prompts])
        actor, columns = self.actor(), longest + rules.max_response_tokens
        decoding = actor.decoding
        if not decoding.slots and not decoding.page_tokens:
            slot_sizes = (decoding.of(self.model), ROWS_PER_CALL, columns, decoding.kv_dtype)
            if (slots := slots_that_fit(*slot_sizes)) < ROWS_PER_CALL:
                decoding = dataclasses.replace(decoding, slots=slots)
                actor = dataclasses.replace(actor, decoding=decoding)
        return Policy(actor, self.tokenizer, rules, longest, images)

    def player(self, text: str) -> Player:
        """Returns the player of this policy's samples: responses that the reward `text` scores,
        with the score of the config's reward.model if it reads that, or episodes of the environment
        of the config, if it has one. The caller closes it: it runs in processes of its own."""
        mesh = self.model.mesh

        def opened() -> Reward:
            rows = _SCORED_ROWS * mesh.size
            model = model_scorer(self.config, self.model, self.tokenizer, text, rows)
            scorer = text_scorer(self.config, text, mesh, now=self.tokenizer.now)
            return Reward(scorer, self.tokenizer, mesh, model=model)

        if not self.config.environment.function:
            return player_of(opened())
        rules = self.sampling()
        return make_episodes(self.config, self.tokenizer, mesh, rules, opened)


# -- opening --


def load_policy(
    folder: str | Path,
    step: str = "latest",
    *,
    trust_code: bool = False,
    read: Callable[[Config], Config] = untrained,
    today: bool = False,
) -> SavedPolicy:
    """Loads the policy of a run folder (config.json, checkpoints/) or of a Hugging Face folder;
    either may be a URL, and the latter a repository of the hub. `step` of a run: latest, best, or
    a number.

    A run folder is data: if its config names functions outside of rljax it is refused, unless
    trust_code says that they may run. `read` returns the part of the run's config that is used.
    The chat template of a run writes the date at which it began, or with `today` that of today.
    Raises InputError for a folder that is none of these, and for a step that the run has not saved.

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
    with local_copy(folder) as local:
        look_for_adapter(Path(local))
        saved = read_json_object(local / "config.json")
        if "model_type" not in saved:
            path = local / "config.json"
            return _run_policy(saved, path, f"{folder}/checkpoints", step, trust_code, read, today)
        config = Config(model=str(local))
        tokenizer = load_run_tokenizer(config)
        model = load_model(config, tokenizer)
        reader = image_reader(config, tokenizer)
        path = local / "generation_config.json"
        generation = read_json_object(path) if path.is_file() else {}
        params = load_params(local, model)
        return SavedPolicy(config, model, params, tokenizer, None, reader, generation)


def _run_policy(
    saved: dict,
    path: Path,
    checkpoints: str,
    step: str,
    trust_code: bool,
    read: Callable[[Config], Config],
    today: bool,
) -> SavedPolicy:
    """The policy of a run with the config `saved`, which lies at `path`."""
    if "dataflow" not in saved:
        raise InputError(
            f"{path} is neither a run's nor a Hugging Face model's",
            value=sorted(saved)[:8],
            fix="give a run folder or a Hugging Face folder",
        )
    config = from_dict(saved, str(path))
    source = f"{checkpoints.removesuffix('checkpoints')}config.json"
    is_trusted = trust_code or vouched(config, source, path.parent)
    config = read(config)
    if not is_trusted:
        refuse_own_code(config, str(path))
    # The run's layouts were for its devices.
    sampler = dataclasses.replace(config.sampler, layout="")
    config = dataclasses.replace(config, mesh=MeshConfig(), sampler=sampler)
    require_model(config, path)
    store = Checkpoints(checkpoints, best_metric=config.checkpoint.best_metric)
    number = _find_step(store, step)
    tokenizer = load_run_tokenizer(config, None if today else run_date(path.parent))
    model = load_model(config, tokenizer)
    record = path.parent / "model.json"
    check_model_configs(config, record, allowed=("model",), fields=("model",))
    while True:
        try:
            params = _read_params(store, number, model)
            break
        except Damaged:  # shows when arrays are read: the step before, then
            if step != "latest":
                raise
            number = _find_step(store, step)
    if model.config.has_frozen:  # a checkpoint holds what is trained alone
        options = dict(begun=record, may_differ=True)
        params = merged(params, model.split(initial_params(config, model, **options))[1])
    reader = image_reader(config, tokenizer)
    return SavedPolicy(config, model, params, tokenizer, number, reader)


def require_model(config: Config, path: Path) -> None:
    """Raises InputError if the model of the run's config, which lies at `path`, is a folder that is
    not there: a relative one is looked up where the command runs."""
    try:
        if is_path(config.model):
            is_there = hub.model_name(config.model) is not None or os.path.exists(config.model)
        else:  # a function of others, which resolve would import, says itself what is wrong
            is_foreign = not config.model.partition("(")[0].strip().isidentifier()
            is_there = is_foreign or bool(resolve(config.model, NAMESPACES["model"]))
    except InputError:
        is_there = False
    if is_there:
        return
    fixes = ["put the folder back"]
    if not os.path.isabs(config.model):
        starts = [start.get("working_folder") for start in read_starts(path.parent)]
        where = f", {starts[0]}" if starts and starts[0] else ""
        fixes.insert(0, f"run this in the folder where the run began{where}")
    if (path.parent / "policy" / "config.json").is_file():
        fixes.append(f"name the exported policy: {path.parent / 'policy'}")
    raise InputError(
        f"the model of {path} is not there",
        value=config.model,
        rule=f"no such folder, seen from {os.getcwd()}",
        fix=", or ".join(fixes),
    )


def load_named_policy(name: str, *, trust_code: bool = False) -> SavedPolicy:
    """Loads the policy of a folder or of a repository of the hub, or of RUN@STEP: a step of a run,
    latest or best. Raises InputError as `load_policy`."""
    folder, separator, step = name.rpartition("@")
    if separator and not is_folder(name) and (is_folder(folder) or hub.model_name(name) is None):
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
