"""Recipe: what a dataflow reads as `cfg`.

What lives here: the config's algorithm with its components resolved. Hashable: static in jit, so
that a change of any option is another program.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable

import jax
import jax.numpy as jnp

from rljax.batch import Batch
from rljax.components import Component
from rljax.contracts import spec
from rljax.errors import InputError
from rljax.learn import Steps
from rljax.losses.policy import Policy
from rljax.rollout.collect import once
from rljax.sampler import Sampling


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a dataflow reads: the config's algorithm with its components resolved. Hashable: static
    in jit."""

    samples_per_prompt: int
    sampling: Sampling
    advantage: Component
    policy_loss: Component
    value_loss: Component
    reduction: Component
    steps: Steps
    preference_loss: Component | None = None
    reward_loss: Component | None = None
    kl_in_reward: float = 0.0
    kl_in_loss: float = 0.0
    kl_estimator: str = "k3"
    kl_reward_estimator: str = "k1"
    kl_importance: bool = False
    entropy_coef: float = 0.0
    positive_nll: float = 0.0
    correct_at: float = 1.0
    trust_region: float = 0.0
    correction: Component | None = None
    old_logprobs: str = "recomputed"
    collect: Callable = once
    reward_shaping: tuple[Component, ...] = ()
    baseline_filters: tuple[Component, ...] = ()
    filters: tuple[Component, ...] = ()

    def replace(self, **fields) -> "Recipe":
        return dataclasses.replace(self, **fields)

    @property
    def update_options(self) -> dict:
        """The keyword arguments of Actor.update that the config sets."""
        return {
            "steps": self.steps,
            "reduction": self.reduction,
            "kl_in_loss": self.kl_in_loss,
            "kl_estimator": self.kl_estimator,
            "kl_importance": self.kl_importance,
            "entropy_coef": self.entropy_coef,
            "positive_nll": self.positive_nll,
            "correct_at": self.correct_at,
            "trust_region": self.trust_region,
        }

    @property
    def critic_options(self) -> dict:
        """The keyword arguments of Critic.update that the config sets."""
        return {"steps": self.steps, "reduction": self.reduction}


def rehearse(recipe: Recipe, kind: str = "prompts", dataflow: Component | None = None) -> None:
    """Call every component that reads this kind of data once on shapes alone, before anything is
    sampled or compiled: an option out of range, or a function of the user's that does not take or
    return what its stage does. Raises InputError."""
    rows, columns = 12, 6
    # How many parts the reward has shows when it runs: as many as there are weights for them.
    readers = [c for c in (recipe.advantage, *recipe.reward_shaping) if isinstance(c, Component)]
    weights = [c.options["weights"] for c in readers if c.options.get("weights")]
    shapes = {"B": rows, "S": columns, "K": len(weights[0]) if weights else 2}
    fields = {
        f.name: jax.ShapeDtypeStruct([shapes[a] for a in f.metadata["axes"]], f.metadata["dtype"])
        for f in dataclasses.fields(Batch)
        if set(f.metadata["axes"]) <= shapes.keys()  # images are the model's affair alone
    }
    batch, per_token = Batch(**fields), fields["mask"]

    def call(stage: str, component, shape, *args):
        if not isinstance(component, Component):
            return
        try:
            found = jax.eval_shape(component, *args)
        except InputError:
            raise
        except Exception as error:  # of the user's code, or of an option's value
            raise InputError(
                f"algorithm.{stage}={component.text!r} fails when it is called",
                rule=f"{type(error).__name__}: {str(error).splitlines()[0]}",
                fix="see the function's docstring for what it takes and returns",
            ) from error
        first = found[0] if isinstance(found, tuple) else found
        first = first if hasattr(first, "shape") else per_token
        if shape is not None and tuple(first.shape) not in shape:
            raise InputError(
                f"algorithm.{stage}={component.text!r} returns the wrong shape",
                value=tuple(first.shape),
                rule=f"one of {shape} for a batch of [{rows}, {columns}]",
            )

    token, row = (rows, columns), (rows,)
    policy = Policy(per_token, per_token)
    if kind != "prompts":
        call("reduction", recipe.reduction, (token,), batch)
        _rehearse_offline(recipe, kind, dataflow, call, policy, batch)
        return
    call("advantage", recipe.advantage, (token,), batch)
    call("policy_loss", recipe.policy_loss, (token, row), policy, batch)
    call("value_loss", recipe.value_loss, (token, row), per_token, batch)
    call("reduction", recipe.reduction, (token,), batch)
    call("correction", recipe.correction, None, batch)
    for stage in ("reward_shaping", "baseline_filters", "filters"):
        for component in getattr(recipe, stage):
            call(stage, component, (row,), batch)


def rehearse_compared(recipe: Recipe, dataflow: Component) -> None:
    """As rehearse, the preference loss of a dataflow that compares samples, if it is one."""
    if "rows_per_example" in vars(dataflow.function):
        rehearse(recipe, "pairs")


def _rehearse_offline(
    recipe: Recipe, kind: str, dataflow: Component | None, call, policy: Policy, batch: Batch
) -> None:
    """What the dataflow calls, and nothing else."""
    token = batch.mask.shape
    scalar = jax.ShapeDtypeStruct((), batch.mask.dtype)
    per_example = {k: ((token[0] // k,),) for k in (1, 2, 3)}
    loss = recipe.preference_loss
    if kind == "pairs" and dataflow is not None and "actor" not in dataflow.parameters:
        call("reward_loss", recipe.reward_loss, per_example[2], batch.scores, batch)
    elif kind == "pairs":
        beside = [jax.ShapeDtypeStruct((token[0] // 2,), jnp.bool_)]
        beside = beside if "chosen_is_policy" in loss.positional else []
        call("preference_loss", loss, per_example[spec(loss).rows], policy, batch, *beside)
    elif kind == "labelled":
        beside = [scalar] * ("kl" in loss.positional or "delta" in loss.positional)
        call("preference_loss", loss, per_example[1], policy, batch, *beside)
    elif kind == "steps":
        count = spec(recipe.reward_loss).labels
        shape = (*token, count)[: 2 + (count > 1)]
        scores = jax.ShapeDtypeStruct(shape, batch.mask.dtype)
        call("reward_loss", recipe.reward_loss, (token,), scores, batch)
    elif kind == "trajectories" and dataflow is not None:
        defaults = {name: p.default for name, p in dataflow.signature.parameters.items()}
        losses = vars(dataflow.function).get("losses", ())
        for function, reads in zip(losses, (policy, batch.mask), strict=False):
            known = inspect.signature(function).parameters
            options = {k: v for k, v in {**defaults, **dataflow.options}.items() if k in known}
            options = {k: v for k, v in options.items() if v != "auto"}
            jax.eval_shape(functools.partial(function, **options), reads, batch)
