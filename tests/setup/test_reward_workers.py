"""How many workers of a reward run on each host."""

import pytest

from rljax import hosts
from rljax.config import Config
from rljax.hosts import Exchange
from rljax.mesh import make_mesh
from rljax.setup import text_scorer

ASKS = "judge(base_url='http://127.0.0.1:9/v1', model='m')"


@pytest.mark.slow
@pytest.mark.parametrize(
    "reward, workers, of_hosts",
    [("exact_match()", 2, [2, 2, 2]), (ASKS, 4, [2, 1, 1]), (ASKS, 2, [1, 1, 1])],
    ids=["text", "server", "fewer than hosts"],
)
def test_hosts_share_the_workers_that_ask_a_server(monkeypatch, reward, workers, of_hosts):
    config, sizes = Config(), []
    config.reward.workers = workers
    for k in range(3):
        monkeypatch.setattr(hosts, "_exchange", Exchange(None, k, 3, ("a", "b", "c")))
        with text_scorer(config, reward, make_mesh()) as pool:
            sizes.append(pool._supervisor.size)
    assert sizes == of_hosts
