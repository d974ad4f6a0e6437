"""Settings that the golden folders do not have, against transformers itself: a tiny random model of
each is written by transformers, and read, run and written back by us.

Each row changes what its family may change: tied or not, other heads, rope of every kind, windows,
which layers have experts, biases. The slow lane has them all; one of each kind of change runs
always.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.batch import batch_from_rows
from rljax.mesh import make_mesh
from rljax.models.families import from_hf_config
from rljax.models.huggingface import load_config, load_params, save_params
from rljax.models.model import Model

SMALL = dict(
    vocab_size=96,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    initializer_range=0.3,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
LLAMA3 = dict(
    rope_type="llama3",
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
    rope_theta=5e4,
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, rope_theta=1e4)
DEEPSEEK = dict(
    kv_lora_rank=12,
    q_lora_rank=20,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=12,
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=24,
    n_shared_experts=2,
    n_group=4,
    topk_group=2,
    first_k_dense_replace=1,
    num_key_value_heads=6,
    head_dim=None,
)
MOE = dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24)
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
SLIDE, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
DELTA = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    layer_types=[LINEAR, FULL, LINEAR],
)
CONV = "conv"
SHORT = dict(layer_types=[CONV, FULL, CONV], conv_L_cache=4)
SHARED = dict(MOE, shared_expert_intermediate_size=20)
# Half of the 8 elements of a head are rotated: two pairs.
LONG = dict(
    rope_type="longrope",
    rope_theta=1e4,
    short_factor=[1.0, 1.3],
    long_factor=[1.5, 4.0],
    original_max_position_embeddings=16,
    partial_rotary_factor=0.5,
)
GLM = dict(
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=24,
    n_group=2,
    topk_group=1,
    n_shared_experts=2,
)

# model_type, changes, whether it runs outside the slow lane
ROWS = {
    "llama-tied": ("llama", dict(tie_word_embeddings=True, attention_bias=True), True),
    "llama-mlp-bias": ("llama", dict(mlp_bias=True, rope_parameters=LLAMA3), False),
    "llama-yarn": ("llama", dict(rope_parameters=YARN, num_key_value_heads=6), False),
    "llama-linear": (
        "llama",
        dict(rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=1e4)),
        False,
    ),
    "llama-gelu": ("llama", dict(hidden_act="gelu", num_key_value_heads=1), False),
    "mistral-whole": ("mistral", dict(sliding_window=None, tie_word_embeddings=True), False),
    "mistral-window": ("mistral", dict(sliding_window=5, num_attention_heads=4), False),
    "qwen2-window": (
        "qwen2",
        dict(use_sliding_window=True, sliding_window=4, max_window_layers=1),
        False,
    ),
    "qwen2-untied": ("qwen2", dict(tie_word_embeddings=False, rope_parameters=YARN), False),
    "qwen3-window": (
        "qwen3",
        dict(
            use_sliding_window=True,
            sliding_window=6,
            layer_types=[SLIDE, FULL, SLIDE],
            tie_word_embeddings=True,
            attention_bias=True,
        ),
        False,
    ),
    "qwen3_moe-some": ("qwen3_moe", dict(MOE, mlp_only_layers=[1], norm_topk_prob=False), False),
    "qwen3_moe-every-second": ("qwen3_moe", dict(MOE, decoder_sparse_step=2), False),
    "qwen3_moe-window": (
        "qwen3_moe",
        dict(
            MOE, use_sliding_window=True, sliding_window=5, norm_topk_prob=True, attention_bias=True
        ),
        False,
    ),
    "mixtral-window": ("mixtral", dict(EXPERTS, sliding_window=5), False),
    "mixtral-tied": ("mixtral", dict(EXPERTS, tie_word_embeddings=True), False),
    "gemma2-untied": (
        "gemma2",
        dict(
            tie_word_embeddings=False,
            query_pre_attn_scalar=24,
            sliding_window=5,
            attn_logit_softcapping=None,
            final_logit_softcapping=3.0,
        ),
        True,
    ),
    "gemma2-caps": (
        "gemma2",
        dict(
            attention_bias=True,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=None,
            sliding_window=3,
        ),
        False,
    ),
    "gemma3-pattern": (
        "gemma3_text",
        dict(
            num_hidden_layers=7,
            sliding_window=4,
            query_pre_attn_scalar=12,
            rope_parameters={
                FULL: dict(rope_type="linear", factor=8.0, rope_theta=1e6),
                SLIDE: dict(rope_type="default", rope_theta=2e4),
            },
        ),
        False,
    ),
    "gemma3-layers": (
        "gemma3_text",
        dict(layer_types=[FULL, SLIDE, SLIDE], sliding_window=6),
        False,
    ),
    "gemma3-local-scaling": (
        "gemma3_text",
        dict(
            sliding_window=4,
            rope_parameters={
                FULL: dict(rope_type="default", rope_theta=1e6),
                SLIDE: dict(rope_type="linear", factor=2.0, rope_theta=2e4),
            },
        ),
        True,
    ),
    "mixtral-gelu": ("mixtral", dict(EXPERTS, hidden_act="gelu"), False),
    "qwen3_moe-gelu": (
        "qwen3_moe",
        dict(MOE, mlp_only_layers=[0], hidden_act="gelu_pytorch_tanh"),
        False,
    ),
    "deepseek-gelu": ("deepseek_v3", dict(DEEPSEEK, hidden_act="gelu"), False),
    "gpt_oss-default-rope": (
        "gpt_oss",
        dict(
            EXPERTS,
            attention_bias=False,
            sliding_window=4,
            rope_parameters=dict(rope_type="default", rope_theta=1e4),
        ),
        False,
    ),
    "gpt_oss-limits": (
        "gpt_oss",
        dict(
            EXPERTS,
            swiglu_limit=2.0,
            swiglu_alpha=1.2,
            layer_types=[FULL, SLIDE, FULL],
            sliding_window=5,
            tie_word_embeddings=True,
            rope_parameters=dict(YARN, truncate=False, beta_fast=16.0, beta_slow=2.0),
        ),
        False,
    ),
    "deepseek-full-rank-yarn": (
        "deepseek_v3",
        dict(
            DEEPSEEK,
            q_lora_rank=None,
            rms_norm_eps=1e-4,
            first_k_dense_replace=2,
            rope_parameters=dict(YARN, mscale=0.8, mscale_all_dim=1.3),
        ),
        True,
    ),
    "deepseek-halves": (
        "deepseek_v3",
        dict(
            DEEPSEEK,
            rope_interleave=False,
            attention_bias=True,
            first_k_dense_replace=0,
            n_group=1,
            topk_group=1,
            norm_topk_prob=False,
            routed_scaling_factor=1.7,
            tie_word_embeddings=True,
            rope_parameters=dict(YARN, mscale=1.0, mscale_all_dim=1.0),
        ),
        False,
    ),
}
LLAMA4 = dict(
    intermediate_size=24, intermediate_size_mlp=40, num_local_experts=4, num_experts_per_tok=1
)
GEMMA4 = dict(hidden_size_per_layer_input=0, sliding_window=5, global_head_dim=16)
# Families that have no golden folder: test_written_families asks more of them.
NEWER = {
    "olmo2": ("olmo2", dict(rope_parameters=LLAMA3), False),
    "olmo2-tied": (
        "olmo2",
        dict(attention_bias=True, num_key_value_heads=6, tie_word_embeddings=True, head_dim=12),
        False,
    ),
    "olmo3": (
        "olmo3",
        dict(
            num_hidden_layers=5,
            sliding_window=5,
            rope_parameters={FULL: dict(YARN), SLIDE: dict(rope_type="default", rope_theta=3e4)},
        ),
        False,
    ),
    "olmo3-layers": (
        "olmo3",
        dict(
            layer_types=[FULL, SLIDE, FULL],
            sliding_window=6,
            attention_bias=True,
            num_key_value_heads=1,
            tie_word_embeddings=True,
        ),
        False,
    ),
    "phi3": (
        "phi3",
        dict(num_key_value_heads=3, partial_rotary_factor=0.75, sliding_window=7),
        False,
    ),
    "phi3-long": (
        "phi3",
        dict(rope_parameters=LONG, original_max_position_embeddings=16, tie_word_embeddings=True),
        True,
    ),
    "phi3-short": (
        "phi3",
        dict(
            rope_parameters=dict(LONG, original_max_position_embeddings=32, attention_factor=1.1),
            original_max_position_embeddings=32,
        ),
        False,
    ),
    "smollm3": ("smollm3", dict(num_hidden_layers=5), False),
    "smollm3-windows": (
        "smollm3",
        dict(
            no_rope_layers=[0, 1, 1],
            use_sliding_window=True,
            sliding_window=4,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=False,
        ),
        False,
    ),
    "granite": (
        "granite",
        dict(
            embedding_multiplier=3.0,
            residual_multiplier=0.4,
            attention_multiplier=0.2,
            logits_scaling=7.0,
        ),
        False,
    ),
    "granite-tied": (
        "granite",
        dict(
            embedding_multiplier=0.5,
            attention_multiplier=0.4,
            logits_scaling=0.3,
            tie_word_embeddings=True,
            attention_bias=True,
            mlp_bias=True,
            rope_parameters=dict(YARN, attention_factor=1.3),
        ),
        False,
    ),
    "glm": ("glm", dict(num_key_value_heads=3, head_dim=12, tie_word_embeddings=True), False),
    "glm4": ("glm4", dict(partial_rotary_factor=0.75, attention_bias=False), False),
    "glm4-whole": (
        "glm4",
        dict(partial_rotary_factor=1.0, num_key_value_heads=6, head_dim=12),
        False,
    ),
    "glm4_moe": ("glm4_moe", dict(GLM), False),
    "glm4_moe-norms": (
        "glm4_moe",
        dict(
            GLM,
            use_qk_norm=True,
            attention_bias=True,
            first_k_dense_replace=2,
            n_shared_experts=1,
            n_group=1,
            norm_topk_prob=False,
            routed_scaling_factor=1.6,
            partial_rotary_factor=0.75,
            tie_word_embeddings=True,
        ),
        False,
    ),
    "llama4": (
        "llama4_text",
        dict(
            LLAMA4,
            num_hidden_layers=4,
            attention_chunk_size=6,
            floor_scale=5,
            attn_scale=0.3,
            rope_parameters=dict(LLAMA3, high_freq_factor=1.0),
        ),
        False,
    ),
    "llama4-plain": (
        "llama4_text",
        dict(
            LLAMA4,
            num_experts_per_tok=2,
            attention_chunk_size=None,
            moe_layers=[1],
            no_rope_layers=[1, 0, 1],
            use_qk_norm=False,
            attention_bias=True,
            tie_word_embeddings=True,
            rope_parameters=LLAMA3,
        ),
        False,
    ),
    "qwen3_5": ("qwen3_5_text", dict(DELTA, partial_rotary_factor=0.5), True),
    "qwen3_5-tied": (
        "qwen3_5_text",
        dict(
            DELTA,
            layer_types=None,
            num_hidden_layers=5,
            linear_num_key_heads=3,
            linear_num_value_heads=3,
            linear_conv_kernel_dim=3,
            attention_bias=True,
            tie_word_embeddings=True,
        ),
        False,
    ),
    "qwen3_5_moe": ("qwen3_5_moe_text", dict(DELTA, **SHARED), False),
    "qwen3_next": ("qwen3_next", dict(DELTA, **SHARED, mlp_only_layers=[1]), False),
    "qwen3_next-other": (
        "qwen3_next",
        dict(
            DELTA,
            **SHARED,
            linear_num_value_heads=2,
            norm_topk_prob=False,
            partial_rotary_factor=1.0,
            attention_bias=True,
        ),
        False,
    ),
    "lfm2": ("lfm2", dict(SHORT, block_ffn_dim_multiplier=1.5, block_multiple_of=16), True),
    "lfm2-tied": (
        "lfm2",
        dict(
            num_hidden_layers=5,
            full_attn_idxs=[1, 4],
            block_auto_adjust_ff_dim=False,
            tie_word_embeddings=True,
            norm_eps=1e-3,
            num_key_value_heads=6,
            rope_parameters=LLAMA3,
        ),
        False,
    ),
    "lfm2_moe": ("lfm2_moe", dict(SHORT, **MOE, num_dense_layers=1), False),
    "lfm2_moe-plain": (
        "lfm2_moe",
        dict(
            SHORT,
            **MOE,
            num_dense_layers=0,
            use_expert_bias=False,
            norm_topk_prob=False,
            routed_scaling_factor=1.7,
            tie_word_embeddings=False,
        ),
        False,
    ),
    "ministral3": (
        "ministral3",
        dict(rope_parameters=dict(YARN, llama_4_scaling_beta=0.3, mscale=1.0, mscale_all_dim=1.0)),
        False,
    ),
    "ministral3-plain": (
        "ministral3",
        dict(
            rope_parameters=dict(
                rope_type="default",
                rope_theta=1e4,
                llama_4_scaling_beta=0.5,
                original_max_position_embeddings=4,
            ),
            sliding_window=7,
            tie_word_embeddings=True,
        ),
        False,
    ),
    "gemma4": (
        "gemma4_text",
        dict(
            GEMMA4,
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
            final_logit_softcapping=3.0,
            num_hidden_layers=7,
            tie_word_embeddings=True,
        ),
        False,
    ),
    "gemma4-sizes": (
        "gemma4_unified_text",
        dict(
            GEMMA4,
            layer_types=[FULL, SLIDE, FULL],
            attention_bias=True,
            use_bidirectional_attention="vision",
            rope_parameters={
                FULL: dict(rope_type="proportional", rope_theta=1e4, partial_rotary_factor=0.5),
                SLIDE: dict(rope_type="default", rope_theta=2e4),
            },
        ),
        False,
    ),
    "minimax_m2": ("minimax_m2", dict(EXPERTS, rotary_dim=4), False),
    "minimax_m2-tied": (
        "minimax_m2",
        dict(
            EXPERTS,
            num_local_experts=6,
            tie_word_embeddings=True,
            num_key_value_heads=6,
            head_dim=16,
            rope_parameters=dict(YARN, partial_rotary_factor=0.75),
        ),
        False,
    ),
    "seed_oss": ("seed_oss", dict(residual_dropout=0.0, rope_parameters=YARN), False),
    "seed_oss-biases": (
        "seed_oss",
        dict(
            residual_dropout=0.1,
            attention_bias=False,
            attention_out_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
        ),
        False,
    ),
    "ernie4_5": ("ernie4_5", dict(tie_word_embeddings=True), False),
    "ernie4_5-biases": (
        "ernie4_5",
        dict(use_bias=True, tie_word_embeddings=False, num_key_value_heads=6, head_dim=12),
        False,
    ),
    "exaone4": (
        "exaone4",
        dict(num_hidden_layers=5, sliding_window=5, rope_parameters=LLAMA3),
        False,
    ),
    "exaone4-whole": (
        "exaone4",
        dict(sliding_window=None, layer_types=[FULL] * 3, tie_word_embeddings=True),
        False,
    ),
    "exaone4-letters": (
        "exaone4",
        dict(sliding_window=4, sliding_window_pattern="LLG", layer_types=[SLIDE, FULL, FULL]),
        False,
    ),
    "olmoe": ("olmoe", dict(num_experts=6, num_experts_per_tok=3, num_key_value_heads=6), False),
    "olmoe-normalised": (
        "olmoe",
        dict(
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            attention_bias=True,
            tie_word_embeddings=True,
        ),
        False,
    ),
    "llama-proportional": (
        "llama",
        dict(rope_parameters=dict(rope_type="proportional", factor=2.0, rope_theta=1e4)),
        False,
    ),
    "cwm": ("cwm", dict(num_hidden_layers=5, sliding_window=5), False),
    "cwm-layers": (
        "cwm",
        dict(
            layer_types=[SLIDE, SLIDE, FULL],
            sliding_window=4,
            mlp_bias=True,
            rope_parameters=dict(rope_type="default", rope_theta=1e4),
            tie_word_embeddings=True,
        ),
        False,
    ),
    "llama-dynamic": (
        "llama",
        dict(
            rope_parameters=dict(rope_type="dynamic", factor=3.0, rope_theta=1e4),
            max_position_embeddings=16,
        ),
        False,
    ),
    "llama-longrope": (
        "llama",
        dict(
            rope_parameters=dict(
                LONG,
                partial_rotary_factor=1.0,
                short_factor=[1.0] * 4,
                long_factor=[1.0, 2.0, 3.0, 5.0],
            )
        ),
        False,
    ),
}
ROWS |= NEWER
CASES = [
    pytest.param(*row[:2], id=name, marks=() if row[2] else pytest.mark.slow)
    for name, row in ROWS.items()
]


def write(torch, transformers, model_type, changes, folder, head="CausalLM"):
    """(their model, in `folder`): every weight random, norms, biases and sinks too."""
    known = transformers.AutoConfig.for_model(model_type)
    given = {k: v for k, v in {**SMALL, **changes}.items() if v is not None or k in changes}
    if model_type == "deepseek_v3":
        given.pop("head_dim", None)
    config = type(known)(**given)
    auto = getattr(transformers, f"AutoModelFor{head}")
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if value.is_floating_point() and "inv_freq" not in name and "embed_scale" not in name:
                value.add_(0.2 * torch.randn_like(value))
    model.save_pretrained(folder)
    return model


def rows():
    """Two rows of 20 and 13 tokens, padded on the right."""
    tokens = np.random.default_rng(1).integers(3, 96, (2, 20)).astype(np.int32)
    lengths = np.array([20, 13])
    mask = (np.arange(20)[None, :] < lengths[:, None]).astype(np.float32)
    return batch_from_rows(jnp.asarray(tokens), jnp.asarray(lengths), jnp.asarray(mask))


@pytest.mark.parametrize(("model_type", "changes"), CASES)
def test_logits_and_the_way_back(model_type, changes, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    theirs = write(torch, transformers, model_type, changes, tmp_path / "theirs")
    mesh = make_mesh(devices=jax.devices()[:1])
    model = Model(load_config(tmp_path / "theirs", remat="none"), mesh)
    params, batch = load_params(tmp_path / "theirs", model), rows()

    def expected(them):
        with torch.no_grad():
            ids = torch.tensor(np.asarray(batch.tokens))
            return them(ids, attention_mask=torch.tensor(np.asarray(batch.segment_ids))).logits

    want, keep = expected(theirs).numpy(), np.asarray(batch.mask)[..., None] > 0
    got = np.asarray(jax.jit(model.logits)(params, batch))
    # Random routing is chaotic: an expert chosen by a hair moves a row, so scale by the logits.
    limit = 1e-4 * max(1.0, np.abs(want[keep[..., 0]]).max())
    np.testing.assert_allclose(np.where(keep, got, 0), np.where(keep, want, 0), atol=limit)

    save_params(tmp_path / "ours", model, params, bos_id=1, eos_ids=(2,), pad_id=0)
    told = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert from_hf_config(told, remat="none") == model.config
    again = type(theirs).from_pretrained(tmp_path / "ours", attn_implementation="eager")
    np.testing.assert_allclose(
        np.where(keep, expected(again).numpy(), 0), np.where(keep, want, 0), atol=limit
    )


def test_three_labels(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    changes = dict(num_labels=3, tie_word_embeddings=False)
    head = "SequenceClassification"
    theirs = write(torch, transformers, "llama", changes, tmp_path, head)
    config = load_config(tmp_path, remat="none")
    model = Model(config, make_mesh(devices=jax.devices()[:1]), "scalar")
    batch = rows()
    ids, mask = (torch.tensor(np.asarray(x)) for x in (batch.tokens, batch.segment_ids))
    with torch.no_grad():
        want = theirs(torch.where(mask > 0, ids, 0), attention_mask=mask).logits.numpy()
    got = jax.jit(model.scores)(load_params(tmp_path, model), batch)
    assert got.shape == (2, 3) and config.labels == 3
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())


def test_layers_of_one_kind_are_scanned_and_not_unrolled():
    """A pattern of any length is one stack of its repeats, and what is left over another."""
    from rljax.models.config import LayerKind, ModelConfig

    sizes = dict(vocab_size=8, embed=8, mlp=8, heads=1, kv_heads=1, head_dim=8)
    plain = ModelConfig("qwen3", layers=80, **sizes)
    assert [(len(s.unit), s.repeats) for s in plain.stacks()] == [(1, 80)]
    near, far = LayerKind(window=4), LayerKind()
    kinds = (*([near] * 5 + [far]) * 10, near, near)
    gemma = dataclasses.replace(plain, layers=62, kinds=kinds)
    assert [(len(s.unit), s.repeats) for s in gemma.stacks()] == [(6, 10), (1, 2)]
    layers = [i for s in gemma.stacks() for m in range(len(s.unit)) for i in s.layers_of(m)]
    assert sorted(layers) == list(range(62))
    for stack in gemma.stacks():
        for member, kind in enumerate(stack.unit):
            assert all(kinds[i] == kind for i in stack.layers_of(member))
