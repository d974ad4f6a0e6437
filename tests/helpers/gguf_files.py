"""Small GGUF files with random weights, written by the `gguf` package."""

import functools
import json

import gguf
import numpy as np

TYPE = gguf.GGMLQuantizationType
# Where a block of these types, which the package cannot write, has its float16 scales.
_SCALES = {
    TYPE.Q2_K: (80, 82),
    TYPE.Q3_K: (108,),
    TYPE.Q4_K: (0, 2),
    TYPE.Q5_K: (0, 2),
    TYPE.Q6_K: (208,),
}
_SIZE = {TYPE.Q2_K: 3.0, TYPE.Q3_K: 60.0, TYPE.Q4_K: 500.0, TYPE.Q5_K: 900.0, TYPE.Q6_K: 1700.0}
READ = (
    "F32",
    "F16",
    "BF16",
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
)
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")
EMBED, MLP, HEADS, KV_HEADS = 256, 512, 4, 2


def codes(rng, kind: TYPE, rows: int, columns: int, scale: float = 0.08) -> np.ndarray:
    """Random rows of a type, as a file stores them; of F32 and F16 the numbers."""
    if kind not in _SCALES:
        return gguf.quantize(
            (scale * rng.standard_normal((rows, columns))).astype(np.float32), kind
        )
    elements, stored = gguf.GGML_QUANT_SIZES[kind]
    out = rng.integers(0, 256, (rows, columns // elements, stored), np.uint8)
    for at in _SCALES[kind]:
        values = scale / _SIZE[kind] * rng.uniform(0.5, 1.5, out.shape[:2])
        out[..., at : at + 2] = values.astype(np.float16)[..., None].view(np.uint8)
    return out.reshape(rows, -1)


@functools.cache
def byte_tokens() -> tuple[str, ...]:
    """The byte alphabet of GPT-2."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [b for b in range(256) if b not in plain]
    spelled = {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(other)}
    return tuple(spelled[b] for b in range(256))


_BYTES_BPE = dict(
    model="gpt2",
    pre="default",
    add_bos_token=False,
    bos_token_id=0,
    eos_token_id=1,
    padding_token_id=1,
    chat_template="{% for m in messages %}<|a|>{{ m['content'] }}<|b|>"
    "{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}",
    tokens=["<|a|>", "<|b|>", *byte_tokens(), "he", "ll", "hell", "Ġhell", "Ġt", "12", "ĠĠ"],
    merges=["h e", "l l", "he ll", "Ġ hell", "Ġ t", "1 2", "Ġ Ġ"],
)
_PIECES = ["▁", "h", "e", "l", "o", "t", "▁t", "he", "ll", "hell", "▁hell", "hello", "1", "2", "é"]
_SPM = dict(
    model="llama",
    pre="default",
    add_bos_token=True,
    bos_token_id=2,
    eos_token_id=1,
    unknown_token_id=3,
    padding_token_id=0,
    tokens=["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{i:02X}>" for i in range(256)), *_PIECES],
)


def tokenizer_of(architecture: str, **changes) -> dict:
    """The tokenizer's keys of a file of an architecture."""
    spm = architecture in ("gemma2", "gemma3", "phi3")
    keys = dict(_SPM if spm else _BYTES_BPE)
    keys.update(changes)
    count = len(keys["tokens"])
    special = 4 if spm else 2
    keys.setdefault("token_type", [3] * special + [1] * (count - special))
    if spm:
        scores = [0.0] * (count - len(_PIECES)) + [-float(i) for i in range(len(_PIECES))]
        keys.setdefault("scores", scores)
    return keys


def write_gguf(
    path,
    architecture: str = "llama",
    *,
    kinds=("Q8_0", "F16", "Q4_0", "Q6_K"),
    layers: int = 2,
    metadata: dict | None = None,
    tokenizer: dict | None = None,
    tied: bool = True,
    seed: int = 0,
    tensors: dict | None = None,
    vocabulary: int = 288,
) -> dict:
    """Writes a model; returns its keys below the architecture. `metadata` adds to them or, with
    None, takes one away; `tensors` adds float32 ones."""
    # The reader of transformers knows no other of Qwen3.
    head_dim = 128 if architecture == "qwen3" else 64
    rng, writer = np.random.default_rng(seed), gguf.GGUFWriter(path, architecture)
    keys = {
        "vocab_size": vocabulary,
        "block_count": layers,
        "context_length": 128,
        "embedding_length": EMBED,
        "feed_forward_length": MLP,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10_000.0,
        "rope.dimension_count": head_dim,
        **({"attention.sliding_window": 6} if "gemma" in architecture else {}),
        **({"attention.key_length": head_dim} if architecture[0] in "gq" else {}),
    }
    keys = {k: v for k, v in (keys | (metadata or {})).items() if v is not None}
    for key, value in keys.items():
        _add(writer, f"{architecture}.{key}", value)
    for key, value in (tokenizer_of(architecture) if tokenizer is None else tokenizer).items():
        name = f"tokenizer.{key}" if key.startswith("chat_template") else f"tokenizer.ggml.{key}"
        _add(writer, name, value)
    names = iter(range(10**6))

    def matrix(name, rows, columns, scale=0.08):
        kind = TYPE[kinds[next(names) % len(kinds)]]
        writer.add_tensor(name, codes(rng, kind, rows, columns, scale), raw_dtype=kind)

    def vector(name, size):
        shift = 1 if name.endswith("norm.weight") else 0
        values = shift + 0.3 * rng.standard_normal(size)
        writer.add_tensor(name, values.astype(np.float32))

    # Gemma multiplies it: larger, it would drown the layers, and a model would repeat its input.
    matrix("token_embd.weight", vocabulary, EMBED, 0.03 if "gemma" in architecture else 1.0)
    vector("output_norm.weight", EMBED)
    if not tied:
        matrix("output.weight", vocabulary, EMBED)
    wide, narrow = HEADS * head_dim, KV_HEADS * head_dim
    for i in range(layers):
        stem = f"blk.{i}."
        norms = ["attn_norm", "ffn_norm"]
        if "gemma" in architecture:
            norms += ["post_attention_norm", "post_ffw_norm"]
        for norm in norms:
            vector(f"{stem}{norm}.weight", EMBED)
        if architecture in ("qwen3", "gemma3"):
            for norm in ("attn_q_norm", "attn_k_norm"):
                vector(f"{stem}{norm}.weight", head_dim)
        if architecture == "phi3":
            matrix(f"{stem}attn_qkv.weight", wide + 2 * narrow, EMBED, 0.2)
            matrix(f"{stem}ffn_up.weight", 2 * MLP, EMBED)
        else:
            for part, rows in (("q", wide), ("k", narrow), ("v", narrow)):
                matrix(f"{stem}attn_{part}.weight", rows, EMBED, 0.2)
                if architecture == "qwen2":
                    vector(f"{stem}attn_{part}.bias", rows)
            matrix(f"{stem}ffn_gate.weight", MLP, EMBED)
            matrix(f"{stem}ffn_up.weight", MLP, EMBED)
        matrix(f"{stem}attn_output.weight", EMBED, wide)
        matrix(f"{stem}ffn_down.weight", EMBED, MLP)
    for name, value in (tensors or {}).items():
        writer.add_tensor(name, np.asarray(value, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return json.loads(json.dumps(keys))


def _add(writer, name: str, value) -> None:
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    add[type(value)](name, value)
