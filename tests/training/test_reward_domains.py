"""One run on four kinds of data, each with a reward of its own kind: math, code, form, a judge."""

import json

import pytest
from judge_server import completion, serving
from tiny_run import tiny_config, train_on_one

from rljax.tasks import Task


def four_domains() -> Task:
    """Two prompts each of math, code, instructions and chat."""
    tests = json.dumps({"inputs": ["1"], "outputs": ["1"]})
    rows = [
        {"prompt": prompt, "ground_truth": truth, "data_source": source}
        for source, prompts, truth in (
            ("math", ("2+3=", "1+4="), "5"),
            ("code", ("one:", "won:"), tests),
            ("instructions", ("a=1:", "a=01:"), '{"a": 1}'),
            ("chat", ("hi:", "hello:"), "-"),
        )
        for prompt in prompts
    ]
    return Task("".join(sorted({*"".join(r["prompt"] for r in rows), *'"{}5'})), rows, rows)


@pytest.mark.slow
def test_four_kinds_of_reward_in_one_run(tmp_path):
    def answer(request, number):
        return (200, {}, completion('{"score": 7}'))

    with serving(answer) as server:
        judge = f"judge(base_url='{server.base_url}', model='m')"
        sources = (
            ("math", "math_verify()"),
            ("code", "code_tests(timeout_s=5.0)"),
            ("instructions", "mixture(rewards=('json_match()', 'valid_json()'))"),
            ("chat", judge),
        )
        config = tiny_config(
            tmp_path,
            data__train="test_reward_domains.four_domains()",
            sft__steps=0,
            steps=2,
            batch__prompts_per_step=8,
            batch__samples_per_prompt=2,
            evaluate__every_steps=0,
            reward__function=f"by_source(sources={sources!r}, defaults=())",
            export=False,
            reward__timeout_s=60.0,
            reward__workers=2,
        )
        train_on_one(config)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert row["reward/errors"] == row["reward/timeouts"] == 0.0
        assert row["reward/source/chat"] == 0.7 and row["reward/source/code"] == -1.0
        assert 0.0 <= row["reward/source/math"] <= 1.0
        assert {row[f"data/share/{name}"] for name, _ in sources} == {0.25}
        assert "reward/part/json_match" in row and "reward/part/pass_rate" in row
