"""rljax evaluate --search: every kind of value folder, on all devices as on one."""

import json

import jax
import numpy as np
import pytest

import rljax
from rljax.checkpoint.checkpoint import Checkpoints
from rljax.components import resolve
from rljax.config import NAMESPACES, Config
from rljax.config.policy_options import EvaluateOptions
from rljax.data.online.prompts import Prompts
from rljax.data.rows.sources import load_prompts
from rljax.errors import InputError
from rljax.evaluation.saved import evaluate_saved
from rljax.mesh import make_mesh
from rljax.models.huggingface import save_params
from rljax.models.model import Model
from rljax.policies import load_policy
from rljax.sampler import Decoding, generate
from rljax.search import Search, Value
from rljax.setup.same_ids import line_ids_of

pytestmark = pytest.mark.slow
TASK = "program_synthesis(lines=2, prompts=40, test=6, worked_examples=4, with_input=False)"
RESPONSE_TOKENS = 6


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A step of PPO, whose checkpoint has a critic."""
    folder = tmp_path_factory.mktemp("searched_evaluation") / "run"
    config = Config(
        model="decoder(layers=1, embed=32, mlp=64, heads=4, kv_heads=2, head_dim=8, init_std=0.5)",
        dataflow="ppo",
        steps=1,
        trackers=(),
        run_dir=str(folder),
    )
    config.model_settings.remat = "none"
    config.data.train = TASK
    config.data.max_prompt_tokens, config.sampler.max_response_tokens = 24, RESPONSE_TOKENS
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 4, 2
    config.batch.sequences_per_optimizer_step = 8
    config.reward.function, config.reward.workers = "program_tests()", 1
    config.algorithm.advantage = "gae()"
    config.critic_optimizer.lr = 0.1  # away from zeros
    rljax.train(config, devices=jax.devices()[:1])
    return folder


def scalar(saved) -> tuple[Model, dict]:
    """A scalar head of random weights on another body, on the mesh of one device."""
    model = Model(saved.model.config, make_mesh(devices=jax.devices()[:1]), "scalar")
    params = model.init(jax.random.key(9))
    params["head"] = jax.random.normal(jax.random.key(4), params["head"].shape)
    return model, params


def value_of(kind: str, run, folder, saved) -> tuple[str, Value]:
    """(what --search_model says, the same by hand on one device)."""
    model, params = scalar(saved)
    if kind == "critic":
        found = Checkpoints(f"{run}/checkpoints")
        like = {"critic": {"params": model.abstract()}}
        read = found.read_arrays(1, like, some=True)["critic"]["params"]
        assert np.abs(read["head"]).max() > 0
        return str(run), Value(model, read, "critic")
    save_params(folder, model, params, eos_ids=saved.tokenizer.eos_ids, pad_id=0)
    saved.tokenizer.save(folder)
    lines = line_ids_of(saved.tokenizer, model.config.vocab_size) if kind == "process" else ()
    return str(folder), Value(model, params, kind, lines)


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("critic", "mcts(simulations=6, width=3)"),
        ("outcome", "mcts(simulations=6, width=3)"),
        ("process", "mcts(simulations=12, width=4)"),
        ("outcome", "beam(beams=3, width=3)"),
    ],
)
def test_a_value_model_guides_on_eight_devices_as_on_one(run, tmp_path, kind, method):
    saved = load_policy(run)
    assert saved.model.mesh.size == 8
    folder, value = value_of(kind, run, tmp_path / "value", saved)
    answers = tmp_path / "answers.jsonl"
    result = evaluate_saved(
        EvaluateOptions(
            str(run),
            samples=0,
            prompts=6,
            search=method,
            search_model=folder,
            search_reads=kind,
            answers=str(answers),
        )
    )
    assert result["search"] == method and result["metrics"]["greedy_accuracy"]["n"] == 6
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    records, _ = saved.encode(load_prompts(TASK, "test"))
    assert [row["prompt"] for row in rows] == [record.prompt_text for record in records]
    asked, mesh = Prompts.from_records(records, length=24), value.model.mesh
    params = jax.device_put(jax.device_get(saved.params), mesh.devices.flat[0])
    search = Search(resolve(method, NAMESPACES["search"]), value)
    one = generate(
        Model(saved.model.config, mesh),
        params,
        asked.tokens,
        asked.lengths,
        jax.random.key(0),
        saved.sampling().greedy(),
        search=search,
        decoding=Decoding(),
    )
    tokens, mask = np.asarray(one.tokens), np.asarray(one.mask) > 0
    texts = [saved.tokenizer.decode(tokens[i][mask[i]].tolist()) for i in range(len(rows))]
    assert [row["response"] for row in rows] == texts
    plain = evaluate_saved(EvaluateOptions(str(run), samples=0, prompts=6, answers=str(answers)))
    assert plain["search"] == ""
    before = [json.loads(line)["response"] for line in answers.read_text().splitlines()]
    assert before != texts  # the value model chose otherwise than the policy alone


def test_what_is_read_must_be_what_the_folder_is(run, tmp_path):
    saved = load_policy(run)
    options = dict(search="mcts()", samples=0, prompts=2)
    with pytest.raises(InputError, match="search_reads.*critic for a run folder"):
        evaluate_saved(EvaluateOptions(str(run), search_model=str(run), **options))
    with pytest.raises(InputError, match="search_model.*a folder"):
        evaluate_saved(EvaluateOptions(str(run), search_model=str(tmp_path / "no"), **options))
    folder, _ = value_of("outcome", run, tmp_path / "value", saved)
    with pytest.raises(InputError, match="search_reads"):
        evaluate_saved(
            EvaluateOptions(str(run), search_model=folder, search_reads="critic", **options)
        )
    # Without a model to read, mcts compares nothing.
    with pytest.raises(InputError, match="mcts.*no value model"):
        evaluate_saved(EvaluateOptions(str(run), **options))
