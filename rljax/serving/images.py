"""Images in a chat request: parts {"type": "image_url"} with data URLs, checked by their headers
before a pixel is decoded. Nothing is downloaded and no file is opened.

Axes: N patches, S tokens of the prompt.
"""

import threading
from collections.abc import Mapping, Sequence

import numpy as np

from rljax.data.images.columns import data_url
from rljax.data.images.encode import Image, ImageReader
from rljax.data.images.files import MOST_PIXELS, Source
from rljax.data.images.rows import prompt_images
from rljax.errors import InputError
from rljax.sampler.prompt_images import PromptImages, of_prompt

IMAGES = 64  # of a request
_DETAILS = (None, "auto")  # the image has the size that the model's processing gives it
_decoding = threading.Lock()  # one request's pixels at a time are in memory as images have them


def split_images(messages: object) -> tuple[object, list[Source]]:
    """Returns the messages with {"type": "image"} in the place of each image, as chat templates
    expect them, and the images. Raises InputError for an image that is no data URL or not in a
    message of the user, and for too many of them. Any other malformed message stays, to be refused
    later by name."""
    sources: list[Source] = []
    if not isinstance(messages, list):
        return messages, sources
    split_messages = []
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            location, of_user = f"messages[{number}].content", message.get("role") == "user"
            parts = [
                _part(part, f"{location}[{i}]", of_user, sources) for i, part in enumerate(content)
            ]
            message = {**message, "content": parts}
        split_messages.append(message)
    return split_messages, sources


def _part(part: object, location: str, of_user: bool, sources: list[Source]) -> object:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "image":
        rule = "an image is a part of type 'image_url'"
        fix = '{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}'
        raise InputError(f"{location}.type", value=kind, rule=rule, fix=fix)
    if kind != "image_url":
        return part
    if not of_user:
        fix = "put the image into a message with role 'user'"
        raise InputError(location, value=kind, rule="images stand in messages of the user", fix=fix)
    if len(sources) == IMAGES:
        rule, fix = f"at most {IMAGES}", "fewer images"
        raise InputError("images of one request", value=f"{IMAGES + 1} or more", rule=rule, fix=fix)
    sources.append(Source(data_url(_url(part, location), location), location))
    return {"type": "image"}


def _url(part: Mapping, location: str) -> str:
    """Returns the URL of a part. Raises InputError for a field that is not known, and for anything
    but a data URL."""
    image_url = part.get("image_url")
    image_url = image_url if isinstance(image_url, Mapping) else {}
    unknown = [name for name in part if name not in ("type", "image_url")]
    unknown += [name for name in image_url if name not in ("url", "detail")]
    if unknown:
        rule = "not supported; known are type, image_url, and in it url"
        raise InputError(
            f"{location}: a field", value=unknown[0][:64], rule=rule, fix="leave it out"
        )
    if image_url.get("detail") not in _DETAILS:
        problem = f"{location}.image_url.detail"
        rule, fix = "the size of images is the model's", "leave it out, and scale the image down"
        raise InputError(problem, value=image_url["detail"], rule=rule, fix=fix)
    url = image_url.get("url")
    if not isinstance(url, str):
        fix = '{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}'
        raise InputError(f"{location}.image_url.url", value=url, rule="a string", fix=fix)
    if not url.startswith("data:"):
        rule = "a data URL: this server downloads nothing and opens no file"
        fix = 'send the image itself, as "data:image/png;base64,..."'
        raise InputError(f"{location}.image_url.url", value=url[:80], rule=rule, fix=fix)
    return url


def opened(sources: Sequence[Source], reader: ImageReader | None) -> tuple[Image, ...]:
    """Returns the images of a request, with only their headers read. Raises InputError for a model
    that reads no images, for a file that is no image, and for too many pixels."""
    if not sources:
        return ()
    if reader is None:
        rule = "this model reads text alone"
        fix = "leave the images out, or serve a model with images"
        raise InputError(sources[0].location, value=f"{len(sources)} images", rule=rule, fix=fix)
    total = 0
    for source in sources:
        total += int(np.prod(source.size()))
        if total > MOST_PIXELS:
            problem = "images of one request"
            rule, fix = f"at most {MOST_PIXELS} in all", "fewer images, or smaller ones"
            raise InputError(problem, value=f"{total} pixels or more", rule=rule, fix=fix)
    return reader.opened(sources)


def decoded(
    images: Sequence[Image], ids: Sequence[int], reader: ImageReader | None
) -> PromptImages | None:
    """Returns the images of a prompt as the sampler reads them, or None if it has none. Decoding
    takes long for large images, so it is called on a thread."""
    if not images:
        return None
    reader.check(ids, None, images)
    with _decoding:
        pixels = np.concatenate([image.read() for image in images])
    grids = np.array([image.grid for image in images])
    tokens, lengths = np.asarray(ids, np.int32)[None], np.array([len(ids)], np.int32)
    return of_prompt(prompt_images(tokens, lengths, pixels, grids, reader.vision), 0, len(ids))
