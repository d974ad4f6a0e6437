"""Families of which no golden folder is stored, against transformers as it runs here: padding on
either side, gradients, greedy decoding with the cache, meshes, adapters.

Their logits, and the way back to disk, are rows of test_family_variants, too.
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lanes
from packed_rows import groups_of, plain_rows
from packed_rows import packed_rows as packed_in_rows
from published_configs import CONFIGS
from safetensors.numpy import load_file, save_file
from test_families import _norms_on_disk
from test_families import rows as stored_rows
from test_family_variants import DELTA, NEWER, ROWS, SHARED, SMALL, rows, write
from test_lora import adapted, moved
from test_packed_rows import value_and_gradient, weights_of
from test_sharding import loss_and_gradient, packed_rows

from rljax.arrays import place
from rljax.batch import Batch
from rljax.errors import InputError
from rljax.mesh import make_mesh
from rljax.models.families import from_hf_config, to_hf_config
from rljax.models.huggingface import load_config, load_params, save_params
from rljax.models.huggingface.peft import load_adapter, save_adapter
from rljax.models.model import Model
from rljax.models.trees import flattened
from rljax.sampler import Engine

NAMES = lanes(["olmo3"], [name for name in NEWER if name != "olmo3"])
# A step at a time they switch their ropes in the middle of a sequence: test_longrope_is_fixed.
GREEDY = [name for name in NEWER if "long" not in name and "dynamic" not in name]
PROMPT, NEW = 8, 6


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")

    @functools.cache
    def load(name):
        """(torch, their model, folder, ours, its weights)."""
        folder = tmp_path_factory.mktemp(name)
        theirs = write(torch, transformers, *NEWER[name][:2], folder)
        model = Model(load_config(folder, remat="none"), make_mesh(devices=jax.devices()[:1]))
        return torch, theirs, folder, model, load_params(folder, model)

    return load


def to_left(x, lengths):
    """Rows [B, S, ...] padded on the right, with their padding on the left."""
    moved = [np.roll(row, len(row) - n, axis=0) for row, n in zip(x, lengths, strict=True)]
    return np.stack(moved)


def left(batch: Batch) -> Batch:
    """The same rows, padded on the left."""
    lengths = np.asarray(batch.segment_ids).sum(axis=1)
    return jax.tree.map(lambda x: jnp.asarray(to_left(np.asarray(x), lengths)), batch)


def near(got, want, keep, scale=1e-4):
    keep = np.asarray(keep) > 0
    limit = scale * max(1.0, np.abs(want[keep]).max())
    np.testing.assert_allclose(np.asarray(got)[keep], want[keep], atol=limit)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_padding_on_the_left_and_gradients(written, name):
    torch, theirs, _, model, params = written(name)

    def tensor(x):
        return torch.tensor(np.asarray(x))

    batch = left(rows())
    how = dict(
        attention_mask=tensor(batch.segment_ids), position_ids=tensor(batch.positions).long()
    )
    with torch.no_grad():
        want = theirs(tensor(batch.tokens), **how).logits.numpy()
    if name == "llama4":  # theirs counts the padding as tokens of the chunks and the temperature
        with torch.no_grad():
            right = theirs(tensor(rows().tokens), attention_mask=tensor(rows().segment_ids))
        want = to_left(right.logits.numpy(), np.asarray(rows().segment_ids).sum(axis=1))
    near(jax.jit(model.logits)(params, batch), want, batch.mask)

    batch = rows()
    theirs.zero_grad()
    logits = theirs(tensor(batch.tokens), attention_mask=tensor(batch.segment_ids)).logits
    logp = torch.log_softmax(logits[:, :-1], -1)
    logp = logp.gather(-1, tensor(batch.tokens).long()[:, 1:, None])[..., 0]
    mask = np.asarray(batch.mask[:, 1:])
    loss = -(logp * tensor(mask)).sum() / mask.sum()
    loss.backward()

    def ours(params):
        logp = model.logprobs(params, batch)[0][:, 1:]
        return -jnp.sum(mask * logp) / jnp.sum(mask)

    value, gradient = jax.jit(jax.value_and_grad(ours))(params)
    np.testing.assert_allclose(value, loss.item(), rtol=1e-4)
    want = {n: float(p.grad.norm()) for n, p in theirs.named_parameters() if p.grad is not None}
    gradient = jax.device_get(gradient)
    embedding = theirs.get_input_embeddings().weight.grad.numpy()
    limit = 1e-3 * np.abs(embedding).max()
    np.testing.assert_allclose(gradient["embedding"], embedding, atol=limit)
    got = _norms_on_disk(model, gradient)
    for tensor_name, norm in want.items():
        found = got.pop(tensor_name)
        np.testing.assert_allclose(found, norm, rtol=2e-3, atol=1e-5, err_msg=tensor_name)
    assert all(norm == 0 for norm in got.values()), got  # a correction has no gradient


@pytest.mark.slow
@pytest.mark.parametrize("name", GREEDY)
def test_greedy_decoding_with_the_cache(written, name):
    torch, theirs, _, model, params = written(name)
    batch = rows()
    lengths = np.array([PROMPT, PROMPT - 3])
    prompts = np.asarray(batch.tokens)[:, :PROMPT]
    keep = (np.arange(PROMPT)[None, :] < lengths[:, None]).astype(np.int32)
    wanted = []
    for row, length in zip(prompts, lengths, strict=True):
        ids = torch.tensor(row[None, :length]).long()
        out = theirs.generate(
            ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        wanted.append(out[0, length:].numpy())
    tokens = jnp.asarray(prompts * keep, jnp.int32)
    positions = jnp.maximum(jnp.cumsum(keep, axis=1) - 1, 0)
    given = Batch(
        tokens=tokens,
        segment_ids=jnp.asarray(keep),
        positions=positions,
        mask=jnp.asarray(keep, jnp.float32),
    )
    caches = jax.jit(model.prefill, static_argnums=2)(params, given, PROMPT + NEW)
    step = jax.jit(lambda p, *args: model.decode_step(model.unstack(p), *args))
    at = jnp.asarray(lengths - 1, jnp.int32)
    token, got = given.tokens[np.arange(2), lengths - 1], []
    for _ in range(NEW):
        logits, caches = step(params, token, at, caches)
        token, at = jnp.argmax(logits, axis=-1).astype(jnp.int32), at + 1
        got.append(token)
    np.testing.assert_array_equal(np.stack(got, axis=1), np.stack(wanted))


def test_longrope_is_fixed_for_a_sampler(written):
    """Every token of a slot is rotated as in sequences that fill it, and so is the batch that the
    trainer makes of it; another length has other numbers, and more tokens than were said are
    refused."""
    _, _, folder, model, params = written("phi3-long")
    assert Engine(model, 2, 20).model.config.rope_tokens == 20
    short = Model(load_config(folder, remat="none", rope_tokens=16), model.mesh)
    assert Engine(short, 2, 16).model is short
    with pytest.raises(InputError, match="at most 16"):
        Engine(short, 2, 17)
    batch = rows()
    long, other = (np.asarray(jax.jit(m.logits)(params, batch)) for m in (model, short))
    assert np.abs(long - other)[np.asarray(batch.mask) > 0].max() > 0.1


TINY_TOWER = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
# model_type of a model with images -> its decoder, of ROWS; its other parts
WRAPPED = {
    "mistral3": (
        "ministral3",
        dict(
            vision_config=dict(
                TINY_TOWER, model_type="pixtral", head_dim=8, image_size=28, patch_size=14
            )
        ),
    ),
    "gemma3": (
        "gemma3-local-scaling",
        dict(vision_config=dict(TINY_TOWER, image_size=28, patch_size=14), mm_tokens_per_image=4),
    ),
    "gemma4": (
        "gemma4",
        dict(vision_config=dict(TINY_TOWER, num_key_value_heads=2, head_dim=8), audio_config=None),
    ),
}


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("tied", [False, True])
def test_the_decoder_of_a_model_with_images(name, tied, tmp_path, caplog):
    """It is read from the folder of the whole, in either spelling of its tensors; exported it is a
    model of its own; its adapter is one of the whole."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    peft, save_file = (
        pytest.importorskip("peft"),
        pytest.importorskip("safetensors.torch").save_file,
    )
    (decoder, parts), folder = WRAPPED[name], tmp_path / "whole"
    text = {**SMALL, **ROWS[decoder][1], "model_type": ROWS[decoder][0]}
    text["tie_word_embeddings"] = not tied  # that of the whole goes before it
    config = transformers.AutoConfig.for_model(
        name, text_config=text, tie_word_embeddings=tied, **parts
    )
    kind = transformers.AutoModelForImageTextToText
    torch.manual_seed(0)
    theirs = kind.from_config(config, attn_implementation="eager").eval()
    theirs.save_pretrained(folder)
    batch = rows()

    def computed(them):
        ids, keep = (torch.tensor(np.asarray(x)) for x in (batch.tokens, batch.segment_ids))
        with torch.no_grad():
            return them(ids, attention_mask=keep).logits.numpy()

    read = load_config(folder, remat="none")
    assert f"of a {name} model its decoder, {ROWS[decoder][0]}, is read" in caplog.text
    assert read.tie_embeddings == tied and read.part_of == name
    model, params, plain, base = adapted(folder, targets=("self_attn.*",))
    logits = jax.jit(plain.logits)(base, batch)
    near(logits, computed(theirs), batch.mask)
    inner = {n: x.detach() for n, x in theirs.state_dict().items() if not (tied and "lm_head" in n)}
    (tmp_path / "new").mkdir()
    save_file(inner, tmp_path / "new" / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, load_params(tmp_path / "new", plain), base)

    save_params(tmp_path / "ours", plain, base, bos_id=1, eos_ids=(2,), pad_id=0)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    near(logits, computed(again), batch.mask)
    params = moved(params)
    save_adapter(tmp_path / "adapter", model, params)
    whole = kind.from_pretrained(folder, attn_implementation="eager")
    whole = peft.PeftModel.from_pretrained(whole, tmp_path / "adapter")
    near(jax.jit(model.logits)(params, batch), computed(whole), batch.mask)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "olmo2",
        "phi3-short",
        "glm4",
        "glm4_moe",
        "smollm3",
        "granite",
        "llama4",
        "qwen3_5",
        "qwen3_next",
        "lfm2",
        "lfm2_moe",
        "gemma4",
        "minimax_m2",
    ],
)
@pytest.mark.parametrize("sizes", [dict(fsdp=2, tensor=2), dict(fsdp=2, context=2, tensor=1)])
def test_meshes(written, name, sizes, tmp_path):
    """The loss and gradient of one device, and the same bytes on disk."""
    *_, folder, plain, params = written(name)
    batch = packed_rows(8)
    batch = batch.replace(tokens=batch.tokens % 93 + 3)
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    model = Model(plain.config, make_mesh(**sizes, devices=devices))
    placed = load_params(folder, model)
    value, gradient, _ = loss_and_gradient(model, placed, place(batch, model.mesh))
    want_value, want, _ = loss_and_gradient(plain, params, batch)
    np.testing.assert_allclose(value, want_value, rtol=1e-5)
    want = flattened(want)
    top = max(np.abs(x).max() for x in want.values())
    limit = 2e-4 if name == "qwen3_next" else 1e-4  # chunks of 16 tokens alone move it by 9e-5
    for path, x in flattened(gradient).items():
        np.testing.assert_allclose(x, want[path], atol=limit * top, err_msg=str(path))
    for to, made, weights in (("one", plain, params), ("many", model, placed)):
        save_params(tmp_path / to, made, weights)
    saved = [(tmp_path / to / "model.safetensors").read_bytes() for to in ("one", "many")]
    assert saved[0] == saved[1]


@pytest.mark.parametrize(
    "name",
    lanes(
        ["phi3-long"],
        "glm4 olmo2 smollm3 glm4_moe qwen3_5 qwen3_next lfm2 gemma4 minimax_m2".split(),
    ),
)
def test_adapters_are_those_of_peft(written, name, tmp_path):
    """PEFT computes with what we saved; and with its own adapters, whose A the parts of a fused map
    share, we compute what it does."""
    peft = pytest.importorskip("peft")
    torch, theirs, folder, _, _ = written(name)
    others = {"lfm2": "conv.*", "qwen3_5": "linear_attn.*", "qwen3_next": "linear_attn.*"}
    targets = ("self_attn.*", *[others[n] for n in others if n == name])
    model, params, _, _ = adapted(folder, targets=targets)
    params, batch = moved(params), rows()

    def tensor(x):
        return torch.tensor(np.asarray(x))

    def computed(them):
        with torch.no_grad():
            given = dict(attention_mask=tensor(batch.segment_ids))
            return them(tensor(batch.tokens), **given).logits.numpy()

    logits = jax.jit(model.logits)

    def plain():
        return type(theirs).from_pretrained(folder, attn_implementation="eager")

    save_adapter(tmp_path / "ours", model, params)
    want = computed(peft.PeftModel.from_pretrained(plain(), tmp_path / "ours"))
    near(logits(params, batch), want, batch.mask)
    again = load_adapter(tmp_path / "ours", model, moved(params, key=2))
    jax.tree.map(np.testing.assert_array_equal, again, params)

    targets = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())["target_modules"]
    torch.manual_seed(1)
    them = peft.get_peft_model(plain(), peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    with torch.no_grad():
        for n, p in them.named_parameters():
            if "lora_" in n:
                p.add_(0.1 * torch.randn_like(p))
    them.save_pretrained(tmp_path / "theirs")
    read = load_adapter(tmp_path / "theirs", model, params)
    near(logits(read, batch), computed(them), batch.mask)


def test_an_adapter_that_mixes_fused_parts_is_refused(written, tmp_path):
    *_, folder, _, _ = written("phi3-long")
    model, params, _, _ = adapted(folder, targets=("qkv_proj",))
    save_adapter(tmp_path, model, moved(params))
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(n for n in tensors if n.endswith("qkv_proj.lora_B.weight"))
    tensors[name] = tensors[name].copy()
    tensors[name][0, -1] = 1.0  # a row of q, a column of v's A
    save_file(tensors, file)
    with pytest.raises(InputError, match="mixes the parts"):
        load_adapter(tmp_path, model, params)


@pytest.mark.parametrize("name", CONFIGS)
def test_published_settings_are_read_and_written(name):
    """Every key is known, nothing is lost on the way back, and the layers repeat a short unit, so
    that their compiled body is small."""
    config, text = from_hf_config(CONFIGS[name]), CONFIGS[name].get("text_config", CONFIGS[name])
    again = from_hf_config(json.loads(json.dumps(to_hf_config(config, eos_ids=(1, 2)))))
    assert dataclasses.replace(again, part_of=config.part_of) == config
    assert sum(len(stack.unit) for stack in config.stacks()) <= 8
    assert config.layers == text["num_hidden_layers"]


@pytest.mark.parametrize("name", ["cwm", "exaone4", "gemma3_text", "gemma4_text", "olmo3"])
def test_layers_with_a_window_where_config_json_names_none(name):
    """transformers writes layer_types, so that the tests above never leave them out."""
    transformers = pytest.importorskip("transformers")
    sizes = {**SMALL, "num_hidden_layers": 14, "hidden_size_per_layer_input": 0}
    sizes = sizes if name == "gemma4_text" else {**SMALL, "num_hidden_layers": 14}
    types = transformers.AutoConfig.for_model(name, **sizes).layer_types
    config = from_hf_config({"model_type": name, **sizes})
    assert [kind.window > 0 for kind in config.kinds] == [t == "sliding_attention" for t in types]


def test_the_rotated_part_of_a_head_in_the_published_spelling():
    """transformers writes another one, which the tests above read."""
    (rope,) = from_hf_config(CONFIGS["minimax_m2"]).ropes
    assert rope.dims(128) == 64


PAIRS = dict(type="longrope", short_factor=[1.0] * 4, long_factor=[1.0] * 4)
LLAMA4_SCALE = dict(llama_4_scaling_beta=0.1)
REFUSED = [
    ("phi3", dict(full_attn_mod=2), "full_attn_mod"),
    ("phi3", dict(rope_scaling=dict(PAIRS, short_factor=[1.0] * 3)), "short_factor"),
    ("phi3", dict(rope_scaling=dict(PAIRS, long_factor=[1.0, "x", 1.0, 1.0])), "long_factor"),
    ("phi3", dict(rope_scaling=dict(PAIRS, long_factor=[1.0, 0.0, 1.0, 1.0])), "long_factor"),
    ("phi3", dict(rope_scaling=dict(PAIRS, short_mscale=1.2)), "short_mscale"),
    ("phi3", dict(partial_rotary_factor=0.0), "partial_rotary_factor"),
    ("llama", dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
    ("olmo2", dict(clip_qkv=8.0), "clip_qkv"),
    ("olmo3", dict(rope_parameters=dict(rope_type="yarn", factor=2.0)), "rope_parameters"),
    ("smollm3", dict(no_rope_layers=[1, 2, 0]), "no_rope_layers"),
    ("smollm3", dict(no_rope_layers=[1]), "no_rope_layers"),
    ("smollm3", dict(no_rope_layer_interval=0), "no_rope_layer_interval"),
    ("smollm3", dict(layer_types=["sliding_attention"] * 3), "sliding_attention"),
    ("ministral3", dict(rope_parameters=dict(LLAMA4_SCALE, rope_type="default")), "original_max"),
    ("ministral3", dict(rope_parameters=dict(LLAMA4_SCALE, scale=2)), "scale"),
    ("gemma4_text", dict(hidden_size_per_layer_input=256), "hidden_size_per_layer_input"),
    ("gemma4_text", dict(num_kv_shared_layers=2), "num_kv_shared_layers"),
    ("gemma4_text", dict(enable_moe_block=True), "enable_moe_block"),
    ("gemma4_text", dict(use_bidirectional_attention="all"), "use_bidirectional_attention"),
    ("gemma4_text", dict(per_layer_config={"1": dict(sliding_window=2)}), "sliding_window"),
    ("gemma4_text", dict(rope_parameters=dict(rope_theta=1e4)), "rope_parameters"),
    ("minimax_m2", dict(scoring_func="softmax"), "scoring_func"),
    ("minimax_m2", dict(use_routing_bias=False), "use_routing_bias"),
    ("minimax_m2", dict(shared_intermediate_size=64), "shared_intermediate_size"),
    ("minimax_m2", dict(attn_type_list=[1, 0, 1]), "attn_type_list"),
    ("minimax_m2", dict(layernorm_mlp_beta=3.5), "layernorm_mlp_beta"),
    ("minimax_m2", dict(rotary_dim=0), "rotary_dim"),
    ("exaone4", dict(sliding_window_pattern="LLLG"), "layer_types"),
    ("exaone4", dict(sliding_window_pattern=0), "sliding_window_pattern"),
    ("olmoe", dict(clip_qkv=8.0), "clip_qkv"),
    ("lfm2", dict(conv_bias=True), "conv_bias"),
    ("lfm2", dict(conv_L_cache=1), "short_conv"),
    ("lfm2", dict(conv_dim=64), "conv_dim"),
    ("lfm2", dict(block_norm_eps=1e-6), "block_norm_eps"),
    ("lfm2", dict(use_pos_enc=False), "use_pos_enc"),
    ("lfm2", dict(block_use_swiglu=False), "block_use_swiglu"),
    ("lfm2", dict(hidden_act="gelu"), "hidden_act"),
    ("lfm2", dict(attention_bias=True), "attention_bias"),
    ("lfm2", dict(block_ff_dim=96), "block_ff_dim"),
    ("lfm2", dict(block_multiple_of=0), "block_multiple_of"),
    ("lfm2", dict(block_ffn_dim_multiplier=-1.0), "block_ffn_dim_multiplier"),
    ("lfm2", dict(tie_embedding=True, tie_word_embeddings=False), "tie_embedding"),
    ("lfm2", dict(theta=1e4), "theta"),
    ("lfm2", dict(full_attn_idxs=[1, 3]), "full_attn_idxs"),
    ("lfm2", dict(full_attn_idxs=[1], layer_types=["full_attention"] * 3), "full_attn_idxs"),
    ("lfm2", dict(full_attn_idxs=[]), "with attention"),
    ("lfm2", dict(layer_types=["linear_attention"] * 3), "layer_types"),
    ("lfm2_moe", dict(block_ff_dim=96), "block_ff_dim"),
    ("lfm2_moe", dict(n_shared_experts=1), "n_shared_experts"),
    ("granite", dict(attention_multiplier=0.0), "attention_multiplier"),
    ("granite", dict(logits_scaling=-1.0), "logits_scaling"),
    ("glm4_moe", dict(scoring_func="softmax"), "scoring_func"),
    ("llama", dict(rope_scaling=dict(rope_type="dynamic")), "factor"),
    ("llama4_text", dict(layer_types=["sliding_attention"] * 3), "layer_types"),
    (
        "llama4_text",
        dict(attention_chunk_size=None, layer_types=["chunked_attention"] * 3),
        "attention_chunk_size",
    ),
    ("llama4_text", dict(moe_layers=[3]), "moe_layers"),
    ("llama4_text", dict(floor_scale=0), "floor_scale"),
]


@pytest.mark.parametrize(("family", "changes", "field"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(family, changes, field, tmp_path):
    sizes = dict(
        vocab_size=96,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
    )
    moe = dict(n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=24)
    needed = {"glm4_moe": moe, "gemma4_text": dict(hidden_size_per_layer_input=0)}
    base = {"model_type": family, **sizes, **needed.get(family, {})}
    from_hf_config(base)
    with pytest.raises(InputError, match=field):
        from_hf_config({**base, **changes})
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**base, **changes}))
    with pytest.raises(InputError) as error:
        load_config(tmp_path)
    said = str(error.value)
    assert all(text in said for text in (str(path), field, " Fix: ")), said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama4", "olmo3", "smollm3"])
def test_packed_rows_that_share_prefixes(written, name):
    """What a plain row for each sequence gives: chunks go by places of the sequence, wherever the
    prefix stands in the row."""
    *_, model, params = written(name)
    groups = groups_of(np.random.default_rng(0), 96)
    plain, (packed, where) = plain_rows(groups), packed_in_rows(groups)
    weights = weights_of(plain)
    want = value_and_gradient(model, params, plain, None, weights)
    got = value_and_gradient(model, params, packed, where, weights)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-4, atol=1e-4)
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * max(1e-2, np.abs(b).max()))


def with_experts_together(tensors: dict) -> dict:
    """The matrices of all experts of a layer in two tensors, as published files have them."""
    out, layers = {}, {}
    for name, value in tensors.items():
        stem, _, rest = name.partition(".mlp.experts.")
        if rest and rest[0].isdigit():
            number, matrix, _ = rest.split(".")
            layers.setdefault(stem, {})[int(number), matrix] = value
        else:
            out[name] = value
    for stem, of_layer in layers.items():
        count = 1 + max(number for number, _ in of_layer)

        def matrices(name, count=count, of_layer=of_layer):
            return np.stack([of_layer[number, name] for number in range(count)])

        both = [matrices("gate_proj"), matrices("up_proj")]
        out[f"{stem}.mlp.experts.gate_up_proj"] = np.concatenate(both, axis=1)
        out[f"{stem}.mlp.experts.down_proj"] = matrices("down_proj")
    return out


def published_qwen3_5(config, kind: str) -> dict:
    """A config.json with the keys of the published ones, beside those of `config`."""
    told = config.to_dict()
    told["text_config"] |= dict(
        attn_output_gate=True,
        full_attention_interval=2,
        mamba_ssm_dtype="float32",
        mtp_num_hidden_layers=1,
        mtp_use_dedicated_embeddings=False,
        mlp_only_layers=[],
    )
    told["vision_config"] |= dict(deepstack_visual_indexes=[], model_type=kind)
    return told


IMAGE_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def rows_with_images() -> dict:
    """Two rows padded on the right, of one image and of two, in the arrays of a processor."""
    rng = np.random.default_rng(0)

    def text(count):
        return rng.integers(3, 290, count).tolist()

    def image(tokens):
        return [302, *[300] * tokens, 303]

    lines = [text(4) + image(4) + text(3), text(3) + image(8) + text(3) + image(8) + text(2)]
    ids, mask = np.zeros((2, 30), np.int64), np.zeros((2, 30), np.int64)
    for row, line in enumerate(lines):
        ids[row, : len(line)], mask[row, : len(line)] = line, 1
    grid = np.array([[1, 4, 4], [1, 4, 8], [1, 8, 4]])  # patches, of which four are a token
    pixels = rng.normal(size=(grid.prod(axis=1).sum(), 3 * 2 * 6 * 6)).astype(np.float32)
    names = ("input_ids", "attention_mask", "image_grid_thw", "pixel_values")
    return dict(zip(names, (ids, mask, grid, pixels), strict=True))


@pytest.mark.parametrize("experts", [pytest.param(False, marks=pytest.mark.slow), True])
def test_qwen3_5_with_images(experts, tmp_path):
    """The whole published model: a tower without mergers behind its layers, positions of images,
    layers that predict further tokens, which are left out; all experts of a layer together."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    io = rows_with_images()
    rope = dict(rope_theta=1e4, partial_rotary_factor=0.5, mrope_section=[2, 1, 1])
    rope |= dict(rope_type="default", mrope_interleaved=True)
    kind, name = ("qwen3_5_moe", "Qwen3_5Moe") if experts else ("qwen3_5", "Qwen3_5")
    sizes = dict(SMALL, **DELTA, **(SHARED if experts else {}), num_hidden_layers=2)
    sizes |= dict(vocab_size=320, head_dim=16, layer_types=["linear_attention", "full_attention"])
    tower = dict(depth=2, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=48)
    tower |= dict(patch_size=6, num_position_embeddings=16, model_type=f"{kind}_vision")
    config = getattr(transformers, f"{name}Config")(
        text_config=dict(sizes, model_type=f"{kind}_text", rope_parameters=rope),
        vision_config=tower,
        **dict(zip(IMAGE_TOKENS, range(300, 304), strict=True)),
    )
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(published_qwen3_5(config, kind)))
    tensors = load_file(tmp_path / "model.safetensors")
    if experts:
        tensors = with_experts_together(tensors)
        assert tensors["model.language_model.layers.0.mlp.experts.gate_up_proj"].shape[1] == 48
    tensors["mtp.norm.weight"] = np.ones(48, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")

    ids, mask = (torch.tensor(io[name]) for name in ("input_ids", "attention_mask"))
    grid, pixels = torch.tensor(io["image_grid_thw"]), torch.tensor(io["pixel_values"])
    kinds = (ids == config.image_token_id).int()
    inputs = dict(input_ids=ids, attention_mask=mask, mm_token_type_ids=kinds)
    with torch.no_grad():
        want = theirs(**inputs, pixel_values=pixels, image_grid_thw=grid).logits.numpy()
    loaded = load_config(tmp_path, remat="none")
    model = Model(loaded, make_mesh(devices=jax.devices()[:1]))
    params = load_params(tmp_path, model)
    batch = stored_rows(io, vision=loaded.vision)
    near(jax.jit(model.logits)(params, batch), want, batch.segment_ids > 0)

    save_params(tmp_path / "ours", model, params)
    again = type(theirs).from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        told = again(**inputs, pixel_values=pixels, image_grid_thw=grid).logits.numpy()
    near(told, want, io["attention_mask"] > 0)
