"""A config of seconds a step, and for every feature of rljax.setup.features the fields that turn it
on: what runs any two features together."""

import dataclasses
import itertools
import json
from pathlib import Path

import jax
import numpy as np
from tiny_environments import rows

from rljax import setup as build
from rljax.components import resolve
from rljax.config import NAMESPACES, Config, with_overrides
from rljax.contracts import contract
from rljax.errors import InputError
from rljax.models.huggingface import save_params
from rljax.models.model import Model
from rljax.rollout import once
from rljax.setup.features import Parts, violations
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
# Feature -> the fields that turn it on. FOLDER is that of `folders`.
SETTINGS = {
    "in flight": {"rollouts.max_staleness": 1},
    "sampler devices": {"rollouts.max_staleness": 1, "rollouts.sampler_devices": 1},
    "placed roles": {
        "placement": ("reward_model=group(devices=1)",),
        "reward.function": "",
        "reward.model": "FOLDER/scorer",
    },
    "placed reference": {"placement": ("reference=group(devices=1)",), "algorithm.kl_in_loss": 0.1},
    "replay": {"rollouts.replay": "FOLDER/stored.jsonl", "rollouts.replay_share": 0.5},
    "replay alone": {"rollouts.replay": "FOLDER/stored.jsonl"},
    "environment": _EPISODES,
    "episodes of several rows": {
        **_EPISODES,
        "environment.function": "tiny_environments.two_seats()",
    },
    "unrepeatable environment": {**_EPISODES, "environment.function": "tiny_environments.lives()"},
    "images": {
        "data.train": "feature_settings.pictures()",
        "data.max_prompt_tokens": 7,
        "model": MODEL.replace(
            "decoder(",
            "vision_decoder(patch_size=4, vision_layers=1, "
            "vision_embed=32, vision_mlp=32, vision_heads=2, ",
        ),
    },
    "opponent": {"dataflow": "xpo", "algorithm.preference_loss": "xpo()"},
    "rounds": {**_CRITIC, "algorithm.collect": "special_token()"},
    "continuations": {**_CRITIC, "algorithm.collect": "special_token()"},
    "values by continuations": {
        "algorithm.collect": "vine(completions=2, step_tokens=1)",
        "algorithm.advantage": "vineppo()",
    },
    "search": {"algorithm.collect": "search(method='mcts(simulations=4, width=3)')"},
    "search of whole texts": {"algorithm.collect": "search(method='best_of_n(samples=2)')"},
    "tree of episodes": {**_EPISODES, **_TREES},
    "rollout by scores": {"algorithm.collect": "first_live()"},
    "choice of groups": {"algorithm.collect": "feature_settings.chosen()"},
    "rollout inside another": {"dataflow": "remax", "algorithm.advantage": "remax()"},
    "rollout of other roles": {"algorithm.collect": "vine(completions=2, step_tokens=1)"},
    "dead groups replaced in flight": {
        "algorithm.collect": "dynamic(if_short='fill')",
        "rollouts.max_staleness": 1,
    },
    "rollout of single rows": {"algorithm.collect": "first_live()"},
    "reward model": {"reward.model": "FOLDER/scorer", "reward.function": ""},
    "judge model": {"reward.judge_model": "FOLDER/judge", "reward.function": "judge(scale=2)"},
    "process model": {
        "reward.process_model": "FOLDER/scorer",
        "algorithm.advantage": "reinforce_plus_plus()",
    },
    "reward of evaluation": {"evaluate.reward": "exact_match()"},
    "rule over the batch": {"algorithm.reward_shaping": ("normalised()",)},
    "no reward read": {
        "dataflow": "on_policy_distil",
        "teacher_model": "FOLDER/policy",
        "reward.function": "",
    },
    "costs": {
        "dataflow": "safe_rlhf",
        "algorithm.advantage": "gae(whiten=False)",
        "roles": ("cost_critic=trained_values(lr=1e-3)", "multiplier=lagrange_multiplier()"),
        "reward.function": "with_cost(reward='exact_match()', cost=\"regex_match(pattern='..')\")",
    },
    "samples compared": {"dataflow": "raft"},
    "one version of the policy": {
        "dataflow": "prime",
        "roles": ("implicit=trained_policy(lr=1e-3)",),
        "algorithm.advantage": "prime()",
    },
    "samples of the reference": {"dataflow": "nash_md", "algorithm.preference_loss": "nash_md()"},
    "dataflow over draws": {
        "dataflow": "expert_iteration",
        "algorithm.advantage": "gae()",
        "algorithm.collect": "critic_search(method='mcts(simulations=4, width=3)')",
    },
    "dataflow of single rows": {"dataflow": "remax", "algorithm.advantage": "remax()"},
    "loss over draws": {"algorithm.policy_loss": "cispo(behaviour='sampler')"},
    "advantage over draws": {"algorithm.advantage": "feature_settings.by_entropy"},
    "fields of new samples": {"algorithm.advantage": "feature_settings.by_entropy"},
    "advantage of single rows": {"algorithm.advantage": "optimal_token_baseline()"},
    "advantage blind to tokens": {"algorithm.advantage": "group_relative()"},
    "no reference": {
        "dataflow": "on_policy_distil",
        "teacher_model": "FOLDER/policy",
        "reward.function": "",
    },
    "KL": {"algorithm.kl_in_loss": 0.1},
    "correction": {"algorithm.correction": "rollout_correction()"},
    "bypass": {"algorithm.old_logprobs": "sampler"},
    "adapters": {"lora.rank": 4},
    "unpacked rows": {"batch.packing": False},
    "loop of the host": {"sampler.loop": "host"},
    "pages": {"sampler.page_tokens": 8, "sampler.loop": "host"},
    "speculation": {"sampler.draft_tokens": 2},
    "pretraining": {
        **_CRITIC,
        "pretraining.data": "feature_settings.letters()",
        "pretraining.sequences_per_optimizer_step": 4,
        "pretraining.max_tokens": 16,
    },
    "epochs": {"batch.epochs": 2},
    "filters": {"algorithm.filters": ("overlong()",)},
    "curriculum": {"data.retire_at_pass_rate": 0.9},
    "stop strings": {"sampler.stop_strings": ("?",)},
    "thinking limits": {
        "sampler.thinking_tokens": (1, 2),
        "sampler.end_of_thinking": "?",
        "sampler.interrupt_phrase": "?",
    },
}


def letters() -> Task:
    """Rows that environments play and a policy answers, and worked examples."""
    task, worked = rows(), [{"prompt": f"{letter}>", "completion": letter} for letter in "abcdefgh"]
    return dataclasses.replace(task, alphabet=_alphabet(), worked_examples=worked)


def pictures() -> Task:
    task = drawn_digits(kinds=4, test=8)
    known = [task.train[i] for i in range(16)]  # a stream retires no prompts
    return dataclasses.replace(task, train=known, alphabet=_alphabet())


def _alphabet() -> str:
    """The first character is the one that stands for an image."""
    return "".join(dict.fromkeys(drawn_digits(kinds=4, test=8).alphabet + rows().alphabet))


@contract(reads=("rewards", "entropy"))
def by_entropy(batch):
    """An advantage of the user's own."""
    return batch.rewards * batch.entropy


@contract(needs_groups=True)
def chosen(prompts, key, cfg, *, sample):
    """A rollout that says nothing of groups in flight."""
    return once(prompts, key, cfg, sample=sample)


def share(response, ground_truth) -> float:
    """The share of the letter; 1 more for a response of an even length: few groups are dead."""
    return response.count(ground_truth[:1]) / max(len(response), 1) + len(response) % 2


def base_config() -> Config:
    config = Config(dataflow="grpo", steps=2, compilation_cache="", export=False, trackers=())
    config.model, config.model_settings.remat = MODEL, "none"
    config.data.train, config.data.max_prompt_tokens = "feature_settings.letters()", 4
    config.sampler.max_response_tokens, config.reward.workers = 4, 1
    config.reward.function = "feature_settings.share"
    config.batch.prompts_per_step = config.batch.samples_per_prompt = 4
    config.batch.sequences_per_optimizer_step, config.actor_optimizer.lr = 16, 1e-3
    return config


def clash(one: dict, other: dict) -> bool:
    """True if two settings want different values of a field: no config has both features."""
    return any(field in other and other[field] != value for field, value in one.items())


def config_of(*features: str, folder: str = "FOLDER") -> Config:
    fields: dict = {}
    for name in features:
        fields |= SETTINGS[name]
    filled = {
        field: value.replace("FOLDER", folder) if isinstance(value, str) else value
        for field, value in fields.items()
    }
    return with_overrides(base_config(), filled, "features")


def allowed(features, folder: str, devices: int = 2) -> Config | None:
    """The config with all of these features; None where some of them exclude each other."""
    if any(clash(SETTINGS[a], SETTINGS[b]) for a, b in itertools.combinations(features, 2)):
        return None
    config = config_of(*features, folder=folder)
    if [*violations(Parts(config, images="images" in features))]:
        return None
    validate(config, devices)
    return config


def run_every_pair(folder: Path, run) -> dict[tuple, str]:
    """Calls run(config) for sets of features that go together, until every pair that goes together
    was in one. Returns {features of a set: what it failed with}.

    A field of config.algorithm that the dataflow does not read is refused once it is traced: the
    feature that sets it and the one that sets the dataflow are no pair.
    """
    left = {frozenset(p) for p in itertools.combinations(SETTINGS, 2) if allowed(p, str(folder))}
    pairs, failed = set(left), {}
    while left:
        chosen = _largest(left, pairs, str(folder))
        while len(chosen) > 1:
            try:
                run(allowed(chosen, str(folder)))
            except InputError as error:
                unread = str(error).partition("does not read")[0]
                names = [n for n in chosen if any(f"{field}=" in unread for field in SETTINGS[n])]
                names = [name for name in names if "dataflow" not in SETTINGS[name]]
                if "does not read" in str(error) and names:
                    flows = [n for n in chosen if "dataflow" in SETTINGS[n]]
                    gone = {frozenset(two) for two in itertools.product(names, flows)}
                    pairs, left = pairs - gone, left - gone
                    chosen = [name for name in chosen if name not in names]
                    continue
                failed[tuple(chosen)] = str(error)
            except Exception as error:
                failed[tuple(chosen)] = repr(error)
            break
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
        if fits and new[best] and _divides([*chosen, best], folder):
            chosen.append(best)
    return chosen


def _divides(features: list[str], folder: str) -> bool:
    """Numbers that divide where two features meet need not where three do."""
    try:
        return allowed(features, folder) is not None
    except InputError:
        return False


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
