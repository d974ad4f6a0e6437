"""Finds the images of a row, in columns or messages, and their positions in the row's texts.

Rows in any of the forms below become rows in one form: `<image>` in the text of a prompt or message
marks the position of an image, and `images` holds a Source for each, in the order of the text.

- column `images`: paths relative to the data file, bytes, {"bytes", "path"} as the datasets
  library writes them, base64, data URLs; or `image`, one of these;
- `<image>` in texts (verl) or {"type": "image"} in messages (TRL), filled from the column in order;
- messages that hold their images: {"type": "image_url", "image_url": {"url": "data:..."}},
  {"type": "image", "image": ...}.

Images of a conversation that marks no position for them stand at the beginning of its first user
turn, as in TRL.
"""

import base64
import binascii
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from rljax.data.images.files import FORMATS, Source
from rljax.data.text.messages import SPEAKERS
from rljax.errors import InputError

MARK = "<image>"
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
_PROMPT_COLUMNS = ("messages", "prompt", "question", "text")
_ANSWER_COLUMNS = (
    "completion",
    "response",
    "chosen",
    "rejected",
    "reference",
    "safer",
    "more_harmful",
)
_IMAGE_PARTS = ("image", "image_url")  # types of the parts of a message
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*")
_COLUMN_TYPES = (str, bytes, list, tuple, Mapping, np.ndarray)  # of a column of images
_SHORTEST = 64  # characters of base64: no image has fewer


def has_images(row: Mapping) -> bool:
    """Returns whether a row as it was read holds images."""
    return len(_image_column(row)[1]) > 0 or any(
        _is_image(part)
        for name in (*_PROMPT_COLUMNS, *_ANSWER_COLUMNS)
        for part in _parts(row.get(name))
    )


def with_images(row: Mapping, location: str, folder: Path | None) -> dict:
    """Returns the row with `<image>` in its texts and `images` as Sources; a row without images as
    it is. Paths are relative to `folder`. Raises InputError for a column `videos`, for a value that
    is no image (`source_of`), and unless images and positions agree in number."""
    if isinstance(row.get("videos"), (list, tuple, np.ndarray)) and len(row["videos"]):
        raise InputError(
            f"{location}, column 'videos' is not read",
            value=str(row["videos"][0])[:80],
            rule="a model reads images and text",
            fix="write frames of it into 'images'",
        )
    column = row.get("images")
    if column is not None and not isinstance(column, _COLUMN_TYPES):
        fix = "write a list of paths, bytes or data URLs, or remove the column"
        raise InputError(f"{location}, column 'images' is no list", value=column, fix=fix)
    if not has_images(row):  # a row without any, among others that have some
        return {k: v for k, v in row.items() if k != "images"}
    name, values = _image_column(row)
    column = [
        source_of(value, f"{location}, image {number}", folder)
        for number, value in enumerate(values)
    ]
    placer = _ImagePlacer(column, location, folder)
    converted = {key: value for key, value in row.items() if key != name}
    images: list[Source] = []
    prompt_column = next((key for key in _PROMPT_COLUMNS if row.get(key) is not None), None)
    if prompt_column is not None:
        converted[prompt_column], images = placer.filled(row[prompt_column], prompt_column, 0)
    longest = images
    for key in _ANSWER_COLUMNS:
        if not isinstance(row.get(key), (list, tuple)) or not _is_conversation(row[key]):
            continue
        # A whole conversation begins with the prompt's images; a completion goes on behind them.
        is_conversation = _role(row[key][0]) != "assistant"
        converted[key], answer_images = placer.filled(
            row[key], key, 0 if is_conversation else len(images)
        )
        answer_images = answer_images if is_conversation else [*images, *answer_images]
        longest = max(longest, answer_images, key=len)
    if len(longest) < len(column) or not longest:
        raise InputError(
            f"{location} has {len(column)} images, and places for {len(longest)}",
            rule=f"{MARK} in a text, or a part {{'type': 'image'}}, stands for each image",
            fix=f"write {MARK} where each image stands, or remove the images",
        )
    return {**converted, "images": tuple(longest)}


def images_of(row: Mapping) -> dict:
    """Returns {"images": Sources} of a row from `with_images`; {} of a row without images."""
    return {"images": row["images"]} if row.get("images") else {}


def require_text_alone(records: Iterable[Mapping], command: str) -> None:
    """Raises InputError for records with images, which `command`, as errors name it, would
    lose."""
    for record in records:
        if record.get("images"):
            raise InputError(
                f"{record['images'][0].location}: {command} writes rows of text",
                rule="the images of a prompt would be lost",
                fix="rows without images",
            )


def _image_column(row: Mapping) -> tuple[str, list]:
    """Returns the name of the column of images, and its values."""
    values = row.get("images")
    if values is None:
        value = row.get("image")
        is_image = (
            isinstance(value, (bytes, np.ndarray))
            or isinstance(value, Mapping)
            and ({"bytes", "path", "image"} & value.keys())
            or isinstance(value, str)
            and _names_image(value, row)
        )
        return ("image", [value]) if is_image else ("images", [])
    is_single = isinstance(values, (str, bytes, Mapping)) or (
        isinstance(values, np.ndarray) and values.dtype != object
    )
    if is_single:
        return "images", [values]
    values = values if isinstance(values, (list, tuple, np.ndarray)) else []
    return "images", [value for value in values if value is not None]


def _names_image(text: str, row: Mapping) -> bool:
    """Returns whether the text of a column `image` is an image's path, base64 or data URL, and not
    a text about one: by its form, or because a mark in the row has no other image."""
    if text.startswith("data:image/") or text.lower().endswith(_SUFFIXES):
        return True
    if len(text) >= _SHORTEST and " " not in text and _BASE64.fullmatch(text):
        return True
    prompts = [row.get(name) for name in _PROMPT_COLUMNS]
    parts = [part for value in prompts for part in _parts(value)]
    contents = [m.get("content") for v in prompts if _is_conversation(v) for m in v if m]
    has_mark = any(isinstance(text, str) and MARK in text for text in [*prompts, *contents])
    return bool(text.strip()) and (
        has_mark or any(_is_image(part) and image_of_part(part) is None for part in parts)
    )


def _is_conversation(value: object) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], Mapping)


def _role(message: object) -> str | None:
    role = message.get("role") if isinstance(message, Mapping) else None
    return SPEAKERS.get(str(role).lower())


def _parts(value: object) -> list:
    """Returns all parts of the messages of a conversation."""
    if not _is_conversation(value):
        return []
    contents = [message.get("content") for message in value if isinstance(message, Mapping)]
    return [part for content in contents if isinstance(content, (list, tuple)) for part in content]


def _is_image(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _IMAGE_PARTS


class _ImagePlacer:
    """Goes through the texts of a row, and places the images of its column there in order."""

    def __init__(self, column: list[Source], location: str, folder: Path | None):
        self.column, self.location, self.folder = column, location, folder

    def filled(self, value: object, name: str, first: int) -> tuple[object, list[Source]]:
        """Returns a text or a conversation with a mark at each image, and its images; the next of
        the column is number `first`. Raises InputError for an image in a turn of the assistant, for
        parts that are neither text nor image, and for more marks than images."""
        self.images: list[Source] = []
        self.next, self.where = first, f"{self.location}, column {name!r}"
        if isinstance(value, str):
            self._text(value)
            return value, self.images
        if not _is_conversation(value):
            return value, []
        messages = [self._message(m) if isinstance(m, Mapping) else m for m in value]
        questions = [i for i, message in enumerate(messages) if _role(message) == "user"]
        if not self.images and first == 0 and self.column and questions:
            content = messages[questions[0]].get("content")
            if isinstance(content, str):
                marked = MARK * len(self.column) + content
                messages[questions[0]] = {**messages[questions[0]], "content": marked}
                self.images = list(self.column)
        return messages, self.images

    def _message(self, message: Mapping) -> dict:
        content = message.get("content")
        before = len(self.images)
        if isinstance(content, str):
            self._text(content)
        elif isinstance(content, (list, tuple)) and any(_is_image(part) for part in content):
            content = "".join(self._part(part) for part in content)
        if _role(message) == "assistant" and len(self.images) > before:
            raise InputError(
                f"{self.where}: a turn of the assistant holds an image",
                rule="the policy writes text",
                fix="remove the image, or the row",
            )
        return {**message, "content": content} if "content" in message else dict(message)

    def _text(self, text: str) -> None:
        for _ in range(text.count(MARK)):
            self._take()

    def _take(self) -> None:
        if self.next >= len(self.column):
            raise InputError(
                f"{self.where} has more places for images than the row has images",
                value=len(self.column),
                rule=f"{MARK} in a text stands for an image",
                fix="add the image to the column 'images', or take the place out",
            )
        self.images.append(self.column[self.next])
        self.next += 1

    def _part(self, part: object) -> str:
        if isinstance(part, Mapping) and part.get("type") == "text":
            text = part.get("text")
            if isinstance(text, str):
                self._text(text)
                return text
        if not _is_image(part):
            raise InputError(
                f"{self.where}: 'content' has a part that is neither text nor an image",
                value=part,
                fix='write {"type": "text", "text": "..."} or {"type": "image"}',
            )
        image = image_of_part(part)
        if image is None:
            self._take()
        else:
            location = f"{self.where}, image {len(self.images)}"
            self.images.append(source_of(image, location, self.folder))
        return MARK


def image_of_part(part: Mapping) -> object:
    """Returns the image that a part of a message names; None where a column holds it."""
    url = part.get("image_url") if part["type"] == "image_url" else None
    url = url.get("url") if isinstance(url, Mapping) else url
    names = ("image", "url", "path", "base64")
    return url or next((part[name] for name in names if part.get(name) is not None), None)


def source_of(value: object, location: str, folder: Path | None) -> Source:
    """Returns the image that a value of a column or of a part names: bytes, pixels [H, W, 3], a
    data URL, base64 or a path relative to `folder`. Raises InputError for anything else, for the
    URL of a server, and for a relative path if `folder` is None."""
    if isinstance(value, Mapping):
        data = value.get("bytes")
        value = data if data is not None else value.get("path") or value.get("image")
    if isinstance(value, (bytes, bytearray, memoryview)):
        return Source(bytes(value), location)
    if isinstance(value, np.ndarray):
        return Source(value, location)
    if not isinstance(value, str) or not value.strip():
        rule = "a path, bytes, base64 or a data URL"
        fix = "fill it in, or remove the row"
        raise InputError(f"{location} is no image", value=value, rule=rule, fix=fix)
    if value.startswith("data:"):
        return Source(data_url(value, location), location)
    value = value.removeprefix("file://")
    if _URL.match(value):
        rule = "nothing is downloaded while a run reads"
        fix = "download it, and write its path or its bytes"
        raise InputError(f"{location} is a URL", value=value[:200], rule=rule, fix=fix)
    if not value.lower().endswith(_SUFFIXES) and len(value) >= _SHORTEST:
        if _BASE64.fullmatch(value):
            return Source(_decode_base64(value, location), location)
    if folder is None and not Path(value).is_absolute():
        rule = "these rows are of no file"
        fix = "write the whole path"
        raise InputError(f"{location} is a relative path", value=value, rule=rule, fix=fix)
    return Source(str(Path(value) if folder is None else folder / value), location)


def data_url(url: str, location: str) -> bytes:
    """Returns the bytes of a data URL, data:image/png;base64,... Raises InputError for any other
    URL, and for text that is not base64."""
    kind, comma, text = url.partition(",")
    if not kind.startswith("data:") or not comma or not kind.endswith(";base64"):
        rule = "data:image/TYPE;base64,..."
        fix = f"encode the image ({', '.join(FORMATS)}) as base64"
        raise InputError(f"{location} is no data URL", value=url[:80], rule=rule, fix=fix)
    return _decode_base64(text, location)


def _decode_base64(text: str, location: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(
            f"{location} is not base64", value=text[:40], rule=str(error), fix="encode it again"
        ) from None


# Words of the names of columns that may hold an image, and beginnings of the bytes of one.
_IMAGE_WORDS = re.compile(
    "(images?|imgs?|pictures?|pics?|photos?|screenshots?|figures?|jpe?g|png|webp|gif|bmp)"
    "([^a-zA-Z]|$)"
)
_BEGINNINGS = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"II*\x00", b"MM\x00*")
_MOST_LEVELS = 8  # of lists and objects in a cell


def image_kind(name: object, value: object, depth: int = 0) -> str:
    """Returns "image" for a value that is plainly an image or a list of such: bytes, an object of
    the datasets library, a data URL, pixels of PIL; "path" for the path or URL of one in a column
    that is named so; "" for anything else."""
    if isinstance(value, Mapping) and depth < _MOST_LEVELS:
        if {"bytes", "path"} & value.keys() and image_kind("image", value.get("path"), depth + 1):
            return "image"
        kinds = [image_kind(key, item, depth + 1) for key, item in value.items()]
        return next(filter(None, kinds), "")
    if isinstance(value, (list, tuple)) and depth < _MOST_LEVELS:
        return next((image_kind(name, item, depth + 1) for item in value if item is not None), "")
    if isinstance(value, (bytes, bytearray)):
        webp = value[:4] == b"RIFF" and value[8:12] == b"WEBP"
        bmp = value[:2] == b"BM" and int.from_bytes(value[2:6], "little") == len(value)
        return "image" if webp or bmp or bytes(value[:4]).startswith(_BEGINNINGS) else ""
    if not isinstance(value, str):
        return "image" if type(value).__module__.startswith("PIL.") else ""
    if value.startswith("data:image/"):
        return "image"
    words = re.sub("([a-z0-9])([A-Z])", r"\1_\2", str(name)).lower()
    if not re.search(f"(^|[^a-z]){_IMAGE_WORDS.pattern}", words):
        return ""
    is_base64 = len(value) > 2 * _SHORTEST and " " not in value and _BASE64.fullmatch(value)
    return "path" if is_base64 or value.lower().endswith(_SUFFIXES) else ""
