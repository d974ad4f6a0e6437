"""Finds columns of a row that hold a part of the question, or an image, and are not read.

Published rows keep the choices, the passage or the turns before a question in columns of their own.
The texts of such a column are compared with the texts of the record's prompt: where they stand in
it, nothing is lost. The rule is the same for every kind of row: a warning with the count and the
first row, or an error where answers would be learned that continue turns, or speak of an image,
which the model does not see.
"""

import collections
import functools
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from rljax.data.images.columns import image_kind, images_of
from rljax.errors import InputError

LOG = logging.getLogger("rljax")

# Names of columns, by their letters and digits in lower case: turns and steps before the learned
# ones; choices, which may be numbers; other parts of a question.
_EARLIER = re.compile(
    "((chat|conversation|dialogue|dialog|message)s?)?history|trajectory|initialreasonsteps"
)
_CHOICES = re.compile(
    "(answer)?(choice|option)s?(list|text)?|endings"
    "|(choice|option|op|ending|answer)[a-j]|(choice|option|ending|sol)[0-9]{1,2}|[a-j]"
)
_PARTS = re.compile(
    "(query|querie|input|userinput|context|ctx|passage|article|document|paragraph|story|storie|body"
    "|background|premise|hypothesis|scenario|support|evidence|table|instruction|question|problem"
    "|prompt|text|message|conversation|dialogue|dialog|system|systemprompt|systemmessage)"
    "s?(text|str)?([a-j]|[0-9]{1,2})?"
)
# These may hold the whole prompt, rendered or with its answer.
_WHOLE_PROMPT = re.compile("(prompt|text|message|conversation|dialogue|dialog)s?")
_NAMES_OF_OBJECTS = ("role", "from", "id", "_id", "label", "labels", "url", "source", "type")
_IMAGE_MARK = re.compile(r"<image ?[0-9]*>")
_TEMPLATE_MARKS = re.compile("<[^<>]*>")  # of a chat template
_ROLES = {*"system user human assistant gpt bot model instruction inst response q a".split()}
_READ_ELSEWHERE = ("images", "extra_info", "reward_model")  # are read, or by the reward alone
_SHORT = 16  # characters of a text that may stand in a prompt by chance
REWARDS = ("reward", "score")  # the columns of a trajectory's reward
_ENOUGH_LABELS = 32  # of rows that are read as they are drawn, to tell that they are no classes
_SHOWN = 60  # characters of a text in a warning
_WARNINGS = {
    "question": (
        "look like a part of what is asked, and the prompt does not say it",
        "write it into the prompt (a --map of rljax data prepare does it for a file); remove or"
        " rename the column where nothing that is asked is in it",
    ),
    "image": (
        "hold an image that is not read",
        "images are in 'images' or 'image', with <image> in the text where each stands; rename the"
        " column",
    ),
    "margin": (
        "say how much better an answer is, and are not read by the loss of this run",
        "algorithm.reward_loss='bradley_terry(margin=True)' of a reward model subtracts a margin,"
        " as TRL's RewardTrainer does; or remove the column",
    ),
    "reference": (
        "hold an answer that is not read by the loss of this run",
        "algorithm.preference_loss='tpo()' reads one; or remove the column",
    ),
    "logprobs": (
        "hold log-probs of a reference model, which this run computes itself",
        "remove the columns; offline.reference_logprobs=FOLDER computes them once",
    ),
    "process_scores": (
        "hold scores of steps, and this run learns from the reward of the whole completion alone",
        "dataflow='dqo()' learns from scores of steps; or remove the column",
    ),
    "outcome": (
        "hold a reward that is not the sum of 'process_scores', which are learned in its place",
        "remove 'process_scores' to learn from the reward; or write their sum as the reward",
    ),
    "bad": (
        "say of some answers that they are bad, and these are learned as demonstrations",
        "dataflow='kto' learns from prompt, completion and label; or remove those rows, or the"
        " column",
    ),
    "mark": (
        "say <image>, and the row has no image: the mark is read as text",
        "write the images into the column 'images', or take the mark out",
    ),
}


class Unread:
    """Collects the columns that rows of a `source` hold and that are not read. `warn` logs them.
    With `at_once`, as for rows that are read as they are drawn, each column is logged when it is
    first found."""

    def __init__(self, source: str, at_once: bool):
        self.source, self.at_once = source, at_once
        # What columns hold ("margin", "reference", "logprobs") -> those that the run does not read.
        self.unlearned: Mapping[str, Sequence[str]] = {}
        self._noted: dict[str, dict[int, tuple[str, dict[str, str]]]] = {}
        self._logged: set[tuple[str, str]] = set()
        # Column of a label of demonstrations -> how often each number stands in it.
        self._label_numbers: dict[str, collections.Counter] = {}

    def check(
        self,
        row: Mapping,
        prompt: object,
        location: str,
        index: int,
        *,
        read: str = "",
        learned: bool = False,
        demonstrated: bool = False,
    ) -> None:
        """Notes the columns of a row whose texts the `prompt`, a text or messages, lacks. `read` is
        the column of the prompt; "messages" or "" where whole conversations bring it. If the prompt
        is messages and that column holds a text, the text is not read, and is compared with them,
        too.

        Raises InputError where an answer is `learned` without the turns before it, or without an
        image. One that is `demonstrated` is learned whatever a label of the row says of it."""
        parts = unread_parts(row, prompt, read)
        if read and isinstance(row.get(read), str) and not isinstance(prompt, str):
            missing = unread_parts({"prompt": row[read]}, prompt)
            parts |= {read: missing["prompt"]} if missing else {}
        earlier = [name for name in parts if _EARLIER.fullmatch(_letters(name))]
        if learned and read not in ("", "messages") and earlier:
            raise InputError(
                f"{location}, column {earlier[0]!r} is not read",
                value=row[earlier[0]],
                rule="the answer would be learned without it",
                fix=f"write {earlier[0]!r} into the prompt, or remove or rename the column where"
                " nothing that is asked is in it",
            )
        self._note("question", parts, location, index)
        for topic, names in self.unlearned.items():
            # A value may be a list, or an array of NumPy, with a number for each token.
            values = {name: row.get(name) for name in names if row.get(name) is not None}
            columns = {n: "" for n, v in values.items() if np.ndim(v) or v != 0}
            if topic == "outcome":
                columns = _replaced_outcome(row)
            self._note(topic, columns, location, index)
        if demonstrated:
            self._note("bad", self._bad_labels(row), location, index)
        kinds = {
            n: kind
            for n, v in row.items()
            if n not in _READ_ELSEWHERE and (kind := image_kind(n, v))
        }
        image_columns = [name for name, kind in kinds.items() if kind == "image"]
        has_images = bool(images_of(row))
        if learned and image_columns and not has_images:
            raise InputError(
                f"{location}, column {image_columns[0]!r} holds an image that is not read",
                rule="images are in 'images' or 'image', or in messages",
                fix=f"rename {image_columns[0]!r} to 'images', with <image> in the text where each"
                " stands, or remove the column",
            )
        self._note("image", dict.fromkeys(kinds, ""), location, index)
        if not has_images and not kinds:
            mark = next((m[0] for text in _texts(prompt) if (m := _IMAGE_MARK.search(text))), "")
            self._note("mark", {read or "messages": mark} if mark else {}, location, index)

    def _bad_labels(self, row: Mapping) -> dict[str, str]:
        """Returns the columns of a row that say that its answer is bad. Numbers of a label that are
        not all 0 and 1 are classes, which say nothing of it (`_is_class`)."""
        bad = {}
        for name in ("label", "kto_tag", "reward"):
            value = row.get(name)
            if value is False or name == "reward" and isinstance(value, (int, float)) and value < 0:
                bad[name] = ""
            elif isinstance(value, (int, float)) and name != "reward" and value is not True:
                self._label_numbers.setdefault(name, collections.Counter())[value] += 1
                if value == 0 and not (self.at_once and self._is_class(name)):
                    bad[name] = ""
        return bad

    def _is_class(self, name: str) -> bool:
        numbers = self._label_numbers.get(name)
        if numbers is None:  # true and false
            return False
        return numbers.keys() != {0, 1} or self.at_once and numbers.total() < _ENOUGH_LABELS

    def _note(self, topic: str, columns: dict[str, str], location: str, index: int) -> None:
        if not self.at_once:
            if columns:
                self._noted.setdefault(topic, {})[index] = location, columns
            return
        new = {name: text for name, text in columns.items() if (topic, name) not in self._logged}
        if new:
            self._logged |= {(topic, name) for name in new}
            self._log(topic, list(new), location, new, "")

    def warn(self, records: Sequence[Mapping]) -> None:
        """Logs the columns that are not read of the rows of these records, in a line for each
        kind."""
        for topic, rows in self._noted.items():
            noted = [rows[r["index"]] for r in records if r["index"] in rows]
            if topic == "bad":
                noted = [
                    (location, columns)
                    for location, columns in noted
                    if not all(map(self._is_class, columns))
                ]
            if noted:
                names = list(dict.fromkeys(name for _, columns in noted for name in columns))
                count = f"{len(noted):,} of {len(records):,} rows: "
                self._log(topic, names, *noted[0], count)

    def _log(self, topic: str, names: list[str], location: str, texts: dict, count: str) -> None:
        problem, fix = _WARNINGS[topic]
        shown = ", ".join(map(repr, names))
        text = next(filter(None, texts.values()), "")
        first = f"{location}, {text[:_SHOWN]!r}" if text else location
        LOG.warning(
            "%s: %scolumns that %s: %s (the first is in %s). Fix: %s",
            self.source,
            count,
            problem,
            shown,
            first,
            fix,
        )


def _replaced_outcome(row: Mapping) -> dict[str, str]:
    """Returns the column of the reward of a row with process scores whose sum is another one."""
    name = next((name for name in REWARDS if row.get(name) is not None), "")
    if row.get("process_scores") is None or not name:
        return {}
    is_sum = math.isclose(sum(row["process_scores"]), row[name], rel_tol=1e-3, abs_tol=1e-3)
    return {} if is_sum else {name: ""}


def unread_parts(
    row: Mapping, prompt: object, read: str = "", choices: bool = True
) -> dict[str, str]:
    """Returns {column: a text of it that the `prompt` lacks} for the columns of a row, but `read`,
    that look like a part of a question. Columns of choices are among them only with `choices`."""
    unread, prompt_texts = {}, None
    for name, value in row.items():
        kind = _kind(name) if name != read and value is not None else ""
        if not kind or kind == "choices" and not choices:
            continue
        if len(name) == 1 and not {"a", "b"} <= {str(other).lower() for other in row}:
            continue
        if isinstance(value, (str, Mapping, list, tuple)) or kind == "choices":
            prompt_texts = prompt_texts or _PromptTexts(_texts(prompt))
            texts = list(_texts(value, with_numbers=kind == "choices"))
            missing = next((text for text in texts if not prompt_texts.has(text)), None)
            holds_prompt = _WHOLE_PROMPT.fullmatch(_letters(name)) and prompt_texts.are_within(
                texts
            )
            if holds_prompt and isinstance(value, str) and _letters(name) == "prompt":
                # Such a text has nothing else, so that it has no answer.
                holds_prompt = prompt_texts.are_rendered_in(value)
            if missing is not None and not holds_prompt:
                unread[name] = missing
    return unread


@functools.lru_cache(maxsize=10_000)
def _letters(name: object) -> str:
    return re.sub("[^a-z0-9]", "", str(name).lower())


@functools.lru_cache(maxsize=10_000)
def _kind(name: object) -> str:
    letters = _letters(name)
    if _CHOICES.fullmatch(letters):
        return "choices"
    return "part" if _EARLIER.fullmatch(letters) or _PARTS.fullmatch(letters) else ""


def _texts(value: object, with_numbers: bool = False) -> Iterable[str]:
    """Yields the texts in a value, without those that only name what they stand beside; with
    `with_numbers` its numbers, too, as texts."""
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            pending += [v for n, v in value.items() if n not in _NAMES_OF_OBJECTS][::-1]
        elif isinstance(value, (list, tuple)):
            pending += value[::-1]
        elif isinstance(value, str) and value.strip():
            yield value
        elif with_numbers and isinstance(value, (int, float)) and not isinstance(value, bool):
            yield str(value)


class _PromptTexts:
    """The texts of a prompt, to look for others in them. White space and case do not count."""

    def __init__(self, texts: Iterable[str]):
        self.texts = list(texts)
        self.squeezed = "\0".join(map(_squeezed, self.texts))

    @functools.cached_property
    def words(self) -> str:
        """Returns all words, between spaces."""
        return _words(" ".join(self.texts))

    def has(self, text: str) -> bool:
        """Returns whether the text stands in the prompt; a short one as words of its own."""
        squeezed = _squeezed(text)
        if squeezed not in self.squeezed:
            return False
        return len(squeezed) >= _SHORT or _words(text) in self.words

    def are_within(self, texts: Iterable[str]) -> bool:
        """Returns whether the whole prompt stands in these texts."""
        other = _PromptTexts(texts)
        return all(map(other.has, self.texts))

    def are_rendered_in(self, text: str) -> bool:
        """Returns whether a text is the prompt as a chat template writes it: beside the texts, in
        their order, are marks and the names of roles alone."""
        squeezed, start, between = _squeezed(text), 0, []
        for prompt_text in map(_squeezed, self.texts):
            position = squeezed.find(prompt_text, start)
            if position < 0:
                return False
            between.append(squeezed[start:position])
            start = position + len(prompt_text)
        others = _TEMPLATE_MARKS.sub(" ", " ".join([*between, squeezed[start:]]))
        return set(re.findall(r"\w+", others.replace("_", " "))) <= _ROLES


def _squeezed(text: str) -> str:
    return "".join(text.split()).casefold()


def _words(text: str) -> str:
    """Returns the words of a text between spaces; a space where it has none."""
    words = re.findall(r"\w+", text.casefold())
    return f" {' '.join(words)} " if words else " "
