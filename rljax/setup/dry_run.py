"""The dry run: the dataflow of a phase traced on shapes alone, before anything is sampled
or compiled.

It finds options out of range, components that do not take or return what their stage does, batch
fields that no stage fills, and fields of the config that nothing reads. The planner compiles the
same program with the same arguments.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp

from rljax.batch import Batch, UnfilledFields
from rljax.components import Component, resolve
from rljax.config import NAMESPACES, AlgorithmConfig
from rljax.config.schema import FIELDS as SETTINGS
from rljax.config.schema import STAGES
from rljax.contracts import spec
from rljax.data.images.encode import ImageLayout
from rljax.data.kinds import KINDS
from rljax.dataflows.algorithm import FIELDS, Algorithm
from rljax.errors import InputError, location_in, location_of, mending
from rljax.mesh import replicated, row_sharding, row_shards
from rljax.metric import MetricAt
from rljax.models.scan import routes_shape
from rljax.roles import Role, SelfTeacher
from rljax.roles.program import checking_returned
from rljax.setup.role_table import abstract_roles
from rljax.setup.setup import Phase, Setup, fields_by_settings, sampled_prompts
from rljax.tracking.metric_names import check_metric_names

# Packages whose metrics a formula of the user's may return in their place, and a dataflow.
_FORMULAS = ("rljax.losses.", "rljax.correction.")
_LEARNING = (
    *_FORMULAS,
    *("rljax.dataflows.", "rljax.learn.", "rljax.models.", "rljax.roles.", "rljax.shaping."),
)


def batch_fields(setup: Setup, phase: Phase) -> set[str]:
    """Returns the names of the fields of a phase's batches filled before its dataflow runs."""
    names = {"tokens", "segment_ids", "positions", "mask", *KINDS[phase.data].fields}
    config, is_main = setup.config, phase.name == setup.main.name  # a copy of the phase, too
    if phase.samples:
        names |= set(spec(setup.rollout).fills or ())
        if config.sampler.router_replay and sampled_prompts(config):
            names |= {"routes"}
        if config.rollouts.replay:  # a mixture lacks fields that stored rollouts lack
            names -= {"entropy"}
        if setup.needs_costs:
            names |= {"costs"}
        if config.teachers and is_main:
            names |= {"teacher"}
        names |= fields_by_settings(config)
    elif is_main:
        items = [setup.data.first["item"]] if setup.data.first else []
        for item in items if phase.data == "trajectories" else ():
            names |= {"process_rewards"} if item.process_scores is not None else set()
            names |= {"sampler_logprobs"} if item.logprobs is not None else set()
        if config.offline.reference_logprobs:
            names.add("ref_logprobs")
    if images_of(setup, phase) is not None:
        names |= {"pixels", "patch_coords", "rope_positions"}
    if is_main and any("reference" in group.roles for group in setup.groups):
        names.add("ref_logprobs")
    return names


def images_of(setup: Setup, phase: Phase) -> ImageLayout | None:
    """Returns the layout of the images of a phase's batches, or None if they have none."""
    return setup.data.example_images if phase.name == "sft" else setup.data.images


def abstract_batch(setup: Setup, phase: Phase) -> Batch:
    """Returns a batch of the phase as jax.ShapeDtypeStructs, with its layout on the mesh."""
    config, mesh, algorithm = setup.config, setup.model.mesh, phase.algorithm
    names = batch_fields(setup, phase)
    rows, columns = algorithm.steps.rows, setup.row_tokens
    if phase.name == "sft":
        columns = setup.data.example_tokens
    elif phase.samples:
        rows = config.batch.prompts_per_step * config.batch.samples_per_prompt
    elif phase.data == "unpaired":
        rows *= setup.rows_per_example
    # The number of parts of the reward is known when it runs: here it is the number of weights.
    readers = parts_readers(phase)
    weights = [c.options["weights"] for c in readers if c.options.get("weights")]
    if readers:
        names.add("reward_parts")
    sizes = {"B": rows, "S": columns, "K": len(weights[0]) if weights else 2}
    sizes["M"] = spec(setup.rollout).targets if phase.samples else 0
    dtypes = {field.name: field.metadata["dtype"] for field in dataclasses.fields(Batch)}
    if "routes" in names:
        sizes["L"], sizes["J"], dtypes["routes"] = routes_shape(setup.model.config)
    if (images := images_of(setup, phase)) is not None:
        sizes |= images.fields
    layout = row_sharding(mesh) if rows % row_shards(mesh) == 0 else replicated(mesh)
    fields = {}
    for field in (declared for declared in dataclasses.fields(Batch) if declared.name in names):
        shape = [sizes[axis] for axis in field.metadata["axes"]]
        fields[field.name] = jax.ShapeDtypeStruct(shape, dtypes[field.name], sharding=layout)
    return Batch(**fields)


def parts_readers(phase: Phase) -> list[Component]:
    """Returns the components of a phase that read the parts of a reward."""
    values = [phase.dataflow, *(vars(phase.algorithm)[name] for name in sorted(FIELDS))]
    items = [item for value in values for item in (value if isinstance(value, tuple) else (value,))]
    stages = [item for item in items if isinstance(item, Component)]
    return [stage for stage in stages if "reward_parts" in spec(stage).reads]


def abstract_key() -> jax.ShapeDtypeStruct:
    """Returns the shape of a scalar random key, on no device yet, as a step's key is."""
    return jax.eval_shape(lambda: jax.random.key(0))


def roles_read(phase: Phase, roles: dict[str, Role]) -> dict[str, Role]:
    """Returns the roles that the phase's dataflow names, as its program gets them."""
    read_roles = {name: role for name, role in roles.items() if name in phase.dataflow.parameters}
    return {name: role.in_program() for name, role in read_roles.items()}


def dry_run(setup: Setup, phase: Phase, roles: dict[str, Role] | None = None):
    """Traces the dataflow of a phase on shapes alone; returns (shapes of its metrics, names of the
    fields of Algorithm that it read). Raises InputError for anything that the module names."""
    roles = roles_read(phase, abstract_roles(setup, phase) if roles is None else roles)
    leaves, tree = jax.tree.flatten((abstract_batch(setup, phase), abstract_key(), roles))
    return _traced(phase.dataflow, phase.algorithm, tuple(leaves), tree)


@functools.lru_cache(maxsize=64)
def _traced(dataflow: Component, algorithm: Algorithm, leaves: tuple, tree):
    batch, key, roles = jax.tree.unflatten(tree, leaves)
    function, noting = dataflow.function, _Noting(algorithm, tuple(roles))
    check = functools.partial(_check_page, dataflow)

    def page(batch, key, roles):
        returned = function(batch, key, noting, **roles, **dataflow.options)
        check(returned, roles)
        return returned

    try:
        if not hasattr(function, "arguments"):  # no rljax.roles.program
            _, metrics = jax.eval_shape(page, batch, key, roles)
        else:
            keywords = {**roles, **dataflow.options}
            arguments, static = function.arguments(batch, key, noting, **keywords)
            with checking_returned(check):
                _, metrics = function.run.trace(*arguments, **static).out_info
    except InputError:
        raise
    except Exception as error:  # an error of the user's code, or of an option's value
        raise _fails(f"dataflow={dataflow.text!r} fails on shapes", error, dataflow) from error
    fields_read = frozenset(noting.fields_read)
    noting.become_plain()
    return metrics, fields_read


def _fails(problem: str, error: Exception, component: Component, args: tuple = ()) -> InputError:
    """Returns the InputError for an exception of a component that was called with `args`, in one
    line, with its location in the user's file."""
    summary = next(iter(str(error).splitlines()), "")
    location = location_in(error, [component.function])
    signature = f"{component.short_name}{component.signature}"
    fix = mending(error) if location else f"correct its options: its signature is {signature}"
    if "NoneType" in summary and (names := _unfilled(location, args)):
        fix = (
            f"no stage has filled batch.{names[0]}: @contract(reads={tuple(names)!r}) on it lets a "
            "run fill it, or say what would"
        )
    return InputError(problem, rule=f"{type(error).__name__}: {summary}{location}", fix=fix)


def _unfilled(line: str, args: tuple) -> list[str]:
    """Returns the names of the fields that a line of code reads of a batch among `args`, and that
    nothing has filled."""
    empty = {name for x in args if isinstance(x, Batch) for name, v in vars(x).items() if v is None}
    return [name for name in re.findall(r"\.(\w+)", line) if name in empty]


def _check_page(dataflow: Component, returned: object, roles: dict[str, Role]) -> None:
    """Raises InputError unless a dataflow returned new roles by name, None for one that it was not
    given, and metrics that are numbers."""
    problem = f"dataflow={dataflow.text!r} returns the wrong things"
    location = location_of(dataflow.function)
    pair = isinstance(returned, tuple) and len(returned) == 2
    if not pair or not all(isinstance(part, dict) for part in returned):
        rule = f"(new roles by name, metrics by name){location}"
        fix = 'return ({"actor": new_actor}, {"loss": ...}) from the dataflow'
        raise InputError(problem, value=_kind(returned), rule=rule, fix=fix)
    new_roles, metrics = returned
    check_metric_names(f"dataflow={dataflow.text!r}", metrics, dataflow.function, like=_LEARNING)
    for name, role in new_roles.items():
        if role is not None and type(role) is not type(roles.get(name)):
            rule = f"the roles that it was given, by name: {', '.join(sorted(roles))}{location}"
            raise InputError(
                f"{problem}: role {name!r}",
                value=_kind(role),
                rule=rule,
                fix=f"return what {name!r} makes of itself, such as the first value of "
                f"{name}.update(...)",
            )
    for name, value in metrics.items():
        if not _is_array(value) or jnp.shape(value) != ():
            rule = f"a metric is one number{location}"
            fix = "reduce it, such as by jnp.mean(x), and call lists by several names"
            raise InputError(f"{problem}: metric {name!r}", value=_kind(value), rule=rule, fix=fix)


def _is_array(value: object) -> bool:
    return isinstance(value, int | float) or hasattr(value, "dtype") and hasattr(value, "shape")


def _is_part(name: str, value: object) -> bool:
    """Returns whether a value is what Stage.returns calls by this name."""
    if name == "metrics":
        return isinstance(value, dict) and all(map(_is_array, _metric_arrays(value).values()))
    return isinstance(value, Batch) if name == "batch" else _is_array(value)


def _metric_arrays(metrics: dict) -> dict:
    """Returns the arrays of metrics by name; both of a MetricAt."""
    arrays = {}
    for name, value in metrics.items():
        at_tokens = isinstance(value, MetricAt)
        arrays |= (
            {name: value.value, f"{name} (counted)": value.counted} if at_tokens else {name: value}
        )
    return arrays


def _kind(value: object) -> str:
    """The type of what a component returned, down to the shapes of arrays."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_kind, value))})"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}{list(value.shape)}"
    return type(value).__name__


def _check_process_reward(text: str) -> None:
    """Checks the dense reward of reward.process_model on shapes: it returns rewards [B, S]."""
    numbers, ids = (jax.ShapeDtypeStruct((2, 3), d) for d in (jnp.float32, jnp.int32))
    row = jax.ShapeDtypeStruct((2,), jnp.float32)
    batch = Batch(
        ids, ids, ids, numbers, rewards=numbers, scores=row, process_rewards=numbers, step_ids=ids
    )
    rewards = jax.eval_shape(resolve(text, NAMESPACES["process_reward"]), batch)
    if rewards.shape != numbers.shape:
        problem = f"reward.process_reward={text!r} returns the wrong shape"
        fix = "return one number for each token, of the shape of batch.rewards"
        raise InputError(problem, value=rewards.shape, rule="rewards [B, S]", fix=fix)


def check_fields_read(setup: Setup) -> set[str]:
    """Dry runs every phase; returns the fields of config.algorithm that neither the dataflow nor
    its rollout reads, whatever their values. Raises InputError if a phase fails, and for all such
    fields that are set."""
    fields_read: set[str] = set()
    if setup.config.reward.process_model:
        _check_process_reward(setup.config.reward.process_reward)
    _check_placed(setup)
    for phase in setup.phases:
        _, fields = dry_run(setup, phase)
        fields_read |= fields if phase is setup.main else set()
    fields_read |= {"collect"} if setup.main.samples else set()
    roles = abstract_roles(setup)
    if "kl_controller" in roles:
        fields_read |= {"kl_target", "kl_horizon"}
    if isinstance(roles.get("teacher"), SelfTeacher):
        fields_read |= {"teacher_rate"}
    if "entropy_controller" in roles:
        names = ("entropy_target", "entropy_coef_step", "entropy_coef_max", "entropy_schedule")
        fields_read |= {*names}
    settings, default = vars(setup.config.algorithm), vars(AlgorithmConfig())
    unread_defaults = {name: value for name, value in default.items() if name not in fields_read}
    unread = [
        name for name in unread_defaults if not _same(name, settings[name], unread_defaults[name])
    ]
    if unread:
        raise InputError(
            ", ".join(f"algorithm.{name}={settings[name]!r}" for name in unread),
            rule=f"dataflow={setup.config.dataflow!r} does not read "
            + ("it" if len(unread) == 1 else "them"),
            fix=", ".join(_fix_of_unread(name, settings[name], default[name]) for name in unread),
        )
    return {f"algorithm.{name}" for name in default if name not in fields_read}


# A formula of Algorithm that decides what is learned -> a dataflow that reads it.
_READERS = {
    "policy_loss": "grpo",
    "advantage": "grpo",
    "value_loss": "ppo",
    "reward_loss": "reward_model",
    "preference_loss": "preference",
}


def _fix_of_unread(name: str, value, default) -> str:
    """Returns what mends a field that the dataflow does not read: the dataflow that does, where the
    field says what somebody wants to learn by, else the default."""
    reader = _READERS.get(name)
    if name == "preference_loss" and (loss := resolve(value, NAMESPACES[name])):
        reader = "bco" if "delta" in loss.positional else "kto"  # it is handed a running mean
        reader = "preference" if spec(loss).rows > 1 else reader
    reset = f"algorithm.{name}={default!r}"
    return f"dataflow={reader!r}, which reads algorithm.{name}, or {reset}" if reader else reset


def _same(field: str, value, default) -> bool:
    """Returns whether two values of a field say the same: "dpo" and "dpo(beta=0.1)" may."""
    home = NAMESPACES.get(field)
    if home is None or value == default or not value or not default:
        return value == default
    meanings = []
    for component in (resolve(text, home) for text in (value, default)):
        parameters = component.signature.parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        meanings.append((component.function, {**defaults, **component.options}))
    return meanings[0] == meanings[1]


def _check_placed(setup: Setup) -> None:
    """Raises InputError where a group waits for a reference that the run does not make."""
    for group in setup.groups:
        if "reference" in group.roles and "reference" not in abstract_roles(setup):
            problem = f"{group.name!r} of config.placement: this run has no reference"
            rule = f"dataflow={setup.config.dataflow!r} reads none: no KL, no such loss"
            raise InputError(problem, rule=rule, fix="leave it out of config.placement")


class _Noting(Algorithm):
    """An Algorithm that notes which of its fields are read, and whose components say what is wrong
    with them; so do its copies."""

    def __init__(
        self, algorithm: Algorithm, roles: tuple[str, ...], fields_read: set[str] | None = None
    ):
        fields_read = set() if fields_read is None else fields_read
        vars(self).update(vars(algorithm), plain=algorithm, roles=roles, fields_read=fields_read)

    def become_plain(self) -> None:
        """Turns this object into the Algorithm itself. jit tells static arguments apart by type and
        value: the first step of the run then finds the program that was traced with this one."""
        object.__setattr__(self, "__class__", Algorithm)

    def replace(self, **fields) -> "_Noting":
        return _Noting(self.plain.replace(**fields), self.roles, self.fields_read)

    def __getattribute__(self, name: str):
        value = object.__getattribute__(self, name)
        if name not in FIELDS:
            return value
        object.__getattribute__(self, "fields_read").add(name)
        if isinstance(value, tuple):
            return tuple(_Checked(component, name, self.roles) for component in value)
        return _Checked(value, name, self.roles) if isinstance(value, Component) else value

    def __eq__(self, other):
        return self is other

    def __hash__(self):
        return hash(self.plain)


class _Checked(Component):
    """The component of a field of config.algorithm, whose failures name it, and whose result must
    have the form and the shape of its stage."""

    def __init__(self, component: Component, field: str, roles: tuple[str, ...]):
        stage = STAGES[SETTINGS[f"algorithm.{field}"].component]
        vars(self).update(vars(component), field=field, stage=stage, roles=roles)

    def __call__(self, *args, **kwargs):
        label = f"algorithm.{self.field}={self.text!r}"
        try:
            result = super().__call__(*args, **kwargs)
        except UnfilledFields as error:
            raise self._unfilled(args) or error from None
        except InputError:
            raise
        except Exception as error:
            failure = _fails(f"{label} fails when it is called", error, self, args)
            raise failure from error
        array = self._first_of(result, label)
        metrics = result[-1] if isinstance(result, tuple) else None
        if isinstance(metrics, dict):
            options = dict(like=_FORMULAS, roles=self.roles)
            check_metric_names(label, metrics, self.function, **options)
        if not self.stage.axes:  # a correction returns a batch
            return result
        batch = next(x for x in args if isinstance(x, Batch))
        rows, columns = batch.tokens.shape
        shapes = {"T": (rows, columns), "R": (rows,), "E": (rows // spec(self).rows,)}
        allowed = [shapes[axis] for axis in self.stage.axes]
        parts = {"returns": array}
        if isinstance(metrics, dict):
            arrays = _metric_arrays(metrics)
            parts |= {f"returns a metric {name!r}, of": v for name, v in arrays.items()}
        for part, value in parts.items():
            if jnp.shape(value) not in allowed:
                raise InputError(
                    f"{label} {part} the wrong shape",
                    value=jnp.shape(value),
                    rule=f"one of {allowed} for a batch of [{rows}, {columns}], which learning "
                    f"averages: no mean or sum of your own{location_of(self.function)}",
                    fix="return the array as it is, one value for each row or token, and take the "
                    "mean or sum out",
                )
        return result

    def _unfilled(self, args: tuple) -> InputError | None:
        """Returns the error for fields of the batch that the component declares to read and that
        nothing fills; None if it declares none of them."""
        batch = next(x for x in args if isinstance(x, Batch))
        missing = [name for name in spec(self).reads if vars(batch)[name] is None]
        if not missing:
            return None
        default = vars(AlgorithmConfig())[self.field]
        names, field = ", ".join(missing), f"algorithm.{self.field}"
        fix = f"a dataflow whose batches have {'it' if len(missing) == 1 else 'them'}"
        is_text = isinstance(default, str) and default
        if is_text and not {*missing} & {*spec(resolve(default, self.stage.module)).reads}:
            fix = f"{field}={default!r}, or {fix}"
        rule = f"it needs batch field {names}, which nothing in this run fills"
        return InputError(f"{field}={self.text!r}", rule=rule, fix=fix)

    def _first_of(self, result: object, label: str):
        """Returns the array of a stage from the values that its function returned. Raises
        InputError if there is none."""
        forms = self.stage.returns
        parts = result if isinstance(result, tuple) else (result,)
        for form in forms:
            names = form.split(", ")
            if len(names) == len(parts) and all(map(_is_part, names, parts)):
                break
        else:
            rule = " or ".join(f"({form})" if ", " in form else form for form in forms)
            rule += ": metrics are a dict of arrays" if "metrics" in forms[0] else ""
            raise InputError(
                f"{label} returns the wrong things",
                value=_kind(result),
                rule=f"{rule}{location_of(self.function)}",
                fix="algorithm.correction='rollout_correction()', which measures as well"
                if self.field == "correction"
                else f"return {forms[0]}",
            )
        if names[0] == "loss" and not jnp.issubdtype(jnp.result_type(parts[0]), jnp.floating):
            raise InputError(
                f"{label} returns {_kind(parts[0])}",
                rule="a loss has a gradient: it is an array of floating-point numbers"
                f"{location_of(self.function)}",
                fix="return floats, such as x.astype(jnp.float32)",
            )
        return parts[0]
