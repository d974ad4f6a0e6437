"""Instructions that a program can verify: the 25 kinds of IFEval (Zhou et al. 2023, arXiv
2311.07911, table 1), written from their descriptions.

A kind is a function (text, *, arguments) -> bool, named as the data set google/IFEval names it. Two
things differ from the published evaluation, which asks NLTK: how sentences and tokens are cut.
"""

import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping

from rljax.contracts import contract
from rljax.errors import InputError

Kind = Callable[..., bool]
_LANGUAGE_CHARACTERS = 1000  # characters of a text by which its language is detected

# -- what kinds share --


def _compared(count: int, relation: str, bound: int) -> bool:
    """Returns whether a count is "at least" or "less than" a bound."""
    return count >= bound if relation == "at least" else count < bound


def _occurrences(text: str, phrase: str) -> int:
    """Counts a phrase in the text, in upper or lower case, also inside words."""
    return text.lower().count(phrase.lower())


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _blocks(text: str, mark: str) -> list[str] | None:
    """Splits the text at marks, stripped; an empty one at either end is left out, and one in
    between makes None of all."""
    parts = [part.strip() for part in text.split(mark)]
    if any(not part for part in parts[1:-1]):
        return None
    return [part for part in parts if part]


# Behind these a stop ends no sentence.
_ABBREVIATIONS = frozenset(
    "mr mrs ms dr prof st jr sr vs etc e.g i.e inc ltd co no vol fig al gen col sgt rev hon dept "
    "approx jan feb mar apr jun jul aug sep sept oct nov dec".split()
)
# Possessive, and from the first mark of a row on: a million points are tried once.
_SENTENCE_END = re.compile(
    "(?<![.!?\u3002\uff01\uff1f])[.!?\u3002\uff01\uff1f]++[\"'\u201d\u2019)\\]*_]*+(?=\\s|$)"
)


def sentences(text: str) -> int:
    """Counts the sentences: texts up to `.`, `!` or `?` before a space or the end, not behind an
    abbreviation or an initial. A rest without a mark is one."""
    count, start = 0, 0
    for end in _SENTENCE_END.finditer(text):
        last = (text[max(start, end.start() - 20) : end.start()].split() or [""])[-1]
        last = last.lstrip("\"'([*_")
        initial = len(last) == 1 and last.isupper() and last != "I"
        if (
            end.group() == "."
            and end.end() < len(text)
            and (initial or last.lower() in _ABBREVIATIONS)
        ):
            continue
        count += any(map(str.isalnum, text[start : end.start()]))
        start = end.end()
    return count + any(map(str.isalnum, text[start:]))


def _language_is(text: str, language: str) -> bool:
    """Returns whether langdetect takes the text for this language; a text without letters is of
    any."""
    return _language_of(text[:_LANGUAGE_CHARACTERS]) in ("", language)


@functools.lru_cache(maxsize=64)  # the loose forms of a response often begin alike
def _language_of(text: str) -> str:
    """The code of the likeliest language, "" for none."""
    try:
        import langdetect
    except ImportError:
        raise InputError(
            "instructions about the language need langdetect, which is not installed",
            fix="pip install 'langdetect>=1.0.9'",
        ) from None
    langdetect.DetectorFactory.seed = 0  # it draws
    try:
        return langdetect.detect(text)
    except langdetect.LangDetectException:
        return ""


# -- the kinds --


def _existence(text, *, keywords: list) -> bool:
    return all(_occurrences(text, keyword) for keyword in keywords)


def _frequency(text, *, keyword: str, frequency: int, relation: str = "at least") -> bool:
    return _compared(_occurrences(text, keyword), relation, frequency)


def _forbidden(text, *, forbidden_words: list) -> bool:
    return not any(
        re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE)
        for word in forbidden_words
    )


def _letter_frequency(
    text, *, letter: str, let_frequency: int, let_relation: str = "at least"
) -> bool:
    return _compared(text.lower().count(letter.lower()), let_relation, let_frequency)


def _response_language(text, *, language: str) -> bool:
    return _language_is(text, language)


def _number_sentences(text, *, num_sentences: int, relation: str = "at least") -> bool:
    return _compared(sentences(text), relation, num_sentences)


def _number_paragraphs(text, *, num_paragraphs: int) -> bool:
    blocks = _blocks(text, "***")
    return blocks is not None and len(blocks) == num_paragraphs


def _number_words(text, *, num_words: int, relation: str = "at least") -> bool:
    return _compared(len(_words(text)), relation, num_words)


def _first_word(text, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = [part.strip() for part in text.split("\n\n")]
    if sum(map(bool, paragraphs)) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    if not (words := paragraphs[nth_paragraph - 1].split()):  # empty ones are counted
        return False
    start = words[0].lstrip("\"'")
    return re.split(r"[.,?!'\"]", start)[0].lower() == first_word.lower()


def _placeholders(text, *, num_placeholders: int) -> bool:
    count = 0
    for line in text.split("\n"):
        start = line.find("[")
        while start >= 0 and (end := line.find("]", start)) >= 0:
            count, start = count + 1, line.find("[", end)
    return count >= num_placeholders


def _postscript(text, *, postscript_marker: str) -> bool:
    letters = re.findall(r"\w", postscript_marker.lower())
    if letters not in (list("ps"), list("pps")):
        return postscript_marker.lower() in text.lower()
    stops = r"\.\s?".join(letters)  # "P. S." is one, too
    end = (
        r"\." if postscript_marker.endswith(".") else ""
    )  # "P.P.S", as the data set has it, is one
    return re.search(stops + end, text.lower()) is not None


_BULLET = re.compile(r"^[^\S\n]*+(?:\*[^*\n]|-)", re.MULTILINE)


def _bullets(text, *, num_bullets: int) -> bool:
    return len(_BULLET.findall(text)) == num_bullets


def _constrained(text) -> bool:
    return any(f"My answer is {word}." in text for word in ("yes", "no", "maybe"))


def _highlights(text, *, num_highlights: int) -> bool:
    single = re.findall(r"\*([^\n*]*)\*", text)
    double = re.findall(r"\*\*([^\n*]*)\*\*", text)
    return sum(bool(part.strip()) for part in (*single, *double)) >= num_highlights


def _sections(text, *, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"{re.escape(section_spliter)}\s?[0-9]+", text)) >= num_sections


def _json_format(text) -> bool:
    text = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _title(text) -> bool:
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end and line[start:end].strip("<> \t"):
            return True
    return False


def _two_responses(text) -> bool:
    blocks = _blocks(text, "******")
    return blocks is not None and len(blocks) == 2 and blocks[0] != blocks[1]


def _repeat_prompt(text, *, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _end_checker(text, *, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _quotation(text) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def _capital_words(text, *, capital_frequency: int, capital_relation: str = "at least") -> bool:
    words = re.findall(r"\w+(?:[-.]\w+)*", text)
    return _compared(sum(map(str.isupper, words)), capital_relation, capital_frequency)


def _english_capital(text) -> bool:
    return text.isupper() and _language_is(text.lower(), "en")


def _english_lowercase(text) -> bool:
    return text.islower() and _language_is(text, "en")


def _no_comma(text) -> bool:
    return "," not in text


KINDS: Mapping[str, Kind] = {
    "keywords:existence": _existence,
    "keywords:frequency": _frequency,
    "keywords:forbidden_words": _forbidden,
    "keywords:letter_frequency": _letter_frequency,
    "language:response_language": _response_language,
    "length_constraints:number_sentences": _number_sentences,
    "length_constraints:number_paragraphs": _number_paragraphs,
    "length_constraints:number_words": _number_words,
    "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": _constrained,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json_format,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeat_prompt,
    "startend:end_checker": _end_checker,
    "startend:quotation": _quotation,
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": _english_capital,
    "change_case:english_lowercase": _english_lowercase,
    "punctuation:no_comma": _no_comma,
}

# -- reading and scoring --


def read_instructions(ground_truth: str | Mapping) -> list[tuple[str, dict]]:
    """[(kind, its arguments)] of {"instruction_id_list": [...], "kwargs": [{...}, ...]}, the
    columns of google/IFEval, also as JSON text. Arguments that are null are left out. Raises
    ValueError that names what is wrong."""
    value = ground_truth
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"ground_truth is no JSON: {error}") from None
    names = value.get("instruction_id_list") if isinstance(value, Mapping) else None
    if not isinstance(names, list) or not names:
        raise ValueError("instruction_id_list is not a list of at least one kind of instruction")
    kwargs = value.get("kwargs")
    if not isinstance(kwargs, list) or len(kwargs) != len(names):
        raise ValueError(f"kwargs is not a list of {len(names)} objects, one for each instruction")
    return [_instruction(name, arguments) for name, arguments in zip(names, kwargs, strict=True)]


def _instruction(name: object, kwargs: object) -> tuple[str, dict]:
    if name not in KINDS:
        raise ValueError(f"instruction_id_list holds {name!r}, which is none of {', '.join(KINDS)}")
    arguments = {} if kwargs is None else kwargs
    if not isinstance(arguments, Mapping):
        raise ValueError(f"kwargs of {name} is not an object: {kwargs!r:.80}")
    arguments = {key: value for key, value in arguments.items() if value is not None}
    parameters = dict(list(inspect.signature(KINDS[name]).parameters.items())[1:])
    required = {
        key for key, parameter in parameters.items() if parameter.default is parameter.empty
    }
    if missing := sorted(required - arguments.keys()):
        raise ValueError(f"kwargs of {name} lack {missing}")
    if unknown := sorted(arguments.keys() - parameters.keys()):
        raise ValueError(f"kwargs of {name} hold {unknown}, known are {sorted(parameters)}")
    for key, value in arguments.items():
        kind = parameters[key].annotation
        if kind is int and isinstance(value, float) and value.is_integer():
            value = arguments[key] = int(value)  # parquet writes a column with gaps as floats
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"kwargs of {name}: {key} is {value!r:.80}, not a {kind.__name__}")
        if key.endswith("relation") and value not in ("at least", "less than"):
            raise ValueError(
                f"kwargs of {name}: {key} {value!r:.80} is not 'at least' or 'less than'"
            )
        if isinstance(value, list) and not (value and all(isinstance(text, str) for text in value)):
            raise ValueError(f"kwargs of {name}: {key} is {value!r:.80}, not a list of texts")
    return name, arguments


def follows(text: str, name: str, arguments: Mapping) -> bool:
    """Returns whether a text follows one instruction; an empty one follows none."""
    return bool(text.strip()) and KINDS[name](text, **arguments)


def loose_forms(response: str) -> list[str]:
    """The response, without its first line, without its last, and without both; and each
    without asterisks."""
    lines = response.split("\n")
    cut = [response, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return list(dict.fromkeys([*cut, *(text.replace("*", "") for text in cut)]))


@contract(safe=True, reads="answer", on_timeout=0.0, truth="specification")
def instruction_following(response: str, ground_truth: str | dict) -> dict:
    """1 if the response follows all instructions of the prompt, else 0 (IFEval, arXiv 2311.07911).

    `ground_truth`: {"instruction_id_list": [...], "kwargs": [...]} as in google/IFEval, also as
    JSON. Strict: the response as it is. Loose: for each instruction one of its forms without first
    line, last line or asterisks is enough. Parts: prompt_strict, the score, and prompt_loose (0 or
    1), instruction_strict and instruction_loose (shares), instructions (their number). The
    reasoning is not read. Raises ValueError for instructions that `read_instructions` cannot read.
    """
    instructions = read_instructions(ground_truth)
    strict = [follows(response, *instruction) for instruction in instructions]
    forms = loose_forms(response)
    lenient = [any(follows(form, *instruction) for form in forms) for instruction in instructions]
    return {
        "score": float(all(strict)),
        "prompt_strict": float(all(strict)),
        "prompt_loose": float(all(lenient)),
        "instruction_strict": sum(strict) / len(instructions),
        "instruction_loose": sum(lenient) / len(instructions),
        "instructions": float(len(instructions)),
    }
