"""Rows with images as token ids: a reader opens the images and counts the tokens of each.

A row in the form of `columns` goes in. `with_image_tokens` gives its texts room for the images'
tokens, so that texts and conversations are encoded as those without images. `ImageLayout`
makes the arrays of a batch (`rows`), in which all rows of a run have the same number of patches.

Axes: B rows, S tokens, N patches of a row, C pixel values of a patch.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from rljax.components import resolve
from rljax.config import NAMESPACES, Config, is_path
from rljax.data.images.columns import MARK
from rljax.data.images.files import Source
from rljax.data.images.patches import (
    ImageProcessing,
    from_hf_processor,
    image_patches,
    smart_resize,
)
from rljax.data.images.rows import image_rows, mrope_positions, prompt_images
from rljax.data.text.tokenizer import Tokenizer
from rljax.errors import InputError
from rljax.files import read_json_object
from rljax.hub import TOKENIZER, model_folder
from rljax.models.huggingface import load_config
from rljax.models.vision.config import VisionConfig

PROCESSOR = "preprocessor_config.json"
_COMBINED_PROCESSOR = "processor_config.json"  # where transformers 5 writes it, beside other parts


@dataclasses.dataclass(frozen=True)
class Image:
    """An image of a row, whose size is known and whose pixels are read when a batch needs them."""

    source: Source
    grid: tuple[int, int, int]  # frames, patch rows, patch columns
    processing: ImageProcessing

    @property
    def patches(self) -> int:
        """Returns the number of patches."""
        return int(np.prod(self.grid))

    def read(self) -> np.ndarray:
        """Reads the patches [N, C] float32. Raises InputError if the pixels cannot be decoded."""
        patches, grid = image_patches(self.source.pixels(), self.processing)
        assert grid == self.grid, (grid, self.grid)
        return patches


@dataclasses.dataclass(frozen=True)
class ImageReader:
    """The way a model reads images: its tower, the processing of pixels, and the tokens that stand
    for an image in a text."""

    vision: VisionConfig
    processing: ImageProcessing
    pad: str  # repeated, once for each token of the image
    start: str
    end: str

    def opened(self, sources: Sequence[Source]) -> tuple[Image, ...]:
        """Opens the images and reads only their headers. Raises InputError, with the row,
        for a file that is no readable image (`Source.size`) and for a size that
        `smart_resize` refuses."""
        images = []
        for source in sources:
            try:
                height, width = smart_resize(*source.size(), self.processing)
            except InputError as error:
                if str(error).startswith(source.location):
                    raise
                raise error.within(f"{source.location}: ") from None
            grid = 1, height // self.vision.patch_size, width // self.vision.patch_size
            images.append(Image(source, grid, self.processing))
        return tuple(images)

    def tokens(self, image: Image) -> int:
        """Returns the number of tokens that the decoder reads for the image."""
        return image.patches // self.vision.merge_area

    def marked(self, text: str, images: Sequence[Image]) -> str:
        """Replaces each `<image>` in the text by the tokens of the next image."""
        parts = text.split(MARK)
        sizes = [self.tokens(image) for image in images]
        runs = [f"{self.start}{self.pad * n}{self.end}" for n in sizes] + [""]
        return "".join(part + run for part, run in zip(parts, runs, strict=True))

    def expanded(self, text: str, images: Sequence[Image]) -> tuple[str, list[tuple[int, int]]]:
        """Replaces the one token of each image by as many as the image takes. Returns the text and,
        for each image, (offset in the old text, characters added). Raises InputError if the text
        has more such tokens than there are images."""
        sizes, pieces, insertions, end = iter(images), [], [], 0
        for match in re.finditer(re.escape(self.pad), text):
            image = next(sizes, None)
            if image is None:
                raise InputError(
                    f"a text holds {self.pad!r} at a place where no image stands",
                    rule=f"it is what an image is made of, and the row has {len(images)}",
                    fix="take it out of the text",
                )
            padding = self.pad * (self.tokens(image) - 1)
            pieces += [text[end : match.end()], padding]
            insertions.append((match.end(), len(padding)))
            end = match.end()
        return "".join([*pieces, text[end:]]), insertions

    def shown(self, text: str) -> str:
        """Returns the text with one image token for each image, as templates write it."""
        return re.sub(f"({re.escape(self.pad)})+", lambda match: match[1], text)

    def beginning(self, ids: Sequence[int], mask, images: Sequence[Image]) -> tuple[Image, ...]:
        """Returns the first images, as many as have all of their tokens in `ids`, the beginning of
        a conversation, where `mask` [len(ids)] is 0."""
        tokens = (np.asarray(ids) == self.vision.image_token_id) & (np.asarray(mask) == 0)
        ends = np.cumsum([self.tokens(image) for image in images])
        return tuple(images[: int(np.searchsorted(ends, tokens.sum(), side="right"))])

    def check(self, ids: Sequence[int], mask, images: Sequence[Image]) -> None:
        """Raises InputError unless `ids` holds exactly the tokens of the images. Where `mask`
        [len(ids)] is 1 the policy wrote the token, and it is not counted."""
        ids, expected = np.asarray(ids), sum(self.tokens(image) for image in images)
        image_tokens = (ids == self.vision.image_token_id) | (ids == self.vision.video_token_id)
        if mask is not None:
            image_tokens &= np.asarray(mask) == 0
        if int(image_tokens.sum()) != expected:
            raise InputError(
                f"the text has {int(image_tokens.sum())} tokens of images, its {len(images)} "
                f"images take {expected}",
                rule=f"the chat template writes {self.pad!r} for each image, and texts do not",
                fix="use the chat template that came with the model, and take such tokens out",
            )


def image_reader(config: Config, tokenizer: Tokenizer) -> ImageReader | None:
    """Makes the reader of images for a config's model; None for a model of text, and without a
    model. Raises InputError if the tokenizer cannot write the model's image tokens, or if the
    model's settings of images are not supported."""
    if not config.model:
        return None
    if is_path(config.model):
        vision = load_config(config.model).vision
    else:
        vision = resolve(config.model, NAMESPACES["model"])(tokenizer.vocab_size).vision
    if vision is None:
        return None
    processing = _processing(config, vision)
    names = {}
    for name in ("image", "start", "end"):
        number = vars(vision)[f"{name}_token_id"]
        names[name] = tokenizer.decode([number], skip_special_tokens=False)
        if tokenizer.encode(names[name]) != [number]:
            raise InputError(
                f"the tokenizer has no text for the model's {name}_token_id",
                value=number,
                rule="images stand in a text as these tokens",
                fix="use the tokenizer that came with the model; of a built-in model a task whose "
                "alphabet begins with rljax.tasks.pictures.IMAGE_CHARACTERS",
            )
    return ImageReader(vision, processing, names["image"], names["start"], names["end"])


def _processing(config: Config, vision: VisionConfig) -> ImageProcessing:
    """Returns the processing of the model's folder, within data.max_image_pixels."""
    sizes = {name: vars(vision)[name] for name in ("patch_size", "temporal_patch_size")}
    sizes["merge_size"], unit = vision.merge_size, (vision.patch_size * vision.merge_size) ** 2
    if is_path(config.model):
        folder = model_folder(config.model, TOKENIZER)
        path, settings = folder / PROCESSOR, None
        if path.exists():
            settings = read_json_object(path)
        elif (folder / _COMBINED_PROCESSOR).exists():
            path = folder / _COMBINED_PROCESSOR
            settings = read_json_object(path).get("image_processor")
        if not isinstance(settings, dict):
            raise InputError(
                f"{folder / PROCESSOR} does not exist",
                rule="it, or 'image_processor' of processor_config.json, says how the model's"
                " images are made",
                fix=f"copy {PROCESSOR} from where the model comes from",
            )
        processing = from_hf_processor(settings)
        different = {k: v for k, v in sizes.items() if vars(processing)[k] != v}
        if different:
            name = next(iter(different))
            rule = f"config.json says {different[name]}"
            fix = "take both files from the same model"
            raise InputError(f"{path}: {name}", value=vars(processing)[name], rule=rule, fix=fix)
    else:
        halves = (0.5, 0.5, 0.5)
        processing = ImageProcessing(**sizes, min_pixels=unit, mean=halves, std=halves)
    max_pixels = config.data.max_image_pixels
    if not max_pixels:
        return processing
    if max_pixels < unit:
        raise InputError(
            "data.max_image_pixels",
            value=max_pixels,
            rule=f"at least one token of the model, {unit}",
            fix="--config.data.max_image_pixels=0, which keeps the model's own limit, or a greater "
            "number",
        )
    min_pixels = min(processing.min_pixels, max_pixels)
    return dataclasses.replace(processing, min_pixels=min_pixels, max_pixels=max_pixels)


def with_image_tokens(
    record: dict, tokenizer: Tokenizer, reader: ImageReader | None
) -> tuple[dict, Tokenizer, tuple[Image, ...]]:
    """Returns (the record with the tokens of its images in its texts, the tokenizer for its
    conversations, its images); a record without images stays as it is. Raises InputError if the
    model reads no images, or for an image that cannot be opened."""
    sources = record.get("images") or ()
    if not sources:
        return record, tokenizer, ()
    if reader is None:
        raise InputError(
            f"{sources[0].location}: the model reads no images",
            value=f"{len(sources)} images",
            rule="its config.json has no vision tower that is known",
            fix="name a model with images, or remove the column",
        )
    images = reader.opened(sources)
    texts = {
        name: reader.marked(record[name], images)
        for name in ("prompt", "text")
        if isinstance(record.get(name), str)
    }
    return {**record, **texts}, _ImageTokens(tokenizer, reader, images), images


class _ImageTokens(Tokenizer):
    """The tokenizer of one row: its template sees the images of the messages, and each of them has
    its tokens in the rendered text."""

    def __init__(self, tokenizer: Tokenizer, reader: ImageReader, images: tuple[Image, ...]):
        self._tokenizer, self._reader, self._images = tokenizer, reader, images
        names = "vocab_size pad_id bos_id eos_ids special_ids template_ids turn_ends variables"
        for name in (*names.split(), "closing_tags", "has_chat_template", "context_free"):
            setattr(self, name, getattr(tokenizer, name))
        self.image_mark = MARK

    def encode_with_offsets(self, text):
        return self._tokenizer.encode_with_offsets(text)

    def encode(self, text, add_special_tokens=False):
        return self._tokenizer.encode(text, add_special_tokens)

    def decode(self, ids, skip_special_tokens=True):
        return self._tokenizer.decode(ids, skip_special_tokens)

    def reads_as_written(self, ids):
        return self._tokenizer.reads_as_written(ids)

    def render_chat(self, messages, **options):
        text = self._tokenizer.render_chat(_with_parts(messages), **options)
        return self._reader.expanded(text, self._images)[0]

    def render_marked(self, messages, *, text=None, **options):
        # `text` has the images' tokens already.
        text, spans = self._tokenizer.render_marked(_with_parts(messages), **options)
        expanded, insertions = self._reader.expanded(text, self._images)
        if spans is None:
            return expanded, None

        def shifted(position):
            return position + sum(count for index, count in insertions if index <= position)

        return expanded, [(shifted(a), shifted(b)) for a, b in spans]

    def vocabulary(self):
        return self._tokenizer.vocabulary()

    def save(self, folder):
        self._tokenizer.save(folder)

    def fingerprint(self):
        return self._tokenizer.fingerprint()


def _with_parts(messages: Sequence[Mapping]) -> list[dict]:
    """Returns the messages with parts of text and images in place of texts with marks."""
    return [
        {**message, "content": _parts(message["content"])}
        if isinstance(message.get("content"), str) and MARK in message["content"]
        else dict(message)
        for message in messages
    ]


def _parts(text: str) -> list[dict]:
    parts: list[dict] = []
    for number, piece in enumerate(text.split(MARK)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts


def cut_example(
    ids: list[int], mask: list[int], images: tuple[Image, ...], limit: int, reader: ImageReader
) -> tuple[list[int], list[int], tuple[Image, ...]]:
    """Returns the first `limit` tokens of an example at most, and the images that are whole in
    them: the example ends before the first token of an image that would be cut. ids, mask: [n]."""
    columns = np.flatnonzero(
        (np.asarray(ids) == reader.vision.image_token_id) & (np.asarray(mask) == 0)
    )
    start, count = 0, 0  # (of an example that was cut before, tokens of images are missing)
    for image in images:
        stop = start + reader.tokens(image)
        if stop > len(columns) or columns[stop - 1] >= limit:
            limit = min(limit, int(columns[start])) if start < len(columns) else limit
            break
        start, count = stop, count + 1
    return ids[:limit], mask[:limit], images[:count]


@dataclasses.dataclass(frozen=True)
class ImageLayout:
    """Layout of the images of a run's rows in arrays: every row has room for `patches`."""

    vision: VisionConfig
    patches: int

    @property
    def fields(self) -> dict[str, int]:
        """Sizes of the axes that only arrays of images have, by the letter of the axis."""
        return {"N": self.patches, "C": self.vision.patch_values, "F": 4, "R": 3}

    def rows(
        self, arrays: Mapping[str, np.ndarray], images: Sequence[Sequence[Image]]
    ) -> dict[str, np.ndarray]:
        """Returns pixels [B, N, C], patch_coords [B, N, 4] and rope_positions [B, S, 3] for rows
        with tokens, segment_ids and mask [B, S]; `images` are those of each row. Raises InputError
        if the images do not fit the rows' tokens, or take more than `patches` patches (N) in a
        row."""
        tokens, segments, mask = (arrays[name] for name in ("tokens", "segment_ids", "mask"))
        pixels, grids = _read_patches(images)
        options = dict(policy_mask=mask)
        pixels, coords = image_rows(
            tokens, segments, pixels, grids, self.vision, patches=self.patches, **options
        )
        positions, _ = mrope_positions(tokens, segments, grids, self.vision, **options)
        return dict(pixels=pixels, patch_coords=coords, rope_positions=positions)

    def prompts(
        self, tokens: np.ndarray, lengths: np.ndarray, images: Sequence[Sequence[Image]]
    ) -> dict[str, np.ndarray]:
        """Returns the arrays of `Prompts.images` (`prompt_images`) for right-padded prompts: tokens
        [P, L], lengths [P], and the images of each prompt."""
        return prompt_images(
            tokens, lengths, *_read_patches(images), self.vision, patches=self.patches
        )


def _read_patches(images: Sequence[Sequence[Image]]) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Returns the patches of all images one after another, each read once, and their grids; None
    for both without images."""
    all_images = [image for row in images for image in row]
    patches: dict[int, np.ndarray] = {}
    for image in all_images:
        if id(image) not in patches:
            patches[id(image)] = image.read()
    if not all_images:
        return None, None
    grids = np.array([image.grid for image in all_images])
    return np.concatenate([patches[id(image)] for image in all_images]), grids


def layout_of(
    reader: ImageReader | None, rows: Iterable[Sequence[Image]], most_tokens: int = 0
) -> ImageLayout | None:
    """Returns the layout of rows with these images; None if no row has one. `most_tokens` is the
    length of the longest row of a stream, whose later rows are unknown; 0 if there is no stream."""
    sizes = [sum(image.patches for image in row) for row in rows]
    most_patches = max(sizes, default=0)
    if reader is None or not most_patches:
        return None
    return ImageLayout(reader.vision, max(most_patches, most_tokens * reader.vision.merge_area))
