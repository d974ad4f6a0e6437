"""What the tests that replay six steps of TRL's trainers share."""

import numpy as np
import optax
from conftest import golden

from rljax.config import OptimizerConfig
from rljax.learn.optimizers import make_optimizer
from rljax.models.names import disk_pieces

COLUMNS = 16  # one shape, one compile


def trl_optimizer(meta) -> optax.GradientTransformation:
    config = OptimizerConfig(
        lr=meta["lr"],
        schedule="linear",
        warmup_steps=meta["warmup_steps"],
        beta1=meta["betas"][0],
        beta2=meta["betas"][1],
        eps=meta["eps"],
        weight_decay=meta["weight_decay"],
        clip_norm=meta["max_grad_norm"],
    )
    return make_optimizer(config, meta["max_steps"])


def assert_final(name, model, state, norms):
    """Gradient norms and final weights are TRL's: of the tensors that tests/golden holds."""
    with np.load(golden("trl_traj", f"{name}.npz")) as file:
        final = {k.removeprefix("final/"): file[k] for k in file if k.startswith("final/")}
    np.testing.assert_allclose(norms, final["grad_norms"], rtol=1e-4)
    compared = 0
    for tensor, (piece,) in disk_pieces(model).items():
        if f"param/{tensor}" not in final:
            continue
        node = state.params
        for key in piece.path:
            node = node[key]
        got = piece.theirs(np.asarray(node[piece.index]))
        np.testing.assert_allclose(got, final[f"param/{tensor}"], atol=2e-4, err_msg=tensor)
        compared += 1
    assert compared == sum(k.startswith("param/") for k in final) > 5
