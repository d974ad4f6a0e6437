"""Functions of a user's own that declare what they are: they are excluded as built-in ones are."""

from rljax.contracts import contract
from rljax.errors import InputError
from rljax.rollout.players.episodes.tree import TurnTree


@contract(continues=True, rounds=True)
def in_rounds(prompts, key, cfg, *, actor, reward): ...


@contract(continues=True, fills=("step_ids", "values"))
def values(prompts, key, cfg, *, actor, reward): ...


@contract(searches=True)
def best(prompts, key, cfg, *, actor, reward): ...


@contract(searches=True, targets=3)
def visits(prompts, key, cfg, *, actor, reward): ...


@contract(opponent=True, rows=2)
def duel(prompts, key, cfg, *, actor, reward): ...


@contract(tree=TurnTree(2, (1,)))
def branches(prompts, key, cfg, *, actor, reward): ...


@contract(single_rows=True)
def by_row(prompts, key, cfg, *, actor, reward): ...


@contract(single_rows=True)
def row_advantage(batch):
    return batch.rewards


@contract(fills=(), token_rewards=False)
def blind(batch):
    return batch.rewards


def undeclared(batch):
    return batch.rewards


def plain(response: str, ground_truth: str) -> float:
    return 1.0


def of_extra_info(response: str, extra_info) -> float:
    return 1.0


@contract(rubrics=False)
def ignores(response: str, extra_info) -> float:
    return 1.0


@contract(compares_batch=True)
def ranked(batch):
    return batch.scores


def at_most(config, options: dict) -> None:
    if options.get("size", 2) > config.batch.samples_per_prompt:
        raise InputError("best_of(size)", value=options["size"], fix="batch.samples_per_prompt")


@contract(check=at_most)
def best_of(prompts, key, cfg, *, actor, reward, size: int = 2): ...


@contract(asks="server")
def remote(response, *, url: str) -> float:
    return 1.0


@contract(corrects_mismatch=True)
def own_loss(policy, batch):
    return policy.logprobs, {}


@contract(reads=("rewards", "group"), fills=("values",))
def valued(batch, key, cfg, *, actor, worth): ...


@contract(reads=("rewards", "group"))
def without_values(batch, key, cfg, *, actor, worth): ...


@contract(reads=("advantages", "entropy"))
def entropy_loss(policy, batch):
    return -batch.advantages * policy.logprobs * batch.entropy, {}


@contract(reads=("advantages", "kept_tokens"))
def by_kept(policy, batch):
    return -batch.advantages * policy.logprobs / (1 + batch.kept_tokens[:, None]), {}
