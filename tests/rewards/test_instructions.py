"""IFEval's kinds of instructions: each followed by one response and broken by another."""

import json

import pytest

from rljax.rewards import instruction_following
from rljax.rewards.pool.pool import RewardPool
from rljax.rewards.text.instructions import KINDS, loose_forms, read_instructions, sentences

pytest.importorskip("langdetect")

ENGLISH = "the children walk along the river every morning and they feed the birds with old bread"
GERMAN = "Die Kinder gehen jeden Morgen am Fluss entlang und füttern die Vögel mit altem Brot."
# kind: (arguments, responses that follow it, responses that do not)
CASES = {
    "keywords:existence": (
        {"keywords": ["river", "Bread"]},
        ["RIVER and breadcrumbs"],
        ["a river", "bread"],
    ),
    "keywords:frequency": (
        {"keyword": "ant", "frequency": 2, "relation": "at least"},
        ["Ant, ant", "elephant and ant"],
        ["one ant", ""],
    ),
    "keywords:forbidden_words": (
        {"forbidden_words": ["cat", "c++"]},
        ["a catalogue"],
        ["The Cat.", "I write C++ here"],
    ),
    "keywords:letter_frequency": (
        {"letter": "e", "let_frequency": 3, "let_relation": "less than"},
        ["Eve", "tEn e"],
        ["Eve sees", "eee"],
    ),
    "language:response_language": ({"language": "de"}, [GERMAN], [ENGLISH]),
    "length_constraints:number_sentences": (
        {"num_sentences": 2, "relation": "at least"},
        ["One. Two!", "Dr. No left. He ran."],
        ["One, e.g. this one.", "Mr. J. Smith came."],
    ),
    "length_constraints:number_paragraphs": (
        {"num_paragraphs": 2},
        ["one\n***\ntwo", "***\none\n***\ntwo\n***"],
        ["one", "one *** two *** three", "one *** *** two"],
    ),
    "length_constraints:number_words": (
        {"num_words": 3, "relation": "less than"},
        ["two words"],
        ["now three words", "a-b-c"],
    ),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "president"},
        ["One.\n\n\"President's men.", "One.\n\nPRESIDENT, yes.\n\n\n\n"],
        [
            "One.\n\n\n\nPresident",
            "One.\n\nThe president.",
            "President.\n\nOne.",
            "a\n\npresident\n\nc",
            "president",
        ],
    ),
    "detectable_content:number_placeholders": (
        {"num_placeholders": 2},
        ["[name] lives in [town]", "[[a] [b]"],
        ["[name]", "[ [ ["],
    ),
    "detectable_content:postscript": (
        {"postscript_marker": "P.P.S"},
        ["Bye\nP.P.S. more", "p. p. s. more", "a\n\nP.P.S Don't"],
        ["P.S. one", "pps"],
    ),
    "detectable_format:number_bullet_lists": (
        {"num_bullets": 2},
        ["* a\n* b", "- a\n  - b"],
        ["* a", "* a\n* b\n* c", "**bold**\n* a"],
    ),
    "detectable_format:constrained_response": (
        {},
        ["My answer is yes.", "So: My answer is maybe. Sorry."],
        ["yes", "my answer is no"],
    ),
    "detectable_format:number_highlighted_sections": (
        {"num_highlights": 2},
        ["*one* and *two*", "*one* and **two**"],
        ["*one*", "* * and *one*"],
    ),
    "detectable_format:multiple_sections": (
        {"section_spliter": "SECTION", "num_sections": 2},
        ["SECTION 1\na\nSECTION 2\nb"],
        ["SECTION 1\na", "Section 1 Section 2", "SECTION SECTION"],
    ),
    "detectable_format:json_format": (
        {},
        ['{"a": [1]}', '```json\n{"a": 1}\n```', "```\n[1]\n```"],
        ["{a: 1}", 'So: {"a": 1}'],
    ),
    "detectable_format:title": (
        {},
        ["<<poem of joy>>\ntext"],
        ["<poem>", "<<>> << >>", "<<a\nb>>"],
    ),
    "combination:two_responses": (
        {},
        ["one\n******\ntwo", "******one******two******"],
        ["one", "one******one", "a******b******c", "a************b"],
    ),
    "combination:repeat_prompt": (
        {"prompt_to_repeat": "Write a poem."},
        ["write a poem.\nRoses"],
        ["Roses. Write a poem."],
    ),
    "startend:end_checker": (
        {"end_phrase": "Any questions?"},
        ["Done. ANY questions?", 'x any questions?" '],
        ["Any?"],
    ),
    "startend:quotation": ({}, ['"all of it"', ' "a" '], ['"', 'so "a"', "'a'"]),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["I SAW it", "U.S. and NASA"],
        ["I saw it", "Nasa Usa"],
    ),
    "change_case:english_capital": ({}, [ENGLISH.upper()], [ENGLISH, GERMAN.upper()]),
    "change_case:english_lowercase": ({}, [ENGLISH], [ENGLISH.title(), GERMAN.lower()]),
    "punctuation:no_comma": ({}, ["no; none"], ["one, two"]),
}


def truth(*instructions) -> str:
    names, arguments = zip(*instructions, strict=True)
    return json.dumps({"instruction_id_list": names, "kwargs": arguments})


def test_every_kind_has_a_case():
    assert CASES.keys() == KINDS.keys() and len(CASES) == 25


@pytest.mark.parametrize("name", CASES)
def test_a_kind(name):
    arguments, followed, broken = CASES[name]
    filled = {"language": None, "keywords": None, **arguments}  # as parquet fills the columns
    for response in followed:
        assert instruction_following(response, truth((name, filled)))["score"] == 1, response
    for response in broken:
        assert instruction_following(response, truth((name, filled)))["score"] == 0, response


@pytest.mark.parametrize("name", CASES)
def test_an_empty_response_follows_nothing(name):
    found = instruction_following(" \n", truth((name, CASES[name][0])))
    assert found["prompt_loose"] == found["instruction_loose"] == found["score"] == 0


def test_relations_are_the_other_way_around_too():
    for name, field, at in (
        ("keywords:frequency", "relation", {"keyword": "ant", "frequency": 2}),
        ("length_constraints:number_words", "relation", {"num_words": 2}),
        ("change_case:capital_word_frequency", "capital_relation", {"capital_frequency": 2}),
    ):
        scores = [
            instruction_following("ANT ANT", truth((name, {**at, field: relation})))["score"]
            for relation in ("at least", "less than")
        ]
        assert scores == [1, 0], name


def test_strict_and_loose_of_prompts_and_instructions():
    both = truth(
        ("detectable_format:json_format", {}),
        ("punctuation:no_comma", {}),
        ("startend:quotation", {}),
    )
    found = instruction_following('Here it is:\n{"a": 1}', both)
    assert found == {
        "score": 0,
        "prompt_strict": 0,
        "prompt_loose": 0,
        "instruction_strict": 1 / 3,
        "instruction_loose": 2 / 3,
        "instructions": 3,
    }
    one = truth(("detectable_format:json_format", {}))
    found = instruction_following('Here it is:\n{"a": 1}\nBye', one)
    assert (found["prompt_strict"], found["prompt_loose"]) == (0, 1)
    assert loose_forms("a\n*b*\nc") == [
        "a\n*b*\nc",
        "*b*\nc",
        "a\n*b*",
        "*b*",
        "a\nb\nc",
        "b\nc",
        "a\nb",
        "b",
    ]


def test_thinking_is_not_read():
    instruction = truth(("punctuation:no_comma", {}))
    assert instruction_following("<think>a, b</think>none", instruction)["score"] == 1


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("no stop", 1),
        ("One. Two? Three!", 3),
        ("Wait... What?! Yes.", 3),
        ("It costs 3.50 dollars. Cheap.", 2),
        ('He said "No." Then he left.', 2),
        ("Visit Mr. A. Brown, etc. He is in.", 1),
        ("It is I. You too.", 2),
        ("... !", 0),
    ],
)
def test_sentences(text, count):
    assert sentences(text) == count


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("no json", "is no JSON"),
        ({"kwargs": [{}]}, "instruction_id_list is not a list"),
        ({"instruction_id_list": [], "kwargs": []}, "instruction_id_list is not a list"),
        ({"instruction_id_list": ["startend:quotation"]}, "kwargs is not a list of 1"),
        ({"instruction_id_list": ["startend:quotes"], "kwargs": [{}]}, "'startend:quotes'"),
        (
            {"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": None}]},
            r"keywords:existence lack \['keywords'\]",
        ),
        (
            {"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": [3]}]},
            "not a list of texts",
        ),
        (
            {"instruction_id_list": ["startend:quotation"], "kwargs": [{"num_words": 3}]},
            r"hold \['num_words'\]",
        ),
        (
            {
                "instruction_id_list": ["detectable_format:number_bullet_lists"],
                "kwargs": [{"num_bullets": "3"}],
            },
            "num_bullets is '3', not a int",
        ),
        (
            {
                "instruction_id_list": ["length_constraints:number_words"],
                "kwargs": [{"num_words": 3, "relation": "more than"}],
            },
            "relation 'more than' is not",
        ),
    ],
)
def test_ground_truths_that_are_none(given, says):
    with pytest.raises(ValueError, match=says):
        instruction_following("x", given)


def test_whole_numbers_come_as_floats_from_parquet():
    given = {"instruction_id_list": ["length_constraints:number_words"]}
    given["kwargs"] = [{"num_words": 2.0, "relation": "at least"}]
    assert read_instructions(given)[0][1]["num_words"] == 2


def test_in_the_pool():
    samples = [
        {"response": "a, b", "ground_truth": truth(("punctuation:no_comma", {}))},
        {"response": "a b", "ground_truth": truth(("punctuation:no_comma", {}))},
        {"response": "a b", "ground_truth": "{}"},
    ]
    with RewardPool("instruction_following()", workers=1) as pool:
        scores = pool.score(samples)
    assert [score.status for score in scores] == ["ok", "ok", "error"]
    assert [score.value for score in scores[:2]] == [0, 1]
