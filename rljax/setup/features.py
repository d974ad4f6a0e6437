"""Features of runs, and which of them exclude each other.

A feature is on where a config field has some value, often because the component that the field
names declares it (rljax.contracts): a function of the user's own is excluded as a built-in one is.
Read by validation, by the check of data with images, and by docs/generate.py.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rljax.components import Component, resolve
from rljax.config import NAMESPACES, Config, value_of
from rljax.config.schema import FIELDS
from rljax.contracts import Contract, spec
from rljax.data.kinds import SAMPLED
from rljax.errors import InputError
from rljax.setup.placement import parsed
from rljax.setup.setup import rollout_of, sampled_prompts


class Parts:
    """A config and the components that it names; None for one that does not resolve, which another
    check reports. `images`: rows of the data have images, which no field says."""

    def __init__(self, config: Config, images: bool = False):
        self.config, self.images = config, images
        self.dataflow = self._named("dataflow")
        self.collect = self._named("algorithm.collect")
        self.advantage = self._named("algorithm.advantage")
        self.policy_loss = self._named("algorithm.policy_loss")
        self.environment = self._named("environment.function")
        self.samples = self.dataflow is not None and contract_of(self.dataflow).data in SAMPLED
        self.rollout = None
        if self.samples and self.collect is not None:
            self.rollout = _or_none(rollout_of, config, self.dataflow)

    def _named(self, field: str) -> Component | None:
        text = value_of(self.config, field)
        return _or_none(resolve, text, NAMESPACES[FIELDS[field].component]) if text else None

    def rolls(self, name: str):
        """Returns what the rollout declares as `name`, or else what algorithm.collect does, which
        it may call."""
        return getattr(contract_of(self.rollout), name) or getattr(contract_of(self.collect), name)

    @property
    def episode_rows(self) -> int:
        """Number of rows of one episode."""
        return len(contract_of(self.environment).seats) * self.config.environment.max_rows

    def texts(self) -> dict:
        """Returns {name: value} of what the reason of a rule may mention."""
        config, algorithm = self.config, self.config.algorithm
        return {
            "dataflow": config.dataflow,
            "collect": algorithm.collect,
            "rollout": self.rollout.text if self.rollout is not None else algorithm.collect,
            "advantage": algorithm.advantage,
            "environment": config.environment.function,
            "placement": config.placement,
            "fresh": ", ".join(_fresh_fields(self)),
        }


def _or_none(function: Callable, *args):
    try:
        return function(*args)
    except InputError:
        return None


def contract_of(component: Component | None) -> Contract:
    """Returns the contract of a component; an empty one for None, or if its options are wrong."""
    contract = _or_none(spec, component) if component is not None else None
    return Contract() if contract is None else contract


class Feature(NamedTuple):
    field: str | tuple[str, ...]  # the config field that turns it on; or fields, each of which does
    # (parts, value of the field) -> bool. It is asked of each rule of algorithm.reward_shaping.
    is_on: Callable[[Parts, object], bool] = lambda parts, value: bool(value)
    every_run: bool = False  # True: also a feature of runs that learn from a file

    @property
    def fields(self) -> tuple[str, ...]:
        """Returns the config fields that turn it on."""
        return (self.field,) if isinstance(self.field, str) else self.field


def _rollout(name: str) -> Feature:
    """The feature of a rollout that declares `name`."""
    return Feature("algorithm.collect", lambda parts, _: bool(parts.rolls(name)))


# Fields that are not known of tokens where whole texts are chosen.
_DRAWS = ("sampler_logprobs", "entropy", "target_ids", "target_probs", "search_values")


def _reading(field: str, names: Sequence[str]) -> Feature:
    """The feature of a component of a field that reads one of these batch fields."""
    part = field.rpartition(".")[2]
    return Feature(
        field, lambda parts, _: not {*names}.isdisjoint(contract_of(getattr(parts, part)).reads)
    )


def _fresh_fields(parts: Parts) -> list[str]:
    """Returns the batch fields that the sampler or the rollout fills and that the dataflow, the
    advantage or the loss reads: rows of rollouts.replay have none of them."""
    # Stored rows count as ones that kept no token of another response.
    filled = {"entropy", *(parts.rolls("fills") or ())} - {"kept_tokens"}
    filled -= {*(contract_of(parts.dataflow).fills or ())}
    readers = (parts.dataflow, parts.advantage, parts.policy_loss)
    return sorted(filled & {name for reader in readers for name in contract_of(reader).reads})


def _compares_batch(parts: Parts, text: object) -> bool:
    return contract_of(_or_none(resolve, text, NAMESPACES["shaping"])).compares_batch


def _replaces_in_flight(parts: Parts, _) -> bool:
    return parts.config.rollouts.max_staleness > 0 and parts.rolls("drops_dead") is not None


def _asks_for_more(parts: Parts, _) -> bool:
    """Returns whether algorithm.collect needs more than the rollout around it hands on."""
    if parts.collect is None:
        return False
    parameters = parts.collect.signature.parameters.values()
    needed = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty}
    outer = parts.rollout if contract_of(parts.dataflow).rollout else None
    passed = ("actor", "reward", "sample", "draw") if outer is None else outer.parameters
    return not needed <= {*passed}


def _places_reference(parts: Parts, texts: object) -> bool:
    return any("reference" in (_or_none(parsed, text) or ((),))[0] for text in texts)


def _token_blind(parts: Parts, _) -> bool:
    """Returns whether the advantage declares that it reads no rewards of single tokens."""
    blind = contract_of(parts.advantage).token_rewards is False
    return blind and contract_of(parts.dataflow).data == "rollouts"


def _declared(field: str, name: str) -> Feature:
    """The feature of a component of a field that declares `name`."""
    part = field.rpartition(".")[2]
    return Feature(field, lambda parts, _: bool(getattr(contract_of(getattr(parts, part)), name)))


FEATURES = {
    "program steps": Feature("program_steps", lambda parts, n: n > 1),
    # Sampling.
    "in flight": Feature("rollouts.max_staleness", lambda parts, steps: steps > 0),
    "sampler devices": Feature(
        "rollouts.sampler_devices", lambda parts, n: n > 0 and sampled_prompts(parts.config) > 0
    ),
    "placed roles": Feature("placement"),
    "placed reference": Feature("placement", _places_reference),
    "replay": Feature("rollouts.replay"),
    "replay alone": Feature("rollouts.replay", lambda parts, _: not sampled_prompts(parts.config)),
    "environment": Feature("environment.function"),
    "episodes of several rows": Feature(
        "environment.function", lambda parts, _: bool(parts.environment) and parts.episode_rows != 1
    ),
    "unrepeatable environment": Feature(
        "environment.function", lambda parts, _: not contract_of(parts.environment).repeatable
    ),
    "images": Feature("data.train", lambda parts, _: parts.images),
    # Rollouts.
    "opponent": _rollout("opponent"),
    "rounds": _rollout("rounds"),
    "continuations": _rollout("continues"),
    "values by continuations": Feature(
        "algorithm.collect",
        lambda parts, _: parts.rolls("continues") and "values" in (parts.rolls("fills") or ()),
    ),
    "search": _rollout("searches"),
    "search of whole texts": Feature(
        "algorithm.collect", lambda parts, _: parts.rolls("searches") and not parts.rolls("targets")
    ),
    "tree of episodes": _rollout("tree"),
    "rollout by scores": Feature(
        "algorithm.collect",
        lambda parts, _: any(
            parts.rolls(name) for name in ("needs_groups", "rounds", "continues", "searches")
        ),
    ),
    "choice of groups": Feature(
        "algorithm.collect",
        lambda parts, _: parts.rolls("needs_groups") and parts.rolls("drops_dead") is None,
    ),
    "rollout inside another": _declared("dataflow", "rollout"),
    "rollout of other roles": Feature("algorithm.collect", _asks_for_more),
    "dead groups replaced in flight": Feature("algorithm.collect", _replaces_in_flight),
    "rollout of single rows": _declared("algorithm.collect", "single_rows"),
    # Rewards.
    "reward model": Feature("reward.model"),
    "judge model": Feature("reward.judge_model"),
    "process model": Feature("reward.process_model"),
    "reward of evaluation": Feature("evaluate.reward"),
    "rule over the batch": Feature("algorithm.reward_shaping", _compares_batch),
    # Dataflows and what they name.
    "no reward read": Feature(
        "dataflow", lambda parts, _: contract_of(parts.dataflow).data == "samples"
    ),
    "costs": _reading("dataflow", ("costs",)),
    "several teachers": Feature("teachers"),
    "shown a hint": Feature(
        "algorithm.collect", lambda parts, _: "teacher_logprobs" in (parts.rolls("fills") or ())
    ),
    "samples compared": _declared("dataflow", "compares_samples"),
    "one version of the policy": _declared("dataflow", "one_version"),
    "samples of the reference": Feature(
        "dataflow", lambda parts, _: bool(parts.rollout) and "reference" in parts.rollout.parameters
    ),
    "dataflow over draws": _reading("dataflow", _DRAWS),
    "dataflow of single rows": _declared("dataflow", "single_rows"),
    "loss over draws": _reading("algorithm.policy_loss", _DRAWS),
    "advantage over draws": _reading("algorithm.advantage", _DRAWS),
    "fields of new samples": Feature(
        "algorithm.collect", lambda parts, _: bool(_fresh_fields(parts))
    ),
    "advantage over log-probs": _reading(
        "algorithm.advantage", ("old_logprobs", "ref_logprobs", "sum_pi_squared")
    ),
    "advantage of single rows": _declared("algorithm.advantage", "single_rows"),
    "advantage blind to tokens": Feature("algorithm.advantage", _token_blind),
    "no reference": Feature(
        "dataflow",
        lambda parts, _: bool(parts.dataflow) and "reference" not in parts.dataflow.parameters,
    ),
    "KL": Feature(("algorithm.kl_in_loss", "algorithm.kl_in_reward")),
    "correction": Feature("algorithm.correction"),
    "bypass": Feature("algorithm.old_logprobs", lambda parts, value: value == "sampler"),
    # Learning, data and the sampler.
    "filters": Feature("algorithm.filters"),
    "epochs": Feature("batch.epochs", lambda parts, epochs: epochs > 1),
    "unpacked rows": Feature("batch.packing", lambda parts, packs: not packs),
    "curriculum": Feature(("data.retire_at_pass_rate", "data.drop_above_pass_rate")),
    "pretraining": Feature("pretraining.data"),
    "streamed rows": Feature("data.stream", every_run=True),
    "rows known before": Feature(
        ("data.test_fraction", "offline.packing", "offline.ties", "offline.reference_logprobs"),
        lambda parts, value: value not in (0, "drop", ""),
        every_run=True,
    ),
    "adapters": Feature("lora.rank", every_run=True),
    "router bias": Feature("model_settings.router_bias_update_speed", every_run=True),
    "weights in bfloat16": Feature(
        "model_settings.weight_dtype", lambda parts, dtype: dtype != "float32", every_run=True
    ),
    "reference on the host": Feature("memory.reference_on_host", every_run=True),
    "batch invariance": Feature("model_settings.batch_invariant", every_run=True),
    "narrow numbers": Feature(
        (
            "model_settings.dtype",
            "model_settings.head_in_float32",
            "model_settings.head_dtype",
            "sampler.dtype",
            "sampler.head_in_float32",
            "sampler.kv_dtype",
        ),
        lambda parts, value: value not in ("float32", True, "on", ""),
        every_run=True,
    ),
    "weights of decoding": Feature("sampler.weight_dtype", every_run=True),
    "loop of the host": Feature("sampler.loop", lambda parts, loop: loop == "host", every_run=True),
    "dispatches by the host": Feature(
        ("sampler.loop", "environment.function", "rollouts.max_staleness"),
        lambda parts, value: value not in ("device", "", 0),
        every_run=True,
    ),
    "pages": Feature("sampler.page_tokens", every_run=True),
    "speculation": Feature("sampler.draft_tokens", every_run=True),
    "router replay": Feature("sampler.router_replay", every_run=True),
    "stop strings": Feature("sampler.stop_strings"),
    "thinking limits": Feature("sampler.thinking_tokens"),
}


class Exclusion(NamedTuple):
    """An exclusion: why feature `a` does not go with `b`, and the fix for the field of `a`."""

    a: str
    b: str
    why: str  # may name {dataflow!r}, {collect!r} and so on: Parts.texts
    fix: str


_SYNCHRONOUS = "rollouts.max_staleness=0"
_ONE_TURN = "it reads single responses, and an environment plays episodes of several turns"
_ONE_ROW = "compares single rows, and an episode has several here"
_NO_DRAWS = (
    "{collect!r} chooses whole texts: it knows no log-probs of draws, and no shares of visits"
)
_SAMPLED = "algorithm.collect='once()', or one that reads neither"
_AT_ONCE = (
    "it scores the groups of a step at once, on the mesh, and algorithm.collect={collect!r} "
    "replaces dead ones as soon as they have ended"
)

# Features that need the host between sampling and learning, or another program.
_ON_THE_HOST = {
    "in flight": "rollouts.max_staleness decodes samples of several steps at once, from the host",
    "sampler devices": "rollouts.sampler_devices sample in a program of their own",
    "placed roles": "config.placement gives {placement!r} programs of their own",
    "replay": "rows of rollouts.replay are read by the host",
    "environment": "environment.function={environment!r} runs on the host",
    "images": "images are prepared by the host",
    "reward model": "reward.model scores in a program of its own",
    "judge model": "reward.judge_model is asked by the host",
    "process model": "the lines that reward.process_model scores are found by the host",
    "costs": "the costs that dataflow={dataflow!r} reads are computed by the host",
    "curriculum": "a curriculum (data.retire_at_pass_rate, data.drop_above_pass_rate) chooses "
    "prompts by scores that the host knows",
    "pretraining": "examples of pretraining.data are read by the host",
    "several teachers": "the host finds the teacher of each prompt (teachers)",
    "shown a hint": "{rollout!r} writes the prompts of the teacher on the host",
    "opponent": "{rollout!r} samples from another model than the policy",
    "rounds": "{rollout!r} reads scores between two rounds of samples",
    "continuations": "{rollout!r} continues samples by what the host has read of them",
    "search": "{rollout!r} searches from the host",
    "choice of groups": "{rollout!r} chooses groups on the host",
    "loop of the host": "sampler.loop='host' samples from the host",
    "pages": "sampler.page_tokens: pages are given out by the host",
    "speculation": "sampler.draft_tokens are counted by the host",
    "router replay": "sampler.router_replay records routes in a program of its own",
    "stop strings": "sampler.stop_strings are searched for by the host",
    "thinking limits": "the limits of sampler.thinking_tokens are drawn by the host",
    "weights of decoding": "sampler.weight_dtype makes other weights by a program of its own",
    "reference on the host": "memory.reference_on_host: its weights are copied by the host",
}


def _exclusions(pairs: Mapping[tuple[str, str], tuple[str, str]]) -> tuple[Exclusion, ...]:
    return tuple(Exclusion(a, b, why, fix) for (a, b), (why, fix) in pairs.items())


EXCLUDES = _exclusions(
    {
        **{("program steps", b): (why, "program_steps=1") for b, why in _ON_THE_HOST.items()},
        **{
            ("in flight", b): (why, _SYNCHRONOUS)
            for b, why in (
                (
                    "opponent",
                    "{rollout!r} draws half of a prompt's samples from an opponent, at one moment",
                ),
                ("rounds", "{rollout!r} scores a round of samples before it draws the next one"),
                ("search", "{rollout!r} searches the responses of a step together, to their ends"),
                ("tree of episodes", "{rollout!r} plays the trees of a step at once"),
                (
                    "one version of the policy",
                    "dataflow={dataflow!r} compares samples of one version of the policy",
                ),
                ("replay alone", "rollouts.replay_share=1.0: nothing is sampled"),
            )
        },
        ("choice of groups", "in flight"): (
            "it chooses groups, and does not say how many may be dropped for one step in flight",
            f"@contract(needs_groups=True, drops_dead=(10, 'error')), or {_SYNCHRONOUS}",
        ),
        **{
            (a, "dead groups replaced in flight"): (_AT_ONCE, f"'once()', or {_SYNCHRONOUS}")
            for a in ("reward model", "judge model")
        },
        ("rollout by scores", "no reward read"): (
            "{collect!r} goes by the scores of samples, and dataflow={dataflow!r} reads no reward",
            "'once()', or on_policy_distil(scored=True), which has scores, with its other options",
        ),
        ("advantage over log-probs", "rounds"): (
            "{rollout!r} computes advantages between two rounds, before any pass of the trainer",
            "gae()",
        ),
        ("search", "opponent"): (
            "it searches with one policy, and half of the samples of dataflow={dataflow!r} are an "
            "opponent's",
            "once()",
        ),
        ("environment", "opponent"): (
            "one policy plays an episode, and half of the samples of dataflow={dataflow!r} are an "
            "opponent's",
            "environment.function='', or dataflow='grpo'",
        ),
        ("rollout of other roles", "rollout inside another"): (
            "it asks for roles that {rollout!r}, the rollout of dataflow={dataflow!r}, does not "
            "hand on",
            "once()",
        ),
        ("sampler devices", "placed roles"): (
            "placement={placement!r} has devices of its own as well",
            "one of both: placement=(), or rollouts.sampler_devices=0",
        ),
        ("placed reference", "samples of the reference"): (
            "dataflow={dataflow!r} samples from the reference, on the mesh of the actor",
            "leave reference out",
        ),
        ("placed reference", "no reference"): (
            "dataflow={dataflow!r} takes no reference",
            "leave reference out",
        ),
        ("loop of the host", "samples of the reference"): (
            "dataflow={dataflow!r} draws each token from two models, which the host's loop does "
            "not",
            "sampler.loop='device'",
        ),
        ("speculation", "samples of the reference"): (
            "dataflow={dataflow!r} draws each token from two models, and a draft is checked by one",
            "sampler.draft_tokens=0",
        ),
        ("several teachers", "replay"): (
            "stored rollouts do not say of which data_source their prompts are",
            "teachers=(), and one teacher_model; or rollouts.replay=''",
        ),
        ("several teachers", "tree of episodes"): (
            "{rollout!r} groups the turns of a tree, not the samples of a prompt",
            "teachers=(), and one teacher_model; or algorithm.collect='once()'",
        ),
        **{
            ("shown a hint", b): (why, fix)
            for b, why, fix in (
                (
                    "environment",
                    "a hint stands in a prompt of the data, and an environment writes its own",
                    "once()",
                ),
                ("images", "a hint stands in a prompt of text", "once()"),
                (
                    "several teachers",
                    "{collect!r} asks one teacher, and `teachers` are several",
                    "once(); or teachers=(), and one teacher_model or none",
                ),
                (
                    "replay",
                    "stored rollouts were not read by a teacher with a hint",
                    "once(); or rollouts.replay=''",
                ),
                (
                    "sampler devices",
                    "the teacher is on the devices that train, and reads samples of others",
                    "once(); or rollouts.sampler_devices=0",
                ),
            )
        },
        ("environment", "no reward read"): (
            "dataflow={dataflow!r} learns from samples, and episodes are rollouts",
            "dataflow='on_policy_distil(scored=True)' with its other options, to learn from the "
            "teacher in episodes; dataflow='grpo', to learn from the reward; or "
            "environment.function=''",
        ),
        **{
            (a, "environment"): (
                "it continues single responses, and an environment plays episodes of several turns",
                "turn_tree()",
            )
            for a in ("continuations", "search")
        },
        **{
            (a, "environment"): (_ONE_TURN, f"{FEATURES[a].field}='' beside environment.function")
            for a in (
                "process model",
                "reward model",
                "judge model",
                "reward of evaluation",
                "replay",
            )
        },
        ("rollout of single rows", "episodes of several rows"): (_ONE_ROW, "dynamic()"),
        ("advantage of single rows", "episodes of several rows"): (_ONE_ROW, "rloo()"),
        ("dataflow of single rows", "episodes of several rows"): (_ONE_ROW, "grpo"),
        ("tree of episodes", "unrepeatable environment"): (
            "a branch of a turn_tree is played again from recorded replies, and "
            "environment.function={environment!r} declares repeatable=False",
            "once()",
        ),
        ("tree of episodes", "samples compared"): (
            "dataflow={dataflow!r} compares all rows of a prompt, and those of a turn_tree begin "
            "at different turns",
            "once()",
        ),
        ("replay", "fields of new samples"): (
            "rows of a file have no {fresh}, which sampling fills and this config reads",
            "rollouts.replay=''",
        ),
        ("replay", "images"): ("stored rollouts hold no images", "rollouts.replay=''"),
        ("environment", "images"): ("episodes are of text", "rows of text alone"),
        ("continuations", "images"): (
            "its samples go on from within others, which are of text",
            "algorithm.collect='once'",
        ),
        ("search", "images"): ("a search reads text", "algorithm.collect='once'"),
        ("batch invariance", "images"): (
            "batch-invariant computing is for text alone",
            "model_settings.batch_invariant=False",
        ),
        ("rule over the batch", "values by continuations"): (
            "its mean and variance over the samples are not those over the continuations that "
            "algorithm.collect={collect!r} compares them with",
            "rules of one row alone: scaled, clipped, soft_overlong",
        ),
        ("rule over the batch", "search"): (
            "it compares the rows of a batch, and {collect!r} scores some rows at a time",
            "scaled(), clipped()",
        ),
        **{
            (a, "search"): (
                "{collect!r} ends a response at stop ids and its limit alone",
                f"{FEATURES[a].field}=()",
            )
            for a in ("stop strings", "thinking limits")
        },
        **{
            (a, "search of whole texts"): (_NO_DRAWS, _SAMPLED)
            for a in ("dataflow over draws", "loss over draws", "advantage over draws")
        },
        ("correction", "search of whole texts"): (_NO_DRAWS, "algorithm.correction=''"),
        ("bypass", "search of whole texts"): (_NO_DRAWS, "'recomputed'"),
        ("correction", "bypass"): (
            "with old_logprobs='sampler' (bypass) the ratio is already that to the sampler: a "
            "weight would count it twice",
            "correction='', or old_logprobs='recomputed'",
        ),
        ("process model", "advantage blind to tokens"): (
            "algorithm.advantage={advantage!r} reads no rewards of single tokens",
            "gae() with dataflow='ppo', or reinforce_plus_plus(); or reward.process_model=''",
        ),
        ("no reference", "KL"): (
            "takes no reference, but algorithm.kl_in_reward or kl_in_loss is above 0",
            "set both to 0",
        ),
        ("judge model", "reward model"): ("reward.model takes its place", "reward.model=''"),
        **{
            (a, "no reward read"): (
                "dataflow={dataflow!r} does not read it",
                f"{FEATURES[a].field}=''",
            )
            for a in ("reward model", "judge model", "process model", "replay")
        },
        **{
            (a, "costs"): (
                "dataflow={dataflow!r} reads the cost of every response, which these lack",
                f"{FEATURES[a].field}=''",
            )
            for a in ("environment", "replay")
        },
        ("rows known before", "streamed rows"): (
            "rows that are read as they are drawn are not known before",
            "data.stream=False",
        ),
        ("curriculum", "streamed rows"): (
            "the prompts of a stream are not known before: there is nothing to leave out",
            "data.stream=False",
        ),
        ("router bias", "adapters"): (
            "must be 0 with lora: the biases are a part of its frozen base",
            "model_settings.router_bias_update_speed=0",
        ),
        ("reference on the host", "adapters"): (
            "with lora the reference shares the actor's base: it has nothing of its own to move",
            "memory.reference_on_host=False",
        ),
        ("weights in bfloat16", "adapters"): (
            "with lora adapters alone are trained, in float32",
            "lora.base, for the others",
        ),
        ("weights in bfloat16", "router bias"): (
            "bfloat16 would round the steps of model_settings.router_bias_update_speed away",
            "model_settings.weight_dtype='float32'",
        ),
        **{
            (a, "batch invariance"): (
                "model_settings.batch_invariant is for float32 alone",
                "the default of this field, or model_settings.batch_invariant=False",
            )
            for a in ("narrow numbers", "weights of decoding")
        },
        **{
            ("router replay", b): (
                "routes are recorded by the device's loop over whole batches, a token at a time",
                fix,
            )
            for b, fix in (
                ("loop of the host", "sampler.loop='device'"),
                ("speculation", "sampler.draft_tokens=0"),
                ("environment", "environment.function=''"),
                ("in flight", _SYNCHRONOUS),
                ("search", "algorithm.collect='once()'"),
            )
        },
        ("router replay", "samples of the reference"): (
            "dataflow={dataflow!r} draws each token from two models, whose routes differ",
            "sampler.router_replay=False",
        ),
    }
)
NEEDS = _exclusions(
    {
        ("pages", "dispatches by the host"): (
            "pages are given out by the host, between dispatches",
            "sampler.loop='host'",
        ),
        ("sampler devices", "in flight"): (
            "rollouts.max_staleness=0 samples with the newest weights: nothing is left to do "
            "beside learning",
            "rollouts.max_staleness=1 or more, or rollouts.sampler_devices=0",
        ),
        ("tree of episodes", "environment"): (
            "episodes branch where turns of an environment end, and environment.function is ''",
            "once()",
        ),
    }
)


def violations(parts: Parts) -> Iterator[tuple[Exclusion, str, object, str]]:
    """Yields (rule, field, value, reason) of each pair of features that exclude each other, and of
    each feature that lacks one it needs."""
    texts, on = parts.texts(), turned_on(parts)
    for rules, with_b in ((EXCLUDES, True), (NEEDS, False)):
        for rule in rules:
            for field, value in on.get(rule.a, ()) if (rule.b in on) == with_b else ():
                yield rule, field, value, rule.why.format_map(texts)


def turned_on(parts: Parts) -> dict[str, list[tuple[str, object]]]:
    """Returns {feature that is on: each (field, value) that turns it on}."""
    out = {}
    for name, feature in FEATURES.items():
        if not (parts.samples or feature.every_run):
            continue
        settings = [(field, value_of(parts.config, field)) for field in feature.fields]
        if feature.field == "algorithm.reward_shaping":
            settings = [(feature.field, value) for value in settings[0][1]]
        if settings := [setting for setting in settings if feature.is_on(parts, setting[1])]:
            out[name] = settings
    return out
