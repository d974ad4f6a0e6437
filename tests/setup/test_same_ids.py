"""A model that reads the ids of a run has its tokenizer: the same token at each id, not only as
many ids."""

import dataclasses
import json
import logging
import shutil

import jax
import numpy as np
import pytest
from tiny_tokenizer import LLAMA_LIKE, QWEN_LIKE, write_tokenizer

from rljax import setup as build
from rljax.config import Config
from rljax.data.text.tokenizer import CharTokenizer, load_tokenizer
from rljax.errors import InputError
from rljax.mesh import make_mesh
from rljax.models.builtin import decoder
from rljax.models.huggingface import save_params
from rljax.models.model import Model
from rljax.policies import load_policy, sample_all
from rljax.policies.search import searching
from rljax.setup.same_ids import differing_ids

ROWS = 320  # of the embeddings; the tokenizer has fewer ids


def edited(folder, edit):
    """The folder with another tokenizer.json."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))
    return folder


def swap(content):
    """Two tokens change places: as many ids, other words."""
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["e"] = vocab["e"], vocab["a"]


def add(content, text="<more>"):
    """A token of its own behind the others."""
    last = max(content["model"]["vocab"].values())
    token = dict(
        id=last + 1,
        content=text,
        single_word=False,
        lstrip=False,
        rstrip=False,
        normalized=False,
        special=True,
    )
    content["added_tokens"].append(token)
    content["model"]["vocab"][text] = last + 1


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{name: a model folder}: weights of a policy and of a scalar head, by tokenizer."""
    home, mesh = tmp_path_factory.mktemp("folders"), make_mesh(devices=jax.devices()[:1])
    out = {}
    for head in ("lm", "scalar"):
        config = decoder(ROWS, layers=1, embed=16, mlp=16, heads=1, kv_heads=1, head_dim=16)
        model = Model(config, mesh, head)
        for name, edit in (("same", None), ("swapped", swap), ("more", add)):
            folder = home / f"{name}-{head}"
            save_params(folder, model, model.init(jax.random.key(0)), eos_ids=(1,), pad_id=0)
            write_tokenizer(folder, LLAMA_LIKE if head == "scalar" else QWEN_LIKE)
            out[f"{name}-{head}"] = edited(folder, edit) if edit else folder
        bare = home / f"bare-{head}"
        save_params(bare, model, model.init(jax.random.key(0)), eos_ids=(1,), pad_id=0)
        out[f"bare-{head}"] = bare
    return out


@pytest.mark.smoke
def test_what_differs_is_named(tmp_path):
    own = load_tokenizer(write_tokenizer(tmp_path / "own"))
    changes = {"swap": swap, "add": add}
    others = {
        name: load_tokenizer(edited(write_tokenizer(tmp_path / name), edit))
        for name, edit in changes.items()
    }
    other_template = load_tokenizer(write_tokenizer(tmp_path / "t", LLAMA_LIKE))
    assert differing_ids(own, other_template) == "" == differing_ids(own, others["add"])
    assert "is 'a', there 'e'" in differing_ids(own, others["swap"])
    text = differing_ids(others["add"], own)
    assert text == f"id {own.vocab_size} is '<more>', there none"
    assert differing_ids(others["add"], own, may_lack=True) == ""
    assert "and 5 more" in differing_ids(CharTokenizer("abcdefgh"), CharTokenizer("hgfedcba"))
    assert "<|endoftext|>" in own.vocabulary().values()


def record(prompt: str) -> dict:
    return dict(prompt=prompt, index=0, extra_info={}, ground_truth="", data_source="")


def config_of(folders, tmp_path, **fields) -> Config:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": f"what is {i}?", "answer": "4"}) + "\n" for i in range(4))
    )
    config = Config(dataflow="grpo", steps=1, run_dir=str(tmp_path / "run"))
    config.model, config.data.train = f"{folders['same-lm']}/", str(rows)
    config.batch.prompts_per_step = config.batch.samples_per_prompt = 2
    config.batch.sequences_per_optimizer_step = 4
    config.sampler.max_response_tokens, config.data.max_prompt_tokens = 8, 32
    config.reward.function = "exact_match()"
    for name, value in fields.items():
        node, *path = config, *name.split("__")
        for part in path[:-1]:
            node = getattr(node, part)
        setattr(node, path[-1], value)
    return config


READERS = {
    "reward.model": ("scalar", lambda f: dict(reward__model=f, reward__function="")),
    "reward.process_model": (
        "scalar",
        lambda f: dict(reward__process_model=f, algorithm__advantage="group_process()"),
    ),
    "critic_model": ("scalar", lambda f: dict(dataflow="ppo", critic_model=f)),
    "teacher_model": ("lm", lambda f: dict(dataflow="on_policy_distil", teacher_model=f)),
    "role other": ("lm", lambda f: dict(roles=(f"other=trained_policy(folder='{f}')",))),
    "role frozen": ("lm", lambda f: dict(roles=(f"frozen=frozen_policy(folder='{f}')",))),
    "role guide": ("scalar", lambda f: dict(roles=(f"guide=value_model(folder='{f}')",))),
    "role costs": ("scalar", lambda f: dict(roles=(f"costs=trained_values(folder='{f}')",))),
}


def opened(config, field):
    """Makes what reads the ids of the run, as a run does before its first compile."""
    setup = build.build(config, jax.devices()[:1])
    if field.startswith("reward"):
        for reward in build.open_players(setup, None):
            reward.close()
        return
    name = field.removeprefix("role ").removesuffix("_model")
    table = build.role_table(config)
    params = setup.model.abstract()
    table[name].make(build.RoleInputs(name, setup, setup.main, params, abstract=True))


@pytest.mark.parametrize("field", READERS)
def test_another_tokenizer_of_the_same_size_is_refused(folders, field, tmp_path):
    head, fields = READERS[field]
    with pytest.raises(InputError, match=rf"{field}.* has another tokenizer.*'a', there 'e'"):
        opened(config_of(folders, tmp_path, **fields(f"{folders[f'swapped-{head}']}/")), field)
    for name in ("same", "more"):
        opened(config_of(folders, tmp_path, **fields(f"{folders[f'{name}-{head}']}/")), field)


def test_a_folder_without_a_tokenizer_is_taken_by_its_size_and_named(folders, tmp_path, caplog):
    _, fields = READERS["reward.model"]
    with caplog.at_level(logging.WARNING, "rljax"):
        opened(config_of(folders, tmp_path, **fields(f"{folders['bare-scalar']}/")), "reward.model")
    assert "reward.model" in caplog.text and "no tokenizer.json" in caplog.text


@pytest.mark.smoke
def test_the_run_s_tokenizer_is_that_of_the_model(folders, tmp_path):
    """One with more tokens is fine: rows of the embedding are there for them."""
    for name in ("same", "more"):
        config = config_of(folders, tmp_path, tokenizer=str(folders[f"{name}-scalar"]))
        setup = build.build(config, jax.devices()[:1])
        assert setup.model.config.ids == setup.tokenizer.vocab_size < ROWS
    config = config_of(folders, tmp_path, tokenizer=str(folders["swapped-lm"]))
    with pytest.raises(InputError, match="is not that of .*'a'.*tokenizer='' takes the model's"):
        build.build(config, jax.devices()[:1])


def test_a_search_s_value_model_has_it_too(folders):
    saved = load_policy(folders["same-lm"])
    prompts = saved.encode([record("what?")])[0]
    policy = saved.ready(prompts, max_response_tokens=4)
    searching(policy, saved, "beam()", str(folders["same-scalar"]), "outcome")
    with pytest.raises(InputError, match="--search_model.* has another tokenizer"):
        searching(policy, saved, "beam()", str(folders["swapped-scalar"]), "outcome")


@pytest.mark.slow
def test_a_policy_of_a_folder_writes_what_its_tokenizer_has(folders):
    saved = load_policy(folders["same-lm"])
    assert saved.model.config.known_ids == saved.tokenizer.vocab_size < ROWS
    prompts = saved.encode([record("what is 1?"), record("how many?")])[0]
    policy = saved.ready(prompts, temperature=3.0, max_response_tokens=32)
    drawn = sample_all(policy, prompts, 8, key=jax.random.key(0))
    assert max(max(sample.ids) for sample in drawn) < saved.tokenizer.vocab_size
    # Without it a random model would draw them: what is tested could fail.
    config = dataclasses.replace(saved.model.config, known_ids=0)
    free = dataclasses.replace(saved, model=dataclasses.replace(saved.model, config=config))
    policy = free.ready(prompts, temperature=3.0, max_response_tokens=32)
    drawn = sample_all(policy, prompts, 8, key=jax.random.key(0))
    assert max(max(sample.ids) for sample in drawn) >= saved.tokenizer.vocab_size
    assert np.isfinite([x for sample in drawn for x in sample.logprobs]).all()


@pytest.mark.parametrize(
    ("theirs", "differ"), [("<|reserved_special_token_3|>", ""), ("<|x|>", "id")]
)
def test_a_reserved_name_is_no_other_token(tmp_path, theirs, differ):
    """Llama 3.1 has renamed two tokens that Llama 3 reserved."""
    mine = write_tokenizer(tmp_path / "mine")
    shutil.copytree(mine, tmp_path / "other")
    edited(mine, lambda content: add(content, "<|finetune_right_pad_id|>"))
    other = edited(tmp_path / "other", lambda content: add(content, theirs))
    assert differing_ids(load_tokenizer(mine), load_tokenizer(other)).startswith(differ)
    assert bool(differing_ids(load_tokenizer(mine), load_tokenizer(other))) == bool(differ)
