"""Options that fit no sample are refused before the first one: a run in which every reward fails
does not start."""

import pytest

from rljax.components import resolve
from rljax.errors import InputError
from rljax.rewards.pool.calling import HOME, prepare
from rljax.rewards.pool.pool import RewardPool


@pytest.mark.parametrize(
    "text",
    [
        "language(scripts=('klingon',))",
        "repetition(ngram=0)",
        "looping(min_repeats=1)",
        "format_tags(tags=())",
        "json_schema(schema='nowhere.json')",
        "regex_match(pattern='(')",
        "soft_overlong(max_tokens=2, cache_tokens=4)",
        "diversity(n=0)",
        "pairwise(judge='no_such')",
        "pairwise(judge='shorter', opponents=-1)",
        "by_source(sources=(('d', 'exact_match()')))",
        "by_source(defaults=('d', 'exact_match()'))",
        "mixture(rewards=('exact_match()', 'repetition(ngram=0)'))",
        "by_source(sources=(('d', 'repetition(ngram=0)'),))",
    ],
)
def test_options_that_fit_no_sample(text):
    with pytest.raises(InputError):
        prepare(resolve(text, HOME))


@pytest.mark.parametrize(
    "text",
    [
        "json_schema()",  # the schema may stand in the row
        "regex_match()",
        "choice()",
        "json_match()",
        "l1_exact()",
        "l1_max(correct='by_source()')",
        "language(scripts=('zh',))",
        "diversity()",
        "by_source(sources=(('d', 'boxed()'),))",
    ],
)
def test_options_that_may_fit(text):
    prepare(resolve(text, HOME))


def test_a_pool_with_such_options_does_not_start():
    with pytest.raises(InputError, match="klingon"):
        RewardPool("language(scripts=('klingon',))", workers=1)
