"""plan: what the codes and adapters of routed experts take."""

from test_plan import tiny

from rljax.plan.memory import estimate
from rljax.setup.abstract import abstract_setup

LAYERS, EMBED, MLP, EXPERTS, RANK = 2, 64, 192, 8, 4
MODEL = (
    f"decoder(layers={LAYERS}, embed={EMBED}, mlp={MLP}, heads=4, kv_heads=2, head_dim=16, "
    f"experts={EXPERTS})"
)


def of(base):
    config = tiny(
        model=MODEL,
        lora__rank=RANK,
        lora__targets=("*.experts.*",),
        lora__base=base,
        mesh__fsdp=1,
        mesh__tensor=1,
        mesh__data=8,
        model_settings__dtype="bfloat16",
    )
    return estimate(abstract_setup(config))


def test_codes_and_adapters_of_experts_are_counted():
    """Whole on every device: 2 bytes of each weight of an expert, or one (4 bits take a byte on
    CPU, too), and a float32 scale for 64 of them."""
    found = {base: of(base) for base in ("bfloat16", "int8", "nf4")}
    held = {base: one.held["actor base"] for base, one in found.items()}
    numbers = LAYERS * EXPERTS * 3 * EMBED * MLP
    saved = {base: held["bfloat16"] - bytes_ for base, bytes_ in held.items()}
    # (The maps of attention are codes, too: a few hundredths of the experts'.)
    assert 1.0 <= saved["int8"] / (numbers * (2 - 1 - 4 / 64)) < 1.1
    assert saved["nf4"] == saved["int8"]
    adapters = LAYERS * EXPERTS * 3 * RANK * (EMBED + MLP)
    assert all(one.held["actor weights"] == 4 * adapters for one in found.values())
    used = {base: one.learn["weights as used"] for base, one in found.items()}
    assert used["nf4"] == used["int8"] < used["bfloat16"]
