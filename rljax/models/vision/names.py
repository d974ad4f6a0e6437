"""Names of the vision tower's weights in Hugging Face files, as data.

Maps our module path to the Hugging Face module name below "visual.".
"""

# "{}" is the index of what is stacked on axis 0 of ours.
VISION_NAMES = {
    "qwen2_5_vl": {
        "patch_embed": "patch_embed.proj",
        "blocks.attention_norm": "blocks.{}.norm1",
        "blocks.attention.qkv": "blocks.{}.attn.qkv",
        "blocks.attention.out": "blocks.{}.attn.proj",
        "blocks.mlp_norm": "blocks.{}.norm2",
        "blocks.mlp.gate": "blocks.{}.mlp.gate_proj",
        "blocks.mlp.up": "blocks.{}.mlp.up_proj",
        "blocks.mlp.down": "blocks.{}.mlp.down_proj",
        "merger.norm": "merger.ln_q",
        "merger.up": "merger.mlp.0",
        "merger.down": "merger.mlp.2",
    },
    "qwen3_vl": {
        "patch_embed": "patch_embed.proj",
        "positions": "pos_embed",
        "blocks.attention_norm": "blocks.{}.norm1",
        "blocks.attention.qkv": "blocks.{}.attn.qkv",
        "blocks.attention.out": "blocks.{}.attn.proj",
        "blocks.mlp_norm": "blocks.{}.norm2",
        "blocks.mlp.up": "blocks.{}.mlp.linear_fc1",
        "blocks.mlp.down": "blocks.{}.mlp.linear_fc2",
        "merger.norm": "merger.norm",
        "merger.up": "merger.linear_fc1",
        "merger.down": "merger.linear_fc2",
        "deepstack.norm": "deepstack_merger_list.{}.norm",
        "deepstack.up": "deepstack_merger_list.{}.linear_fc1",
        "deepstack.down": "deepstack_merger_list.{}.linear_fc2",
    },
}
VISION_NAMES["qwen3_5"] = {  # the same tower, without the mergers behind some of its layers
    ours: theirs for ours, theirs in VISION_NAMES["qwen3_vl"].items() if "deepstack" not in ours
}
VISION_NAMES["qwen3_5_moe"] = VISION_NAMES["qwen3_5"]
STACKED = ("blocks", "deepstack")
