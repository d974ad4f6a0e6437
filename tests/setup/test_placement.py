"""Roles on devices of their own: the numbers of one mesh, what is refused, what the plan says."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_offline import offline_config
from tiny_run import tiny_config
from tiny_scorer import write_judge, write_scorer

from rljax.arrays import fetch, place
from rljax.batch import Batch, batch_from_rows
from rljax.config import Config
from rljax.contracts import contract
from rljax.errors import InputError
from rljax.mesh import make_mesh
from rljax.plan.compiled import make_plan
from rljax.plan.groups import check_groups_fit
from rljax.plan.table import plan_json, plan_text
from rljax.setup import abstract_roles, abstract_scorers, build, make_roles
from rljax.setup.dry_run import abstract_batch, check_fields_read
from rljax.setup.placement import divided
from rljax.setup.weights import initial_params
from rljax.training import train
from rljax.validation import validate

SHORT = dict(
    sft__steps=0, steps=2, evaluate__every_steps=0, checkpoint__every_steps=0, export=False
)
KL = dict(algorithm__kl_in_loss=0.05)


def short(folder, **fields):
    return tiny_config(folder, **{**SHORT, **fields})


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    return write_scorer(tmp_path_factory.mktemp("scorer"))


def metrics_of(folder, devices: int, **fields) -> list[dict]:
    train(short(folder, **fields), devices=jax.devices()[:devices])
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


NOT_COMPARED = (
    "time/",
    "placement/",
    "compiles",
    "tokens_per_s",
    "generate_tokens_per_s",
    "learning_programs",
)


def assert_same_numbers(rows: list[dict], wanted: list[dict], tolerance=2e-4) -> None:
    """Every metric of every step, but times, to rounding."""
    assert len(rows) == len(wanted) == 2
    for row, want in zip(rows, wanted, strict=True):
        kept = [{k for k in one if not k.startswith(NOT_COMPARED)} for one in (row, want)]
        assert kept[0] == kept[1]
        for name in kept[0] - {"phase"}:
            np.testing.assert_allclose(
                row[name], want[name], rtol=tolerance, atol=tolerance, err_msg=name
            )


# What is scored by whom, then the placements of it.
ALL = dict(
    algorithm__advantage="reinforce_plus_plus()",
    reward__function="mixture(rewards=('sequence_match(partial=0.5)', 'reward_model()'))",
)


@pytest.fixture(scope="module")
def together(scorer, tmp_path_factory):
    """The run with all roles on one mesh of two devices."""
    return metrics_of(tmp_path_factory.mktemp("together"), 2, **roles_of(scorer))


def roles_of(scorer) -> dict:
    return {**ALL, **KL, "reward__model": scorer, "reward__process_model": scorer}


@pytest.mark.hosts
def test_split_reference_and_scorers_that_wait_on_the_host(scorer, together, tmp_path):
    """The reference has two devices, both scorers share two others one after the other, and their
    weights are there while they are used alone."""
    groups = (
        "reference=group(devices=2)",
        "reward_model+process_model=group(devices=2, data=2, fsdp=1)",
    )
    fields = dict(placement=groups, memory__scorers_on_host=True)
    rows = metrics_of(tmp_path, 6, **roles_of(scorer), **fields)
    assert_same_numbers(rows, together)
    first = rows[0]
    columns, numbers = 16 * 15, 4  # rows x tokens, bytes
    for role, back in (("reference", 1), ("reward_model", 0), ("process_model", 1)):
        moved = first[f"placement/{role}/moved_bytes"]
        assert 0 < moved <= (4 + back) * columns * numbers and moved % (4 + back) == 0
        assert first[f"placement/{role}/moved_s"] > 0
    setup = build(short(tmp_path, **roles_of(scorer)), jax.devices()[:1])
    arrays = jax.tree.leaves(abstract_scorers(setup)["reward model weights"])
    weights = sum(x.size * x.dtype.itemsize for x in arrays)
    assert first["placement/reward_model/weights_bytes"] == weights
    assert first["placement/process_model/weights_bytes"] == weights
    assert "placement/reference/weights_bytes" not in first
    assert not any(name.startswith("placement/") for row in together for name in row)


FURTHER = {
    "reference apart": dict(placement=("reference=group(devices=1)",)),
    "reference and scorers on one group": dict(
        placement=("reference+reward_model+process_model=group(devices=2, data=-1, fsdp=1)",),
        memory__reference_on_host=True,
    ),
    "each apart": dict(
        placement=(
            "reward_model=group(devices=2, data=2, fsdp=1)",
            "reference=group(devices=2)",
            "process_model=group(devices=2)",
        )
    ),
    "on one mesh, waiting on the host": dict(memory__scorers_on_host=True),
}


@pytest.mark.hosts
@pytest.mark.parametrize("name", FURTHER)
def test_further_placements_have_the_numbers_of_one_mesh(name, scorer, together, tmp_path):
    fields = FURTHER[name]
    devices = 2 + sum(int(text.partition("devices=")[2][0]) for text in fields.get("placement", ()))
    rows = metrics_of(tmp_path, devices, **roles_of(scorer), **fields)
    assert_same_numbers(rows, together)
    moved = {name.split("/")[1] for name in rows[0] if name.startswith("placement/")}
    every = {"reference", "reward_model", "process_model"}
    assert moved == {
        "reference apart": {"reference"},
        "on one mesh, waiting on the host": every - {"reference"},
    }.get(name, every)


@pytest.mark.hosts
@pytest.mark.parametrize("on_host", [False, True])
def test_a_judge_apart_says_what_one_on_the_mesh_says(on_host, tmp_path):
    """Apart, and apart with weights that wait on the host; the verdicts are those of one mesh."""
    folder = write_judge(tmp_path / "judge")
    fields = dict(reward__function="judge(scale=2)", reward__judge_model=folder)
    fields["batch__tokens_per_microbatch"] = 2048
    want = metrics_of(tmp_path / "together", 2, **fields)
    group = dict(placement=("judge=group(devices=2)",), memory__scorers_on_host=on_host)
    rows = metrics_of(tmp_path / "apart", 4, **fields, **group)
    assert_same_numbers(rows, want)
    assert rows[0]["reward/std"] > 1e-4 and rows[0]["placement/judge/moved_bytes"] > 0
    assert ("placement/judge/weights_bytes" in rows[0]) == on_host


@pytest.mark.slow
def test_a_reference_apart_says_what_one_on_the_mesh_says(tmp_path):
    """Its log-probs, its arrays in a checkpoint, and that it follows the actor where a program says
    so."""
    config = short(tmp_path, **KL, placement=("reference=group(devices=2)",))
    setup = build(config, jax.devices()[:3])
    params = initial_params(config, setup.model)
    roles = make_roles(setup, setup.main, params)
    placed, batch = roles["reference"], abstract_batch(setup, setup.main)
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 12, size=batch.tokens.shape).astype(np.int32)
    rows = batch_from_rows(tokens, jnp.full(len(tokens), 12), jnp.ones(tokens.shape))
    batch = place(rows, setup.model.mesh)
    filled = placed.filled(batch)
    want = roles["actor"].logprobs(batch, setup.algorithm.steps)
    np.testing.assert_allclose(fetch(filled.ref_logprobs), fetch(want), atol=1e-5)
    assert filled.ref_logprobs.sharding.device_set == set(setup.model.mesh.devices.flat)
    assert placed.filled(filled) is filled  # what is there is not computed again

    group = set(jax.devices()[1:3])
    for leaf in jax.tree.leaves(placed.arrays()):
        assert leaf.sharding.device_set == group
    abstract = abstract_roles(setup)["reference"]
    for like, leaf in zip(*map(jax.tree.leaves, (abstract.arrays(), placed.arrays())), strict=True):
        assert (like.shape, like.dtype, like.sharding) == (leaf.shape, leaf.dtype, leaf.sharding)

    inside = placed.in_program()
    np.testing.assert_array_equal(inside.logprobs(filled), filled.ref_logprobs)
    with pytest.raises(InputError, match="needs batch field ref_logprobs"):
        inside.logprobs(batch)
    state = roles["actor"].state
    moved = dataclasses.replace(state, params=jax.tree.map(lambda x: x + 1, state.params))
    new = {"actor": dataclasses.replace(roles["actor"], state=moved)}
    stays = placed.after_program(inside.follow(new["actor"], jnp.array(False)), new)
    follows = placed.after_program(inside.follow(new["actor"], jnp.array(True)), new)
    assert stays is placed
    for old, leaf, like in zip(
        *map(jax.tree.leaves, (placed.params, follows.params, moved.params)), strict=True
    ):
        np.testing.assert_array_equal(leaf, fetch(like).astype(leaf.dtype))
        assert leaf.sharding == old.sharding and not np.array_equal(leaf, old)


@pytest.mark.hosts
@pytest.mark.parametrize("lora", [False, True])
def test_online_dpo_renews_a_reference_apart(lora, tmp_path):
    """The reference of iterated DPO becomes the policy every second optimizer step; a resumed run
    has it where it was."""
    fields = dict(
        dataflow="online_dpo(refresh_every=2)",
        algorithm__advantage="group_relative",
        algorithm__policy_loss="ppo_clip",
        steps=3,
        checkpoint__every_steps=1,
        actor_optimizer__warmup_steps=0,
        batch__sequences_per_optimizer_step=16,
    )
    fields |= dict(lora__rank=2, lora__base="float32") if lora else {}
    rows = [
        metrics_of(tmp_path / name, devices, **fields, **more)
        for name, devices, more in (
            ("together", 2, {}),
            ("apart", 4, dict(placement=("reference=group(devices=2)",))),
        )
    ]
    for row, want in zip(*rows, strict=True):
        for name in ("loss", "reward/mean", "ref_kl/k1", "grad_norm"):
            np.testing.assert_allclose(row[name], want[name], rtol=1e-3, atol=1e-5, err_msg=name)
    renewed = ["placement/reference/weights_bytes" in row for row in rows[1]]
    assert renewed == [False, True, False]


@pytest.mark.hosts
@pytest.mark.parametrize(
    "kind, dataflow, loss", [("pairs", "preference", "dpo"), ("unpaired", "kto", "kto")]
)
def test_rows_of_a_file_and_held_out_ones_with_a_reference_apart(kind, dataflow, loss, tmp_path):
    rows = []
    for name, devices, groups in (("one", 2, ()), ("two", 4, ("reference=group(devices=2)",))):
        config = offline_config(tmp_path, kind, dataflow, name, steps=2, placement=groups)
        config.algorithm.preference_loss, config.evaluate.every_steps = loss, 1
        train(config, devices=jax.devices()[:devices])
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        rows.append([json.loads(line) for line in lines])
    assert_same_numbers(rows[1], rows[0])
    assert "eval/loss" in rows[1][0] and "placement/reference/moved_bytes" in rows[1][0]


def long_rows(mesh) -> Batch:
    """Rows that keep a small model busy for a while."""
    tokens = np.random.default_rng(0).integers(1, 12, size=(64, 128)).astype(np.int32)
    rows = batch_from_rows(tokens, jnp.full(64, 128), jnp.ones(tokens.shape))
    return place(rows, mesh)


@pytest.mark.hosts
def test_a_group_computes_while_other_devices_do(tmp_path):
    """While the reference computes on its devices, programs of other devices begin and end; its
    step is not held up before it asks for the numbers."""
    model = "decoder(layers=6, embed=192, mlp=576, heads=6, kv_heads=6, head_dim=32)"
    fields = dict(model=model, batch__packing=False, **KL)
    config = short(tmp_path, **fields, placement=("reference=group(devices=1)",))
    setup = build(config, jax.devices()[:2])
    roles = make_roles(setup, setup.main, initial_params(config, setup.model))
    placed, batch = roles["reference"], long_rows(setup.model.mesh)
    steps = dataclasses.replace(placed.steps, rows=64, microbatch_rows=64)
    placed = dataclasses.replace(placed, steps=steps)
    double = jax.jit(lambda x: 2 * x)
    double(batch.mask).block_until_ready()
    placed.filled(batch)  # compiled
    begun = placed.start(batch)
    double(batch.mask).block_until_ready()  # on the actor's device, to its end
    assert not begun.is_ready()
    filled = placed.finish(batch, begun)
    assert begun.is_ready() and filled.ref_logprobs.shape == batch.tokens.shape


REFUSED = [
    (dict(placement=("reference",)), "a group of config.placement.*ROLE.ROLE=group"),
    (dict(placement=("refrence=group(devices=2)",)), "no such role.*did you mean 'reference'"),
    (dict(placement=("critic=group(devices=2)",)), "critic cannot be placed.*updates it"),
    (dict(placement=("teacher=group(devices=2)",)), "teacher cannot be placed.*inside the update"),
    (dict(placement=("actor=group(devices=2)",)), "actor cannot be placed.*config.mesh"),
    (
        dict(placement=("second=group(devices=2)",), roles=("second=frozen_policy()",)),
        "second cannot be placed",
    ),
    (dict(placement=("reference=group(devices=0)",)), "a group with no devices.*devices=1 or more"),
    (dict(placement=("reference=group(tensor=2)",)), "how many devices it has"),
    (dict(placement=("reference=group(devices=3, tensor=2)",)), "do not divide.*devices=4"),
    (dict(placement=("reference=group(devices=4, fsdp=1, tensor=2)",)), "must be 2.*devices=2"),
    (dict(placement=("reference=group(devices=4, data=-1)",)), "at most one size is -1"),
    (dict(placement=("reference=group(devices=4, tensor=0)",)), "each size is >= 1"),
    (dict(placement=("reference=group(devices=4, tensors=2)",)), "no option 'tensors'"),
    (dict(placement=("reference=mesh(data=2)",)), "rljax.setup.placement has no 'mesh'"),
    (dict(placement=("reference=parsed()",)), "got 'parsed'.*ROLE.ROLE=group"),
    (dict(placement=("reference=group(devices=8)",)), "take 8 devices, 8 devices are there.* 7 "),
    (
        dict(placement=("reference=group(devices=2)",), mesh__fsdp=8),
        "needs 8 devices, and 6 devices are there, beside 2 of config.placement",
    ),
    (dict(placement=("judge=group(devices=2)",)), "judge is the model of reward.judge_model"),
    (dict(placement=("reference=group(devices=1)",) * 2), "reference is in 2 places"),
    (
        dict(
            placement=("reference=group(devices=1)",),
            dataflow="xpo",
            algorithm__preference_loss="xpo",
        ),
        "samples from the reference",
    ),
    (dict(memory__scorers_on_host=True), "there is no reward.model"),
]


@pytest.mark.parametrize("fields, message", REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_what_cannot_be_placed_is_refused_with_what_can(fields, message, tmp_path):
    with pytest.raises(InputError, match=f"(?s){message}"):
        validate(short(tmp_path, **KL, **fields), 8)


def test_rows_that_do_not_divide_over_a_group_are_refused_with_what_does(tmp_path):
    config = short(tmp_path, **KL, placement=("reference=group(devices=3)",))
    setup = build(config, jax.devices()[:5])
    with pytest.raises(InputError, match="(?s)8 sequences.*over its 3 devices.*: 1, 2"):
        abstract_roles(setup)


def test_a_group_that_waits_for_no_reference_is_refused(tmp_path):
    setup = build(short(tmp_path, placement=("reference=group(devices=2)",)), jax.devices()[:4])
    with pytest.raises(InputError, match="this run has no reference.*leave it out"):
        check_fields_read(setup)


def test_groups_take_the_last_devices_in_their_order():
    config = Config(placement=("judge=group(devices=2, tensor=2)", "reference=group(devices=1)"))
    every = jax.devices()
    main, groups = divided(config, every)
    assert main == every[:5] and [group.name for group in groups] == ["judge", "reference"]
    assert [list(group.mesh.devices.flat) for group in groups] == [every[5:7], every[7:]]
    assert dict(groups[0].mesh.shape)["tensor"] == 2


@contract(places=True)
def replicas(free, *, devices: int, spare: str = "none"):
    """A group of one's own: every device has all weights."""
    return make_mesh(devices, 1, devices=free[:devices])


def test_a_group_of_ones_own_is_placed():
    config = Config(placement=("reference=test_placement.replicas(devices=2, spare='x')",))
    main, (group,) = divided(config, jax.devices())
    assert len(main) == 6 and dict(group.mesh.shape)["data"] == 2
    with pytest.raises(InputError, match="ROLE.ROLE=group"):
        divided(Config(placement=("reference=test_placement.short(devices=2)",)), jax.devices())


def test_the_plan_shows_the_memory_of_each_group(scorer, tmp_path):
    """Weights in a group are exact, those of another mesh are not counted, and what waits on the
    host is there one at a time."""
    groups = ("reference=group(devices=2)", "reward_model+process_model=group(devices=1)")
    config = short(tmp_path, **roles_of(scorer), placement=groups)
    devices = jax.devices()[:4]
    plan = make_plan(config, devices, None, "here", compile=False)
    alone = make_plan(short(tmp_path), devices[:1], None, "here", compile=False)
    assert plan.estimate.held == alone.estimate.held  # of the actor's device
    setup = build(config, devices)

    def size(tree):
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

    weights, reference = (
        size(abstract_scorers(setup)["reward model weights"]),
        size(abstract_roles(setup)["reference"].arrays()),
    )
    found = plan.estimate.groups
    assert list(found) == ["reference", "reward_model+process_model"]
    assert 0.5 <= found["reference"]["reference weights"] / reference < 0.51
    both = found["reward_model+process_model"]
    assert (both["reward model weights"], both["process model weights"]) == (weights, weights)
    assert "reward_model+process_model" in plan_text(plan)
    assert plan_json(plan)["estimate"]["groups"] == found
    config.memory.scorers_on_host = True
    waiting = make_plan(config, devices, None, "here", compile=False).estimate.groups
    assert waiting["reward_model+process_model"]["fetched weights"] == weights
    with pytest.raises(InputError, match="reward_model.process_model.*for weights.*of 2 times"):
        check_groups_fit({"reward_model+process_model": both}, 1.5 * weights)
