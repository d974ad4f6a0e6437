"""Finds what a row holds beside its prompt and is not read: a part of what is asked, or an image.

Published rows keep the choices, the passage or the turns before a question in columns of their own.
What such a column says is compared with what the record asks: where that says the same, nothing is
lost. One rule for every kind of row: a warning with the count and the first row, or an error where
answers would be learned that continue turns, or speak of an image, which the model does not see.
"""

import functools
import logging
import re
from collections.abc import Iterable, Mapping, Sequence

from rljax.data.images.columns import image_kind, images_of
from rljax.errors import InputError

LOG = logging.getLogger("rljax")

# Names of columns, by their letters and digits in lower case: the turns and steps before what is
# learned; choices, which may be numbers; other parts of a question.
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
# These may hold the whole of what is read, rendered or with its answer.
_WHOLE = re.compile("(prompt|text|message|conversation|dialogue|dialog)s?")
_NAMES_OF_OBJECTS = ("role", "from", "id", "_id", "label", "labels", "url", "source", "type")
_MARK = re.compile(r"<image ?[0-9]*>")
_MARKS = re.compile("<[^<>]*>")  # of a chat template
_ROLES = {*"system user human assistant gpt bot model instruction inst response q a".split()}
_OTHERS = ("images", "extra_info", "reward_model")  # are read, or by the reward alone
_SHORT = 16  # characters of a text that may stand in a prompt by chance
_SHOWN = 60  # characters of a text in a warning
_WARNINGS = {
    "asked": (
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
    "mark": (
        "say <image>, and the row has no image: the mark is read as text",
        "write the images into the column 'images', or take the mark out",
    ),
}


class Unread:
    """Collects what rows of a `source` hold and is not read. `warn` logs it; with `at_once`, as for
    rows that are read as they are drawn, each column is logged when it is first found."""

    def __init__(self, source: str, at_once: bool):
        self.source, self.at_once = source, at_once
        # What columns hold ("margin", "reference") -> those that the loss of the run does not read.
        self.unlearned: Mapping[str, Sequence[str]] = {}
        self._found: dict[str, dict[int, tuple[str, dict[str, str]]]] = {}
        self._logged: set[tuple[str, str]] = set()

    def check(
        self,
        row: Mapping,
        asked: object,
        location: str,
        index: int,
        *,
        read: str = "",
        learned: bool = False,
    ) -> None:
        """Notes the columns of a row that hold what `asked`, a text or messages, lacks. `read` is
        the column of the prompt; "messages" or "" where whole conversations bring it. A text in
        it beside messages that are asked is not what is read, and is compared with them.

        Raises InputError where an answer is `learned` without the turns before it, or without an
        image."""
        parts = unread_parts(row, asked, read)
        if read and isinstance(row.get(read), str) and not isinstance(asked, str):
            lost = unread_parts({"prompt": row[read]}, asked)
            parts |= {read: lost["prompt"]} if lost else {}
        earlier = [name for name in parts if _EARLIER.fullmatch(_letters(name))]
        if learned and read not in ("", "messages") and earlier:
            raise InputError(
                f"{location}, column {earlier[0]!r} is not read",
                value=row[earlier[0]],
                rule="the answer would be learned without it",
                fix=f"write {earlier[0]!r} into the prompt, or remove or rename the column where"
                " nothing that is asked is in it",
            )
        self._note("asked", parts, location, index)
        for what, names in self.unlearned.items():
            held = {name: "" for name in names if row.get(name) not in (None, 0)}
            self._note(what, held, location, index)
        kinds = {n: kind for n, v in row.items() if n not in _OTHERS and (kind := image_kind(n, v))}
        plain = [name for name, kind in kinds.items() if kind == "image"]
        has = bool(images_of(row))
        if learned and plain and not has:
            raise InputError(
                f"{location}, column {plain[0]!r} holds an image that is not read",
                rule="images are in 'images' or 'image', or in messages",
                fix=f"rename {plain[0]!r} to 'images', with <image> in the text where each stands,"
                " or remove the column",
            )
        self._note("image", dict.fromkeys(kinds, ""), location, index)
        if not has and not kinds:
            said = next((m[0] for text in _texts(asked) if (m := _MARK.search(text))), "")
            self._note("mark", {read or "messages": said} if said else {}, location, index)

    def _note(self, what: str, columns: dict[str, str], location: str, index: int) -> None:
        if not self.at_once:
            if columns:
                self._found.setdefault(what, {})[index] = location, columns
            return
        new = {name: text for name, text in columns.items() if (what, name) not in self._logged}
        if new:
            self._logged |= {(what, name) for name in new}
            self._log(what, list(new), location, new, "")

    def warn(self, records: Sequence[Mapping]) -> None:
        """Logs, in a line for each kind, what of the rows of these records is not read."""
        for what, rows in self._found.items():
            found = [rows[r["index"]] for r in records if r["index"] in rows]
            if found:
                names = list(dict.fromkeys(name for _, columns in found for name in columns))
                count = f"{len(found):,} of {len(records):,} rows: "
                self._log(what, names, *found[0], count)

    def _log(self, what: str, names: list[str], location: str, texts: dict, count: str) -> None:
        says, fix = _WARNINGS[what]
        shown = ", ".join(map(repr, names))
        text = next(filter(None, texts.values()), "")
        first = f"{location}, {text[:_SHOWN]!r}" if text else location
        LOG.warning(
            "%s: %scolumns that %s: %s (the first is in %s). Fix: %s",
            self.source,
            count,
            says,
            shown,
            first,
            fix,
        )


def unread_parts(
    row: Mapping, asked: object, read: str = "", choices: bool = True
) -> dict[str, str]:
    """{column: a text of it that `asked` lacks} for the columns of a row, but `read`, that look
    like a part of a question; without those of `choices`, if they are left out."""
    found, said = {}, None
    for name, value in row.items():
        kind = _kind(name) if name != read and value is not None else ""
        if not kind or kind == "choices" and not choices:
            continue
        if len(name) == 1 and not {"a", "b"} <= {str(other).lower() for other in row}:
            continue
        if isinstance(value, (str, Mapping, list, tuple)) or kind == "choices":
            said = said or _Said(_texts(asked))
            texts = list(_texts(value, numbers=kind == "choices"))
            lost = next((text for text in texts if not said.says(text)), None)
            whole = _WHOLE.fullmatch(_letters(name)) and said.within(texts)
            if whole and isinstance(value, str) and _letters(name) == "prompt":
                whole = said.rendered(value)  # and nothing else: it has no answer
            if lost is not None and not whole:
                found[name] = lost
    return found


@functools.lru_cache(maxsize=10_000)
def _letters(name: object) -> str:
    return re.sub("[^a-z0-9]", "", str(name).lower())


@functools.lru_cache(maxsize=10_000)
def _kind(name: object) -> str:
    letters = _letters(name)
    if _CHOICES.fullmatch(letters):
        return "choices"
    return "part" if _EARLIER.fullmatch(letters) or _PARTS.fullmatch(letters) else ""


def _texts(value: object, numbers: bool = False) -> Iterable[str]:
    """The texts in a value, without those that only name what they stand beside; with `numbers`
    these, too."""
    todo = [value]
    while todo:
        value = todo.pop()
        if isinstance(value, Mapping):
            todo += [v for n, v in value.items() if n not in _NAMES_OF_OBJECTS][::-1]
        elif isinstance(value, (list, tuple)):
            todo += value[::-1]
        elif isinstance(value, str) and value.strip():
            yield value
        elif numbers and isinstance(value, (int, float)) and not isinstance(value, bool):
            yield str(value)


class _Said:
    """The texts of what is asked, to look for others in them. White space and case do not count."""

    def __init__(self, texts: Iterable[str]):
        self.texts = list(texts)
        self.squeezed = "\0".join(map(_squeezed, self.texts))

    @functools.cached_property
    def words(self) -> str:
        """All words, between spaces."""
        return _words(" ".join(self.texts))

    def says(self, text: str) -> bool:
        """Returns whether the text stands here; a short one as words of its own."""
        small = _squeezed(text)
        if small not in self.squeezed:
            return False
        return len(small) >= _SHORT or _words(text) in self.words

    def within(self, texts: Iterable[str]) -> bool:
        """Returns whether all that is asked stands in these texts."""
        other = _Said(texts)
        return all(map(other.says, self.texts))

    def rendered(self, text: str) -> bool:
        """Returns whether a text is what is asked, as a chat template writes it: beside the texts,
        in their order, are marks and the names of roles alone."""
        small, start, between = _squeezed(text), 0, []
        for one in map(_squeezed, self.texts):
            at = small.find(one, start)
            if at < 0:
                return False
            between.append(small[start:at])
            start = at + len(one)
        beside = _MARKS.sub(" ", " ".join([*between, small[start:]]))
        return set(re.findall(r"\w+", beside.replace("_", " "))) <= _ROLES


def _squeezed(text: str) -> str:
    return "".join(text.split()).casefold()


def _words(text: str) -> str:
    """The words of a text between spaces; a space where it has none."""
    words = re.findall(r"\w+", text.casefold())
    return f" {' '.join(words)} " if words else " "
