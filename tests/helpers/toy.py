"""A task, losses and a dataflow from outside the package, for tests of learning."""

import dataclasses

from rljax.contracts import contract
from rljax.learn import Objective
from rljax.losses.policy import PolicyOutputs, ppo_clip
from rljax.policies import Policy as SamplingPolicy
from rljax.policies import sample_all
from rljax.rollout import Rollout, once
from rljax.tasks import Task, first_letter
from rljax.tasks.task import TEXT


def letters_and_digits() -> Task:
    """ "bca>" and a digit that the prompt appends: for rewards that look at the length."""
    task = first_letter()
    return dataclasses.replace(task, alphabet=task.alphabet + "0123456789")


def anything(response) -> float:
    """Every response is right."""
    return 1.0


def upside_down(policy, batch):
    """PPO with its sign flipped: it must unlearn."""
    loss, metrics = ppo_clip(policy, batch)
    return -loss, metrics


def objective(model, loss, *reductions, corrected=True, whole_step=False) -> Objective:
    """loss(policy, batch) -> (loss or losses, metrics), each loss with a reduction of its own."""

    def terms(policy, batch):
        losses, metrics = loss(policy, batch)
        return (losses if isinstance(losses, tuple) else (losses,)), metrics

    return Objective(
        lambda p, b: PolicyOutputs(*model.logprobs(p, b)),
        terms,
        reductions,
        (corrected,) * len(reductions),
        whole_step,
    )


def ten_more(batch):
    """A reward shaping: every score and ten."""
    return batch.scores + 10


def begins_even(response) -> float:
    """1 if the first character is an even digit: what follows it changes nothing."""
    return float(response[:1] in tuple("02468"))


def scored_once_more(prompts, key, cfg, *, sample, actor, reward, tokenizer):
    """`once`, and the mean reward of one more sample of every prompt as a metric."""
    done = once(prompts, key, cfg, sample=sample)
    policy = SamplingPolicy(actor, tokenizer, cfg.sampling, prompts.tokens.shape[1])
    more = sample_all(policy, prompts.records, 1, reward, key=key)
    mean = sum(sample.reward for sample in more) / len(more)
    return done.replace(metrics={"once_more/reward": mean})


@contract(needs_groups=True)
def chooses_groups(prompts, key, cfg, *, sample):
    """A rollout that would choose groups, and says nothing of those in flight."""
    batch, report = sample(prompts, key, n=2)
    return Rollout(batch, prompts, report)


def restaurant() -> Task:
    """One record in the form of FLAN: an instruction about a review of a restaurant, options, and
    the answer. What is trained on is what is evaluated."""
    prompt = (
        "The food was cold and the waiter forgot us twice.\n"
        "Would the writer of this review go to the restaurant again?\n"
        "OPTIONS:\n- yes\n- no\nANSWER: "
    )
    answer = "no, because the food was cold"
    row = {"prompt": prompt, "ground_truth": answer, "data_source": "flan"}
    shown = [{"prompt": prompt, "completion": answer}]
    return Task(alphabet=TEXT, train=[row], test=[row], worked_examples=shown, worked_test=shown)
