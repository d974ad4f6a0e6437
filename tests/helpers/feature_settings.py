"""A config of seconds a step, and for every feature of rljax.setup.features the fields that turn it
on: what runs any two features together."""

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
from tiny_environments import rows, two_seats

from rljax import setup as build
from rljax.components import resolve
from rljax.config import NAMESPACES, Config, with_overrides
from rljax.contracts import contract
from rljax.data.text.tokenizer import CharTokenizer
from rljax.dataflows import nash_md, on_policy_distil
from rljax.dataflows.steps import compute_logprobs, prepare_batch, update_actor
from rljax.errors import InputError
from rljax.models.experts import ExpertsConfig
from rljax.models.huggingface import save_params
from rljax.models.model import Model
from rljax.roles import program
from rljax.rollout import dynamic, once, turn_tree
from rljax.rollout.players.episodes.tree import TurnTree
from rljax.setup.features import EXCLUDES, Parts, turned_on, violations
from rljax.tasks import Task, drawn_digits
from rljax.training.run import Run
from rljax.validation import validate

MODEL = "decoder(layers=1, embed=32, mlp=64, heads=2, kv_heads=2, head_dim=16, init_std=0.3)"
_CRITIC = {"dataflow": "ppo", "algorithm.advantage": "gae()"}
_EPISODES = {
    "environment.function": "tiny_environments.count_letter()",
    "environment.max_tokens": 40,
    "environment.max_reply_tokens": 8,
    "environment.max_turns": 3,
    "environment.workers": 1,
    "reward.function": "",
}
_TREES = {
    "algorithm.collect": "turn_tree(branches=2)",
    "batch.samples_per_prompt": 6,
    "batch.sequences_per_optimizer_step": 12,
    "algorithm.advantage": "rloo()",
}
_TWO_TREES = {"batch.samples_per_prompt": 12, "batch.sequences_per_optimizer_step": 12}
_PRETRAINING = {
    "pretraining.data": "feature_settings.letters()",
    "pretraining.sequences_per_optimizer_step": 4,
    "pretraining.max_tokens": 16,
}
_ON_HOST = {"memory.reference_on_host": True}
_EXACT_COST = "cost=\"regex_match(pattern='..')\""
_COSTS = {"reward.function": f"with_cost(reward='exact_match()', {_EXACT_COST})"}
_SAFE = {
    "dataflow": "safe_rlhf",
    "roles": ("cost_critic=trained_values(lr=1e-3)", "multiplier=lagrange_multiplier()"),
    **_COSTS,
}
_VINE = {"algorithm.collect": "vine(completions=2, step_tokens=1)"}
_TOKENS = {"algorithm.collect": "special_token()"}
_CHOSEN = {"algorithm.collect": "feature_settings.chosen()"}
_SEVERAL = {"algorithm.collect": "feature_settings.several()"}
_SEARCHES = {"algorithm.collect": "feature_settings.several(searches=True)"}
_XPO = {"dataflow": "xpo", "algorithm.preference_loss": "xpo()"}
_NASH = {"dataflow": "nash_md", "algorithm.preference_loss": "nash_md()"}
_REMAX = {"dataflow": "remax", "algorithm.advantage": "remax()"}
_DISTIL = {"dataflow": "on_policy_distil", "teacher_model": "FOLDER/policy"}
_ROWS = {"data.train": "FOLDER/rows.jsonl", "tokenizer": "FOLDER/letters"}
_PICTURES = {"data.train": "FOLDER/pictures.jsonl", "tokenizer": "FOLDER/letters"}
_SCORER = {"reward.model": "FOLDER/scorer", "reward.function": ""}
_REFERENCE = {"placement": ("reference=group(devices=1)",)}
_KL = {"algorithm.kl_in_loss": 0.1}
_IMAGES = {"data.train": "feature_settings.pictures()", "data.max_prompt_tokens": 7}
_VISION = MODEL.replace(
    "decoder(",
    "vision_decoder(patch_size=4, vision_layers=1, "
    "vision_embed=32, vision_mlp=32, vision_heads=2, ",
)
_MIXTURE = {"model": "feature_settings.experts()"}
_GROVE = {
    "algorithm.collect": "feature_settings.grove()",
    "batch.samples_per_prompt": 6,
    "batch.sequences_per_optimizer_step": 12,
}
_DYNAMIC = {"algorithm.collect": "feature_settings.replacing()"}
_TRACED = {"algorithm.collect": "feature_settings.traced()"}
# Functions of the user's own below, which have several features at once.
_OF_SCORES, _OF_ENTROPY, _OF_LOGPROBS = (
    tuple(
        {"algorithm.advantage": f"feature_settings.{name}({given})"}
        for given in ("", "returns=True")
    )
    for name in ("of_scores", "of_entropy", "of_logprobs")
)
_FLOW, _AROUND, _AGAINST = (
    tuple(
        {
            "dataflow": f"feature_settings.{flow}{paid}",
            **beside,
            **(_COSTS if "costs" in paid else {}),
        }
        for paid in ("()", "(costs=True)")
    )
    for flow, beside in (
        ("flow", {}),
        ("around", {}),
        ("against", {"algorithm.preference_loss": "nash_md()"}),
    )
)
_FLOWS = (*_FLOW, *_AROUND)
_OWN_DISTIL = {**_DISTIL, "dataflow": "feature_settings.distil"}
_DISTILS = _DISTIL, _OWN_DISTIL
# One that reads text, and one that reads images, too, which is not batch-invariant.
_TEACHERS, _SEEING = (
    {"teachers": (name, name), "teacher_sources": ("none", "*")}
    for name in ("FOLDER/teacher", "FOLDER/policy")
)
_SELF, _SELF_VINE, _SELF_DYNAMIC, _SELF_SEVERAL, _SELF_SEARCHES = _HINTED = tuple(
    {
        "algorithm.teacher_coef": 0.5,
        "algorithm.collect": "with_hint(hint='ground_truth()', template='{prompt}{hint}', "
        f"inner={inner!r})",
    }
    for inner in (
        "once()",
        "vine(completions=2, step_tokens=1)",
        "feature_settings.replacing()",
        "feature_settings.several()",
        "feature_settings.several(searches=True)",
    )
)
_SELF_ALONE = {
    **_SELF,
    "algorithm.teacher_coef": 0.0,
    "dataflow": "on_policy_distil(match='sampled')",
}
_TAUGHT = {**_TEACHERS, "algorithm.teacher_coef": 0.5}
# Feature -> the fields that turn it on, in several ways where others want other values of them. A
# way may be of use only beside another feature's. FOLDER is that of `folders`.
SETTINGS: dict[str, tuple[dict, ...]] = {
    "program steps": (
        {"program_steps": 2, "reward.function": "regex_match(pattern='[a-d]')"},
        {"program_steps": 2},
    ),
    "in flight": ({"rollouts.max_staleness": 1},),
    "sampler devices": ({"rollouts.max_staleness": 1, "rollouts.sampler_devices": 1},),
    "placed roles": (
        {"placement": ("reward_model=group(devices=1)",), **_SCORER},
        {**_REFERENCE, **_KL},
        _REFERENCE,
    ),
    "placed reference": ({**_REFERENCE, **_KL}, _REFERENCE),
    "replay": (
        {"rollouts.replay": "FOLDER/stored.jsonl", "rollouts.replay_share": 0.5},
        {"rollouts.replay": "FOLDER/stored.jsonl"},
    ),
    "replay alone": ({"rollouts.replay": "FOLDER/stored.jsonl"},),
    "environment": (
        _EPISODES,
        {**_EPISODES, "environment.function": "tiny_environments.two_seats()"},
        {**_EPISODES, "environment.function": "tiny_environments.lives()"},
    ),
    "episodes of several rows": (
        {**_EPISODES, "environment.function": "tiny_environments.two_seats()"},
        {**_EPISODES, "environment.function": "tiny_environments.two_seats()", **_TWO_TREES},
        {**_EPISODES, "environment.function": "feature_settings.unlike_seats"},
        {**_EPISODES, "environment.max_rows": 2},
    ),
    "unrepeatable environment": (
        {**_EPISODES, "environment.function": "tiny_environments.lives()"},
        {**_EPISODES, "environment.function": "feature_settings.unlike_seats"},
    ),
    "images": (
        {**_IMAGES, "model": _VISION},
        {**_IMAGES, **_PICTURES, "model": _VISION},
        {**_IMAGES, "model": "feature_settings.experts(images=True)"},
        {**_IMAGES, "model": "feature_settings.experts(images=True, bias=True)"},
    ),
    "opponent": (_XPO, _NASH, *_AGAINST),
    "rounds": (
        {**_CRITIC, **_TOKENS},
        _TOKENS,
        _SEVERAL,
        _SEARCHES,
        _GROVE,
        _SELF_SEVERAL,
        _SELF_SEARCHES,
    ),
    "continuations": (
        {**_CRITIC, **_TOKENS},
        _TOKENS,
        _VINE,
        _SEVERAL,
        _SEARCHES,
        _SELF_VINE,
        _SELF_SEVERAL,
        _SELF_SEARCHES,
    ),
    "values by continuations": (
        {**_VINE, "algorithm.advantage": "vineppo()"},
        _VINE,
        _SEVERAL,
        _SEARCHES,
        {**_SELF_VINE, "algorithm.advantage": "vineppo()"},
        _SELF_VINE,
        _SELF_SEVERAL,
        _SELF_SEARCHES,
    ),
    "search": (
        {"algorithm.collect": "search(method='mcts(simulations=4, width=3)')"},
        {"algorithm.collect": "search(method='best_of_n(samples=2)')"},
        {"algorithm.collect": "critic_search(method='mcts(simulations=4, width=3)')"},
        _SEARCHES,
        _SELF_SEARCHES,
    ),
    "search of whole texts": (
        {"algorithm.collect": "search(method='best_of_n(samples=2)')"},
        _SEARCHES,
        _SELF_SEARCHES,
    ),
    "tree of episodes": (
        {**_EPISODES, **_TREES},
        {
            **_EPISODES,
            "environment.function": "tiny_environments.two_seats()",
            **_TREES,
            **_TWO_TREES,
        },
        {**_EPISODES, **_TREES, "algorithm.advantage": "gae()"},
        *({**_EPISODES, **_TREES, **way} for way in (*_OF_SCORES, *_OF_ENTROPY, *_OF_LOGPROBS)),
        {**_EPISODES, **_TREES, **_GROVE},
    ),
    "rollout by scores": (
        {"algorithm.collect": "first_live()"},
        {"algorithm.collect": "dynamic(if_short='fill')"},
        {"algorithm.collect": "dynamic(max_rounds=1, if_short='fill')"},
        _CHOSEN,
        _VINE,
        _TOKENS,
        _SEARCHES,
        _GROVE,
        _SELF_VINE,
        _SELF_SEARCHES,
        _SELF_DYNAMIC,
    ),
    "choice of groups": (
        _CHOSEN,
        {"algorithm.collect": "first_live()"},
        _SEVERAL,
        _SEARCHES,
        _GROVE,
        _SELF_SEVERAL,
        _SELF_SEARCHES,
    ),
    "rollout inside another": ({**_REMAX}, {"dataflow": "remax"}, _XPO, _NASH, *_AROUND, *_AGAINST),
    "rollout of other roles": (
        _VINE,
        {**_CRITIC, **_TOKENS},
        _TOKENS,
        _SEVERAL,
        _SEARCHES,
        _GROVE,
        _DYNAMIC,
        _TRACED,
        *_HINTED,
    ),
    "dead groups replaced in flight": (
        {"algorithm.collect": "dynamic(if_short='fill')", "rollouts.max_staleness": 1},
        {**_DYNAMIC, "rollouts.max_staleness": 1},
        {**_SELF_DYNAMIC, "rollouts.max_staleness": 1},
    ),
    "rollout of single rows": (
        {"algorithm.collect": "first_live()"},
        _CHOSEN,
        _SEVERAL,
        _SEARCHES,
        _GROVE,
        _DYNAMIC,
        _TRACED,
        _SELF_SEVERAL,
        _SELF_SEARCHES,
        _SELF_DYNAMIC,
    ),
    "reward model": (
        _SCORER,
        {
            "reward.model": "FOLDER/scorer",
            "reward.function": f"with_cost(reward='reward_model()', {_EXACT_COST})",
        },
    ),
    "judge model": ({"reward.judge_model": "FOLDER/judge", "reward.function": "judge(scale=2)"},),
    "process model": (
        {"reward.process_model": "FOLDER/scorer", "algorithm.advantage": "reinforce_plus_plus()"},
        {"reward.process_model": "FOLDER/scorer", "algorithm.advantage": "gae()"},
        {"reward.process_model": "FOLDER/scorer"},
    ),
    "reward of evaluation": ({"evaluate.reward": "exact_match()"},),
    "rule over the batch": ({"algorithm.reward_shaping": ("normalised()",)},),
    "no reward read": (_SELF_ALONE, _DISTIL, _OWN_DISTIL),
    "costs": (
        {**_SAFE, "algorithm.advantage": "gae(whiten=False)"},
        _SAFE,
        {**_SAFE, "reward.function": f"with_cost(reward='reward_model()', {_EXACT_COST})"},
        *({**_SAFE, **way} for way in (_OF_SCORES[1], _OF_ENTROPY[1])),
        *(ways[1] for ways in (_FLOW, _AROUND, _AGAINST)),
        {"dataflow": _FLOW[1]["dataflow"]},
    ),
    "samples compared": ({"dataflow": "raft"}, *_FLOWS, *_AGAINST, _OWN_DISTIL),
    "one version of the policy": (
        {
            "dataflow": "prime",
            "roles": ("implicit=trained_policy(lr=1e-3)",),
            "algorithm.advantage": "prime()",
        },
        {"dataflow": "prime", "roles": ("implicit=trained_policy(lr=1e-3)",)},
        *_FLOWS,
        *_AGAINST,
        _OWN_DISTIL,
    ),
    "samples of the reference": (_NASH, _XPO, *_AGAINST),
    "dataflow over draws": (
        {
            "dataflow": "expert_iteration",
            "algorithm.advantage": "gae()",
            "algorithm.collect": "critic_search(method='mcts(simulations=4, width=3)')",
        },
        {
            "dataflow": "expert_iteration",
            "algorithm.advantage": "group_relative()",
            "algorithm.collect": "search(method='mcts(simulations=4, width=3)')",
        },
        {
            "dataflow": "expert_iteration",
            "algorithm.collect": "critic_search(method='mcts(simulations=4, width=3)')",
        },
        *_FLOWS,
        *_AGAINST,
        _OWN_DISTIL,
    ),
    "dataflow of single rows": ({**_REMAX}, {"dataflow": "remax"}, *_FLOWS, *_AGAINST, _OWN_DISTIL),
    "loss over draws": ({"algorithm.policy_loss": "cispo(behaviour='sampler')"},),
    "advantage over draws": (
        {"algorithm.advantage": "feature_settings.by_entropy"},
        *_OF_ENTROPY,
        *_OF_LOGPROBS,
    ),
    "fields of new samples": (
        {"algorithm.advantage": "feature_settings.by_entropy"},
        {"algorithm.policy_loss": "feature_settings.entropy_loss"},
        _VINE,
        *_FLOWS,
        _SELF_VINE,
    ),
    "advantage over log-probs": (
        {"algorithm.advantage": "optimal_token_baseline()"},
        *_OF_LOGPROBS,
    ),
    "advantage of single rows": (
        {"algorithm.advantage": "optimal_token_baseline()"},
        *_OF_SCORES,
        *_OF_ENTROPY,
        *_OF_LOGPROBS,
    ),
    "advantage blind to tokens": (
        {"algorithm.advantage": "group_relative()"},
        *_OF_SCORES,
        *_OF_ENTROPY,
        *_OF_LOGPROBS,
        {"algorithm.advantage": "vineppo()"},
        {"algorithm.advantage": "rloo()"},
        {"algorithm.advantage": "prime()"},
        {},
    ),
    "no reference": (_DISTIL, _OWN_DISTIL, *_FLOWS),
    "KL": (_KL, {"algorithm.kl_in_reward": 0.1}),
    "correction": ({"algorithm.correction": "rollout_correction()"},),
    "bypass": ({"algorithm.old_logprobs": "sampler"},),
    "adapters": ({"lora.rank": 4},),
    "router bias": (
        {
            "model": "feature_settings.experts(bias=True)",
            "model_settings.router_bias_update_speed": 0.01,
        },
        {
            "model": "feature_settings.experts(images=True, bias=True)",
            "model_settings.router_bias_update_speed": 0.01,
        },
    ),
    "weights in bfloat16": ({"model_settings.weight_dtype": "bfloat16"},),
    "reference on the host": ({"memory.reference_on_host": True, **_KL}, _ON_HOST),
    "batch invariance": ({"model_settings.batch_invariant": True},),
    "narrow numbers": ({"sampler.dtype": "bfloat16"},),
    "weights of decoding": ({"sampler.weight_dtype": "bfloat16"},),
    "streamed rows": ({**_ROWS, "data.stream": True}, {**_PICTURES, "data.stream": True}),
    "rows known before": (
        {**_ROWS, "data.test_fraction": 0.3},
        {**_PICTURES, "data.test_fraction": 0.3},
    ),
    "unpacked rows": ({"batch.packing": False},),
    "loop of the host": ({"sampler.loop": "host"},),
    "dispatches by the host": ({"sampler.loop": "host"}, {"rollouts.max_staleness": 1}, _EPISODES),
    "pages": ({"sampler.page_tokens": 8, "sampler.loop": "host"}, {"sampler.page_tokens": 8}),
    "speculation": ({"sampler.draft_tokens": 2},),
    "router replay": (
        {**_MIXTURE, "sampler.router_replay": True},
        {"model": "feature_settings.experts(bias=True)", "sampler.router_replay": True},
        {"model": "feature_settings.experts(images=True)", "sampler.router_replay": True},
    ),
    "shown a hint": (*_HINTED, *({**way, **_CRITIC} for way in _HINTED), _SELF_ALONE),
    "several teachers": (
        _TAUGHT,
        {**_TAUGHT, **_CRITIC},
        {**_TAUGHT, **_SEEING},
        *({**teachers, **distil} for teachers in (_TEACHERS, _SEEING) for distil in _DISTILS),
    ),
    "pretraining": ({**_CRITIC, **_PRETRAINING}, _PRETRAINING, {**_PRETRAINING, "dataflow": "ppo"}),
    "epochs": ({"batch.epochs": 2},),
    "filters": ({"algorithm.filters": ("overlong()",)},),
    "curriculum": ({"data.retire_at_pass_rate": 0.9},),
    "stop strings": ({"sampler.stop_strings": ("?",)},),
    "thinking limits": (
        {
            "sampler.thinking_tokens": (1, 2),
            "sampler.end_of_thinking": "?",
            "sampler.interrupt_phrase": "?",
        },
    ),
}


def letters() -> Task:
    """Rows that environments play and a policy answers, and worked examples."""
    task, worked = rows(), [{"prompt": f"{letter}>", "completion": letter} for letter in "abcdefgh"]
    return dataclasses.replace(task, alphabet=_alphabet(), worked_examples=worked)


def pictures() -> Task:
    task = drawn_digits(kinds=4, test=8, worked_examples=64)
    known = [task.train[i] for i in range(16)]  # a stream retires no prompts
    return dataclasses.replace(task, train=known, alphabet=_alphabet())


def _alphabet() -> str:
    """The first character is the one that stands for an image."""
    return "".join(
        dict.fromkeys(drawn_digits(test=1, worked_examples=0).alphabet + rows().alphabet)
    )


@contract(reads=("rewards", "entropy"), fills=())
def by_entropy(batch):
    """An advantage of the user's own."""
    return batch.rewards * batch.entropy


@contract(reads=("advantages", "entropy"))
def entropy_loss(policy, batch):
    return -batch.advantages * policy.logprobs * batch.entropy, {}


def _returns(options: dict) -> tuple[str, ...]:
    return ("returns",) * options["returns"]


@contract(reads=("rewards",), fills=_returns, token_rewards=False, single_rows=True)
def of_scores(batch, *, returns: bool = False):
    """An advantage, with returns for a critic, that compares nothing."""
    return (batch.rewards, batch.rewards) if returns else batch.rewards


@contract(reads=("rewards", "entropy"), fills=_returns, token_rewards=False, single_rows=True)
def of_entropy(batch, *, returns: bool = False):
    advantages = batch.rewards * batch.entropy
    return (advantages, batch.rewards) if returns else advantages


@contract(
    reads=("rewards", "entropy", "old_logprobs"),
    fills=_returns,
    token_rewards=False,
    single_rows=True,
)
def of_logprobs(batch, *, returns: bool = False):
    advantages = batch.rewards * batch.entropy * jnp.exp(batch.old_logprobs)
    return (advantages, batch.rewards) if returns else advantages


_MANY = dict(
    reads=lambda o: ("rewards", "scores", "group", "entropy", *("costs",) * o["costs"]),
    fills=(),
    compares_samples=True,
    one_version=True,
    single_rows=True,
)


@contract(**_MANY)
@program
def flow(batch, key, cfg, *, actor, pretraining=None, teacher=None, costs: bool = False):
    """A dataflow of the user's own with many features, without a reference."""
    batch, load = compute_logprobs(batch, cfg, actor=actor, teacher=teacher)
    batch, metrics, _ = prepare_batch(batch, cfg, actor=actor)
    actor, metrics = update_actor(actor, batch, cfg, {**metrics, **load}, pretraining=pretraining)
    return {"actor": actor}, metrics


@contract(**_MANY, rollout="greedy_baseline()")
@program
def around(batch, key, cfg, *, actor, pretraining=None, teacher=None, costs: bool = False):
    return flow.page(batch, key, cfg, actor=actor, pretraining=pretraining, teacher=teacher)


@contract(**_MANY, rollout="against(opponent='mixture')")
@program
def against(batch, key, cfg, *, actor, reference, costs: bool = False):
    return nash_md.page(batch, key, cfg, actor=actor, reference=reference, mixture=0.5)


@contract(
    data="samples",
    reads=("entropy",),
    fills=(),
    compares_samples=True,
    one_version=True,
    single_rows=True,
)
@program
def distil(batch, key, cfg, *, actor, teacher):
    return on_policy_distil.page(batch, key, cfg, actor=actor, teacher=teacher)


@contract(
    needs_groups=True,
    rounds=True,
    continues=True,
    single_rows=True,
    fills=("values",),
    searches=lambda o: o["searches"],
)
def several(prompts, key, cfg, *, sample, tokenizer, searches: bool = False):
    """A rollout that declares much, and draws once."""
    done = once(prompts, key, cfg, sample=sample)
    return done.replace(batch=done.batch.replace(values=0 * done.batch.mask))


@contract(needs_groups=True, rounds=True, single_rows=True, tree=TurnTree(2, (1,)))
def grove(prompts, key, cfg, *, sample, tokenizer):
    return turn_tree(prompts, key, cfg, sample=sample, branches=2, at=(1,))


@contract(needs_groups=True, single_rows=True, drops_dead=(10, "fill"))
def replacing(prompts, key, cfg, *, actor, sample, draw, tokenizer):
    return dynamic(prompts, key, cfg, actor=actor, sample=sample, draw=draw, if_short="fill")


@contract(seats=("first", "second"), repeatable=False)
def unlike_seats(letter):
    return (yield from two_seats(letter))


def experts(vocab_size: int, *, images: bool = False, bias: bool = False):
    """A mixture of experts; with a bias of each expert's score, as DeepSeek-V3 has it."""
    text = _VISION if images else MODEL
    config = resolve(text, NAMESPACES["model"])(vocab_size)
    scores = dict(scores="sigmoid", correction_bias=True) if bias else {}
    return dataclasses.replace(
        config,
        family="qwen3_moe",
        kinds=(dataclasses.replace(config.kinds[0], experts=True),),
        experts=ExpertsConfig(4, 2, 32, **scores),
    )


@contract(on_device=True, single_rows=True)
def traced(prompts, key, cfg, *, sample, tokenizer):
    """A rollout that may be a part of a program."""
    return once(prompts, key, cfg, sample=sample)


@contract(needs_groups=True, single_rows=True)
def chosen(prompts, key, cfg, *, sample):
    """A rollout that says nothing of groups in flight."""
    return once(prompts, key, cfg, sample=sample)


def base_config() -> Config:
    config = Config(dataflow="grpo", steps=2, compilation_cache="", export=False, trackers=())
    config.model, config.model_settings.remat = MODEL, "none"
    config.data.train, config.data.max_prompt_tokens = "feature_settings.letters()", 4
    config.sampler.max_response_tokens, config.reward.workers = 4, 1
    config.reward.function = "light_rewards.share"
    config.batch.prompts_per_step = config.batch.samples_per_prompt = 4
    config.batch.sequences_per_optimizer_step, config.actor_optimizer.lr = 16, 1e-3
    return config


_PAIRS_OF_SAMPLES = ("opponent", "samples of the reference")
# The kind of reason -> pairs that no rule excludes and that no way turns on; see kind_of_skip.
SKIPPED = {
    "excluded": {
        ("images", "rounds"),
        *((name, "pages") for name in _PAIRS_OF_SAMPLES),
        ("search of whole texts", "fields of new samples"),
        ("pages", "router replay"),
    },
    "invalid": {
        *((name, "pretraining") for name in (*_PAIRS_OF_SAMPLES, "no reward read")),
        *((name, "several teachers") for name in _PAIRS_OF_SAMPLES),
    },
    "one value": {
        *((name, "no reference") for name in _PAIRS_OF_SAMPLES),
        *(
            (name, "no reward read")
            for name in (*_PAIRS_OF_SAMPLES, "rollout inside another", "costs")
        ),
        ("continuations", "dead groups replaced in flight"),
        ("values by continuations", "dead groups replaced in flight"),
    },
    "unread": {
        ("rule over the batch", "no reward read"),
        *itertools.product(
            (*_PAIRS_OF_SAMPLES, "no reward read"),
            (
                "loss over draws",
                "advantage over draws",
                "fields of new samples",
                "advantage over log-probs",
                "advantage of single rows",
                "correction",
                "bypass",
                "filters",
            ),
        ),
    },
    "off": {("no reward read", "advantage blind to tokens")},
}
# Dataflow -> fields of config.algorithm that it does not read, of those that a feature sets: a run
# refuses them (rljax.setup.dry_run).
_OF_SAMPLES = {"advantage", "correction", "filters", "kl_in_reward", "old_logprobs", "policy_loss"}
_OF_TEACHERS = {*_OF_SAMPLES, "kl_in_loss", "reward_shaping"}
UNREAD = {
    "xpo": _OF_SAMPLES,
    "nash_md": _OF_SAMPLES,
    "raft": _OF_SAMPLES,
    "feature_settings.against": _OF_SAMPLES,
    "expert_iteration": {"correction", "old_logprobs", "policy_loss"},
    "on_policy_distil": _OF_TEACHERS,
    "feature_settings.distil": _OF_TEACHERS,
}


def ways_of(features) -> Iterator[dict]:
    """Yields the fields of each way to turn on all of the features: those in which no two want
    different values of a field."""
    if not features:
        yield {}
        return
    *others, last = features
    for fields in ways_of(others):
        for way in SETTINGS[last]:
            if all(fields.get(field, value) == value for field, value in way.items()):
                yield {**fields, **way}


def config_with(fields: dict, folder: str = "FOLDER") -> Config:
    def filled_in(value):
        if isinstance(value, tuple):
            return tuple(map(filled_in, value))
        return value.replace("FOLDER", folder) if isinstance(value, str) else value

    filled = {field: filled_in(value) for field, value in fields.items()}
    return with_overrides(base_config(), filled, "features")


def config_of(*features: str) -> Config:
    """The config of the first way that turns all of them on; where there is none, later features'
    fields win."""
    first = {k: v for name in features for k, v in SETTINGS[name][0].items()}
    on = (way for way in ways_of(features) if {*features} <= turned_on_by(way, features))
    return config_with(next(on, first))


def turned_on_by(fields: dict, features=()) -> set[str]:
    return {*turned_on(Parts(config_with(fields), images="images" in features))}


def kind_of_skip(features, folder: str) -> str:
    """The kind of reason why no way is a config with two features; "" where one is.

    "excluded": by what they bring along. "off": one turns the other off. "unread": the dataflow of
    one of them does not read the other's field of config.algorithm. "invalid": numbers or roles do
    not fit. "one value": they want different values of a field.
    """
    kinds = set()
    for fields in ways_of(features):
        if not (kind := _refused(features, fields, folder)):
            return ""
        kinds.add(kind)
    order = ("invalid", "unread", "excluded", "off")
    return next((kind for kind in order if kind in kinds), "one value")


def _refused(features, fields: dict, folder: str, devices: int = 2) -> str:
    """The kind of reason why a way is no config with the features; "" for one that is."""
    config = config_with(fields, folder)
    parts = Parts(config, images="images" in features)
    if not {*features} <= turned_on(parts).keys():
        return "off"
    # A run says so, once the data is read.
    if parts.images and f"{folder}/teacher" in config.teachers:
        return "invalid"
    if [*violations(parts)]:
        return "excluded"
    unread = UNREAD.get(config.dataflow.partition("(")[0], ())
    if any(field.removeprefix("algorithm.") in unread for field in fields):
        return "unread"
    try:
        validate(config, devices)
    except InputError:
        return "invalid"
    return ""


def allowed(features, folder: str) -> Config | None:
    """A config with all of these features; None where there is none."""
    ways = itertools.islice(ways_of(features), 200)
    fields = next((way for way in ways if not _refused(features, way, folder)), None)
    return None if fields is None else config_with(fields, folder)


def every_pair() -> list[tuple[str, str]]:
    """Every two features that go together, by the rules: none is excluded, by itself or by what
    every way to turn it on brings along."""
    on = {
        name: [{name, *turned_on_by(way, (name,))} for way in ways]
        for name, ways in SETTINGS.items()
    }
    excluded = {(rule.a, rule.b) for rule in EXCLUDES}
    excluded |= {(b, a) for a, b in excluded}

    def excludes(one: set, other: set) -> bool:
        return not excluded.isdisjoint(itertools.product(one, other))

    return [
        (a, b)
        for a, b in itertools.combinations(SETTINGS, 2)
        if not all(excludes(one, other) for one, other in itertools.product(on[a], on[b]))
    ]


def run_every_pair(folder: Path, run) -> dict[tuple, str]:
    """Calls run(config) for sets of features that go together, until every pair that goes together
    was in one. Returns {features of a set: what it failed with}."""
    without = {frozenset(pair) for pairs in SKIPPED.values() for pair in pairs}
    left = {frozenset(pair) for pair in every_pair()} - without
    pairs, failed = set(left), {}
    while left:
        chosen = _largest(left, pairs, str(folder))
        try:
            run(allowed(chosen, str(folder)))
        except Exception as error:
            failed[tuple(chosen)] = repr(error)
        left -= {frozenset(two) for two in itertools.combinations(chosen, 2)}
    return failed


def _largest(left: set, pairs: set, folder: str) -> list[str]:
    """Features that go together, with many pairs that are `left`."""
    chosen = sorted(min(left, key=sorted))
    names = [name for name in SETTINGS if name not in chosen]
    while names:
        new = {n: sum(frozenset((n, one)) in left for one in chosen) for n in names}
        best = max(names, key=new.get)
        names.remove(best)
        fits = all(frozenset((best, one)) in pairs for one in chosen)
        # Numbers that divide where two features meet need not where three do.
        if fits and new[best] and allowed([*chosen, best], folder):
            chosen.append(best)
    return chosen


def run(config: Config, folder: Path) -> list[dict]:
    """The metrics of two steps."""
    apart = config.placement or config.rollouts.sampler_devices
    with Run(build.build(config, jax.devices()[: 2 if apart else 1]), folder) as begun:
        begun.begin(begun.phase, build.initial_params(config, begun.setup.model))
        return [begun.step() for _ in range(config.steps)]


def write_folders(folder: Path) -> None:
    """A policy and a model that scores, of random weights, and stored rollouts."""
    from tiny_scorer import write_judge

    setup = build.build(config_of("images"), jax.devices()[:1])  # so is a teacher of images
    ids = dict(bos_id=None, eos_ids=(1,), pad_id=0)
    save_params(folder / "policy", setup.model, setup.model.init(jax.random.key(5)), **ids)
    facts = resolve(MODEL, NAMESPACES["model"])(setup.tokenizer.vocab_size)
    reader = Model(facts, setup.model.mesh)
    save_params(folder / "teacher", reader, reader.init(jax.random.key(6)), **ids)
    model = Model(dataclasses.replace(facts, labels=1), setup.model.mesh, "scalar")
    rng = np.random.default_rng(7)  # a new head is zero: its scores are made to differ
    params = jax.tree.map(
        lambda x: x + 0.3 * rng.normal(size=x.shape).astype(x.dtype), model.init(jax.random.key(3))
    )
    save_params(folder / "scorer", model, params, **ids)
    write_judge(folder / "judge")
    rows = [
        {
            "prompt": f"{letter}>",
            "completion": text,
            "reward": float(text[0] == letter),
            "truncated": False,
            "logprobs": [-1.0] * (len(text) + 1),
        }
        for letter in "abcdefgh"
        for text in ("a", "bc", letter, letter + "a")
    ]
    (folder / "stored.jsonl").write_text("\n".join(map(json.dumps, rows)))
    CharTokenizer(_alphabet()).save(folder / "letters")
    letters_rows = [
        {
            "prompt": f"{letter}>",
            "ground_truth": letter,
            "data_source": "letters",
            "extra_info": {"letter": letter},
        }
        for letter in "abcdefgh"
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, letters_rows * 4)))
    drawn = []
    for number, row in enumerate(pictures().train):
        Image.fromarray(np.asarray(row["images"][0], np.uint8)).save(folder / f"{number}.png")
        kept = {name: row[name] for name in ("prompt", "ground_truth", "data_source")}
        drawn.append({**kept, "images": [f"{number}.png"]})
    (folder / "pictures.jsonl").write_text("\n".join(map(json.dumps, drawn * 2)))
