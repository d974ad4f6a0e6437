"""The sizes of a batch that nobody has set, and that a run keeps."""

import json

import jax
import pytest

import rljax
from rljax.config import Config
from rljax.errors import InputError
from rljax.plan.chips import stand_ins
from rljax.setup.default_batch import FIELDS, with_default_batch
from rljax.validation import validate

TINY = "decoder(layers=2, embed=32, mlp=64, heads=2, kv_heads=2, head_dim=16)"
MIDDLE = "decoder(layers=4, embed=64, mlp=256, heads=2, kv_heads=2, head_dim=32)"
LARGE = "decoder(layers=24, embed=1024, mlp=4096, heads=16, kv_heads=16, head_dim=64)"


def config_of(model=TINY, **batch) -> Config:
    config = Config(model=model)
    config.data.train = "letter_count()"
    for name, value in batch.items():
        setattr(config.batch, name, value)
    return config


def chosen(config, unset=FIELDS, devices=None) -> tuple[int, int]:
    devices = jax.devices()[:1] if devices is None else devices
    made, said = with_default_batch(config, unset, devices, validate)
    assert bool(said) == bool(unset)
    batch = made.batch
    assert (batch.prompts_per_step * batch.samples_per_prompt) % (
        batch.sequences_per_optimizer_step
    ) == 0
    return batch.prompts_per_step, batch.sequences_per_optimizer_step


def test_a_larger_model_or_longer_responses_are_a_smaller_batch():
    short = config_of()
    short.sampler.max_response_tokens = short.data.max_prompt_tokens = 8
    prompts = [chosen(config)[0] for config in (short, config_of(MIDDLE), config_of(LARGE))]
    assert prompts[0] == 128 > prompts[1] > prompts[2] == 4
    assert chosen(config_of(LARGE)) == (4, 32)
    assert chosen(config_of()) == chosen(config_of())


def test_keys_and_values_that_fill_a_device_are_a_smaller_batch():
    """Of few weights, and rows of 64 times as many bytes of keys and values."""
    prompts = []
    for kv_heads in (1, 64):
        shape = f"embed=8, mlp=8, heads=64, kv_heads={kv_heads}, head_dim=128, max_tokens=40000"
        config = config_of(f"decoder(layers=2, {shape})")
        config.data.max_prompt_tokens = config.sampler.max_response_tokens = 16384
        config.batch.tokens_per_microbatch = 32768
        prompts.append(chosen(config, devices=stand_ins("v5e:2x2")[0])[0])
    assert prompts[0] > 4 * prompts[1], prompts


def test_what_is_set_stays_and_the_rest_divides():
    assert chosen(config_of(prompts_per_step=5, samples_per_prompt=3), FIELDS[1:]) == (5, 15)
    assert chosen(config_of(prompts_per_step=700), FIELDS[1:]) == (700, 224)
    assert chosen(config_of(LARGE, samples_per_prompt=6)) == (4, 24)
    assert chosen(config_of(LARGE, sequences_per_optimizer_step=16), FIELDS[:1]) == (4, 16)
    assert chosen(config_of(), ()) == (128, 256)  # a config says its own


def test_sequences_divide_over_the_devices():
    for devices in (3, 8):
        prompts, step = chosen(config_of(LARGE), devices=jax.devices()[:devices])
        assert prompts * 8 % devices == 0 and step % devices == 0


def test_chips_take_more_than_cores():
    devices, _ = stand_ins("v5p:4x4x4")
    assert chosen(config_of(LARGE), devices=devices) == (128, 256)


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda c: c.batch.set_unchecked("samples_per_prompt", "4"), "batch.samples_per_prompt"),
        (lambda c: setattr(c.batch, "prompts_per_step", 0), "batch.prompts_per_step"),
        (lambda c: c.sampler.set_unchecked("max_response_tokens", "many"), "max_response_tokens"),
        (lambda c: setattr(c, "model", ""), "model"),
        (lambda c: setattr(c.data, "train", "no_such_task()"), "no_such_task"),
    ],
)
def test_what_else_is_wrong_is_said_first(change, says):
    config = config_of()
    change(config)
    with pytest.raises(InputError, match=says):
        with_default_batch(config, FIELDS[1:], jax.devices()[:1], validate)


@pytest.mark.slow
def test_a_run_says_its_batch_and_keeps_it(tmp_path, capsys, monkeypatch):
    """A resume goes on with the sizes of the run, whatever the machine would choose by now."""
    monkeypatch.chdir(tmp_path)
    given = dict(
        model="decoder(layers=1, embed=16, mlp=16, heads=1, kv_heads=1, head_dim=16)",
        data="letter_count(letters=6, kinds=4, test=8)",
        reward="exact_match()",
        max_response_tokens=2,
        max_prompt_tokens=8,
        evaluate={"prompts": 4},
        steps=1,
        devices=jax.devices()[:1],
        samples_per_prompt=2,
    )
    kept = tmp_path / "kept"
    (tmp_path / "own.py").write_text("def never(response):\n    raise ValueError\n")
    with pytest.raises(InputError, match="tried on"):  # once the sizes are chosen and said
        rljax.train(**{**given, "reward": f"{tmp_path / 'own.py'}:never"})
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("batch: ")]
    assert "128 prompts x 2 samples = 256 sequences a step" in line and "CPU core" in line
    rljax.train(**given, run_dir=str(kept), prompts_per_step=4)
    batch = json.loads((kept / "config.json").read_text())["batch"]
    assert batch["prompts_per_step"] == 4 and batch["sequences_per_optimizer_step"] == 8
    run = rljax.train(**{**given, "steps": 2}, run_dir=str(kept))
    assert run.metrics["batch/completions"].tolist() == [8, 8]
    assert json.loads((kept / "config.json").read_text())["batch"]["prompts_per_step"] == 4
