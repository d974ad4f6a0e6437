"""Every parser of a response takes linear time on any text: a policy must not escape a bad score by
making the reward late."""

import functools
import importlib
import inspect
import json
import pkgutil
import re
import sys

import pytest
from nasty_texts import nasty_texts
from spent import spent
from test_instructions import CASES, truth

import rljax.rewards
from rljax import rewards
from rljax.reasoning import answer_of, cut_reasoning
from rljax.rewards.groups import diversity
from rljax.rewards.judges import judges, judging, rubrics
from rljax.rewards.text import gym
from rljax.rewards.unit_tests.code_forms import extract_program, has_fence, same_output

ENTRY = json.dumps({"dataset": "countdown", "config": {}, "entry": {"answer": "1"}})
LANGUAGE = truth(("language:response_language", {"language": "de"}))
OTHERS = [(name, case[0]) for name, case in CASES.items() if name != "language:response_language"]
# As many at once as a row of IFEval has.
INSTRUCTIONS = [truth(*OTHERS[i : i + 3]) for i in range(0, len(OTHERS), 3)]
SCHEMA = '{"type": "array", "uniqueItems": true}'


def refused(parse):
    """The parser, of which a ValueError is an answer."""

    def call(text):
        try:
            parse(text)
        except ValueError:
            pass

    return call


def both_ways(text):
    """Two outputs that are equal but for their last line."""
    for compare in ("lines", "tokens"):
        same_output(text + "\nx", text + "\ny", compare, 1e-6)


# name -> (parser of a text, where the text stands in a response). A parser that looks for a box, a
# mark or a tag gets the text there, too.
PARSERS = {
    "reasoning": (
        answer_of,
        (
            "{}",
            "<think>{}",
            "<think>{}</think>",
            "`<think>{}",
            "<|channel|>final<|message|>{}",
            "</think><response>{}",
            "Here is my thought process:{}Here is my response:",
        ),
    ),
    "reasoning of TRL's messages": (
        lambda t: cut_reasoning([[{"role": "assistant", "content": t}]]),
        ("<think>{}</think>",),
    ),
    "boxed": (lambda t: rewards.boxed(t, "5"), ("{}", r"\boxed{{{}}}", r"\boxed {}")),
    "boxed, itself": (lambda t: rewards.boxed(t, t), (r"\boxed{{{}}}",)),
    "gsm8k": (lambda t: rewards.gsm8k(t, "5"), ("{}", "#### {}", "#### 5={}")),
    "gsm8k strict": (lambda t: rewards.gsm8k(t, "5", method="strict"), ("{}",)),
    "gsm8k flexible": (lambda t: rewards.gsm8k(t, "5", method="flexible"), ("{}",)),
    "math_verify": (
        lambda t: rewards.math_verify(t, r"\frac{1}{2}"),
        (
            *("{}", r"\boxed{{{}}}", "#### {}", "the answer is {}", "<think>{}</think> 5"),
            *("<answer>{}</answer>", "answer is:\n{}", "answer is:\n$$\n{}"),
            *(r"\boxed{{\gcd({},2)}}", r"\boxed{{5\ \mathrm{{{}}}}}"),
        ),
    ),
    "math_verify, a letter": (
        lambda t: rewards.math_verify(t, "B"),
        (r"\boxed{{{}}}", r"\boxed{{B{}}}", r"\boxed{{B, {}}}"),
    ),
    "boxed, a letter": (lambda t: rewards.boxed(t, "B"), (r"\boxed{{B{}}}", r"\boxed{{B ({})}}")),
    "math_verify, text": (lambda t: rewards.math_verify(t, "Evelyn"), (r"\boxed{{{}}}",)),
    "dapo": (lambda t: rewards.dapo(t, "5"), ("{}", "Answer: {}", r"\boxed{{{}}}")),
    "dapo, strict": (lambda t: rewards.dapo(t, "5", strict_box_verify=True), (r"\boxed{{{}}}",)),
    "choice": (
        lambda t: rewards.choice(t, "A"),
        ("{}", r"\boxed{{{}}}", r"\boxed{{A{}}}", "<answer>A{}</answer>", "the answer is {}"),
    ),
    "mmlu_pro": (lambda t: rewards.mmlu_pro(t, "A"), ("{}", "Answer: {}", "answer is {}")),
    "integer_answer": (lambda t: rewards.integer_answer(t, "5"), ("{}", r"\boxed{{{}}}")),
    **{
        f"instruction_following, {i}": (
            functools.partial(rewards.instruction_following, ground_truth=one),
            ("{}", "[<<{}>>"),
        )
        for i, one in enumerate(INSTRUCTIONS)
    },
    "the language": (lambda t: rewards.instruction_following(t, LANGUAGE), ("{}",)),
    "has_fence": (has_fence, ("{}", "```python\n{}\n```")),
    "countdown": (
        lambda t: rewards.countdown(t, '{"numbers": [5], "target": 5}'),
        ("{}", "<answer>{}</answer>", "<answer>5={}"),
    ),
    "list_match": (lambda t: rewards.list_match(t, "1 2"), ("{}", "<answer>{}</answer>")),
    "contains": (lambda t: rewards.contains(t, ["aa", "5"]), ("{}",)),
    "regex_match": (lambda t: rewards.regex_match(t, pattern="a5"), ("{}",)),
    "qa_exact_match": (lambda t: rewards.qa_exact_match(t, "a"), ("{}", "<answer>{}</answer>")),
    "token_f1": (lambda t: rewards.token_f1(t, '["a", "b c"]'), ("{}",)),
    "exact_match": (lambda t: rewards.exact_match(t, "a"), ("{}",)),
    "last_line": (lambda t: rewards.last_line(t, "a"), ("{}",)),
    "sequence_match": (lambda t: rewards.sequence_match(t, "a" * 1000), ("{}",)),
    "valid_json": (rewards.valid_json, ("{}",)),
    "json_match": (
        lambda t: rewards.json_match(t, '{"a": [1, {"b": 2}]}'),
        ("{}", "```json\n{}\n```", "[{}]", '{{"a": [{}1]}}'),
    ),
    "json_schema": (lambda t: rewards.json_schema(t, schema=SCHEMA), ("{}", "[{}1]")),
    "format_tags": (rewards.format_tags, ("{}", "<think>{}</think><answer>5</answer>")),
    "language": (rewards.language, ("{}",)),
    "repetition": (rewards.repetition, ("{}",)),
    "repetition of characters": (lambda t: rewards.repetition(t, unit="character"), ("{}",)),
    "looping": (rewards.looping, ("{}",)),
    "diversity": (lambda t: diversity([t, "a b"]), ("{}",)),
    "length": (
        lambda t: rewards.l1_max(9, {"target_tokens": 9}, response=t, ground_truth="a"),
        ("{}",),
    ),
    "program_tests": (
        lambda t: rewards.program_tests(t, '{"tests": [[1, 2]], "max_lines": 9}'),
        ("{}",),
    ),
    "extract_program": (
        lambda t: extract_program(t, "import os\ndef f():\n", "f"),
        ("{}", "```python\n{}\n```", " ```\n{}"),
    ),
    "same_output": (both_ways, ("{}",)),
    "read_score": (
        refused(functools.partial(judges.read_score, scale=10.0)),
        ("{}", "```json\n{}\n```", '```\n{{"score": {}'),
    ),
    "the better of two": (refused(judging._read_winner), ("{}",)),
    "rubrics": (refused(rubrics._read_rubrics), ("{}",)),
    "the message to a judge": (
        lambda t: judges.message("{prompt} {response}", "", "1", {"prompt": t, "response": t}),
        ("{}",),
    ),
    "reasoning_gym": (lambda t: gym.is_answer("countdown", t), ("{}",)),
}
# Functions that read texts and stand in no case above, and why.
NOT_RUN = {
    "by_source": "hands the response on",
    "mixture": "hands the response on",
    "with_judges": "hands the response on",
    "with_cost": "hands the response on",
    "judged": "asks a judge, whose answer _read_winner parses",
    "pairwise": "asks a judge, whose answer _read_winner parses",
    "judge": "asks an endpoint, whose answer read_score parses",
    "rubric": "asks an endpoint, whose answer read_score parses",
    "rubric_message": "calls message",
    "endpoint_rubrics": "asks an endpoint, whose answer _read_rubrics parses",
    "generated": "hands the response to a generator of rubrics",
    "code_tests": "runs extract_program in a sandbox with limits, then same_output",
    "sandbox_fusion": "sends what extract_program finds to a server, then same_output",
    "reasoning_gym_score": "cuts the answer out by rfind and asks is_answer",
    "_judge": "compares decoded values: run_tests bounds what a program sends",
    "_value_of": "of reasoning_gym: literals, or 500 characters of whole numbers and operators",
    "_raised": "makes a verdict of a message",
    "_uses": "reads the source of a ground truth's tests",
    "_result": "reads the answer of a server",
    "generator_of": "reads an option",
    "_matches": "draws by the texts, which it only prints",
    "length_under": "reads the number of tokens alone",
    "letter_quota": "counts a letter",
    "reward_model": "reads the score of a model",
    "l1_exact": "as l1_max",
    "soft_overlong": "reads the number of tokens alone",
}
# What reads no text of a response: options, requests, the sandbox's own inside, parsed formulas,
# arrays of a fixed size.
ROOMS_WITHOUT_RESPONSES = (
    *("pool.", "sandbox.", "judges.endpoint", "mixing", "on_device."),
    *("answers.math_compare", "answers.math_values", "answers.number_line"),
)


def readers() -> dict[str, list]:
    """Functions of rljax.rewards by name: those that a config can name, and those that use a
    pattern or take a text of the response."""
    found = {name: [getattr(rewards, name)] for name in rewards.__all__}
    for module_info in pkgutil.walk_packages(rljax.rewards.__path__, "rljax.rewards."):
        short = module_info.name.removeprefix("rljax.rewards.")
        if short.startswith(ROOMS_WITHOUT_RESPONSES) or module_info.ispkg:
            continue
        module = importlib.import_module(module_info.name)
        for name, function in vars(module).items():
            if inspect.isfunction(function) and function.__module__ == module.__name__:
                if reads_text(function):
                    found.setdefault(name, []).append(function)
    return found


def reads_text(function) -> bool:
    parameters = inspect.signature(function).parameters.keys()
    names = {"response", "responses", "text", "answer", "completion", "output"}
    function = inspect.unwrap(function)
    used = {*function.__code__.co_names}
    patterns = {
        name
        for name in used & function.__globals__.keys()
        if isinstance(function.__globals__[name], re.Pattern)
    }
    return bool(parameters & names or "re" in used or patterns)


def test_every_function_that_reads_a_response_is_among_the_parsers():
    """A parser that is added later fails here until it has a case."""
    reached = set()
    sys.setprofile(lambda frame, event, _: reached.add(frame.f_code) if event == "call" else None)
    try:
        for parse, places in PARSERS.values():
            for text in (
                "5",
                "A",
                '{"a": 1.5}',
                r"0.\overline{3} apples",
                "3*5, x",
                r"5\text{ cm}",
                r"\gcd(4,2+4) \text{ or } 7",
            ):
                for place in places:
                    parse(place.format(text))
    finally:
        sys.setprofile(None)
    missing = {
        name
        for name, functions in readers().items()
        if not all(inspect.unwrap(f).__code__ in reached for f in functions)
    }
    assert missing <= NOT_RUN.keys(), f"no case in PARSERS: {sorted(missing - NOT_RUN.keys())}"
    assert NOT_RUN.keys() <= missing, f"has a case: {sorted(NOT_RUN.keys() - missing)}"


def processor_time(parse, text: str) -> float:
    with spent() as seconds:
        parse(text)
    return seconds[0]


def slowest(length: int, limit_s: float) -> list[tuple[float, str, str]]:
    """(seconds of processor time, parser, text) of all that took longer than the limit."""
    slow = []
    texts = nasty_texts(length)
    rewards.math_verify(r"\boxed{x}", "y")  # imports its library
    for parser, (parse, places) in PARSERS.items():
        for name, text in texts.items():
            for place in places:
                whole = place.format(text)
                seconds = processor_time(parse, whole)
                if seconds > limit_s:  # once more: the machine may be busy
                    seconds = min(seconds, processor_time(parse, whole))
                if seconds > limit_s:
                    slow.append((round(seconds, 2), parser, f"{place!r:.20} of {name}"))
    return sorted(slow, reverse=True)


@pytest.mark.slow
def test_no_parser_is_slow_on_a_short_nasty_text():
    """20,000 characters: a quadratic pattern takes a second and more, a linear one 20 ms."""
    assert slowest(20_000, limit_s=0.25) == []


@pytest.mark.slow
def test_no_parser_takes_a_second_for_a_million_characters():
    assert len(nasty_texts(10)) >= 40
    assert slowest(1_000_000, limit_s=1.0) == []
