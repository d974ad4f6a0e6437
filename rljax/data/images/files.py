"""Images as rows hold them: files, encoded bytes or pixels, and their decoding in bounded memory.

The header (format, size, frames, orientation) is checked before a pixel is decoded. Pixels
are decoded when a batch needs them. `columns` finds the images of a row, `patches` cuts them up.

Axes: H and W pixels.
"""

import contextlib
import dataclasses
import hashlib
import io
import os
import re
import warnings
from collections.abc import Iterator

import numpy as np

from rljax.errors import InputError
from rljax.files import open_file

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MOST_BYTES = 2**27  # of an encoded image
MOST_PIXELS = 2**25  # of a decoded one: about 400 MB while it is converted
_TAIL = 2**16  # bytes at the end of a PNG file, among which its end is looked for
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")  # behind the coded pixels of a scan
_ORIENTATION = 0x0112  # the EXIF tag
# Its value, and the turn of the stored pixels as (transposed, steps through rows and columns).
_REVERSED = ((1, 1), (1, -1), (-1, -1), (-1, 1))
_ORIENTATIONS = {n + 1: (n > 3, *_REVERSED[n % 4]) for n in range(8)}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Source:
    """One image of a row: the path of a file, its bytes, or pixels [H, W, 3] uint8. `location`
    names it in errors."""

    data: str | bytes | np.ndarray
    location: str

    def __repr__(self) -> str:
        """Returns a text that identifies the image by its content, wherever it lies: part of a data
        set's fingerprint."""
        if isinstance(self.data, str):
            with contextlib.suppress(OSError, ValueError):  # a zero byte
                return f"image {os.path.basename(self.data)}, {os.path.getsize(self.data)} bytes"
            return f"image {os.path.basename(self.data)}"
        content = self.data if isinstance(self.data, bytes) else self.data.tobytes()
        return f"image {hashlib.sha256(content).hexdigest()}"

    def size(self) -> tuple[int, int]:
        """Returns (height, width) in pixels as the image is shown, read from the header alone.
        Raises InputError for data that is no image, for too many pixels or bytes, for several
        frames, and for a file that ends early."""
        if isinstance(self.data, np.ndarray):
            return self._checked_pixels().shape[:2]
        with self._open() as (image, file):
            self._check_end(image.format, file)
            width, height = image.size
            return (width, height) if _ORIENTATIONS[_orientation(image)][0] else (height, width)

    def pixels(self) -> np.ndarray:
        """Decodes the pixels [H, W, 3] uint8: turned as EXIF says, transparency on white, 16 bits
        as 8. Raises InputError for data that is no image, for too many pixels or bytes, and for
        several frames."""
        if isinstance(self.data, np.ndarray):
            return self._checked_pixels()
        with self._open() as (image, _):
            transposed, rows, columns = _ORIENTATIONS[_orientation(image)]
            pixels = _rgb(image)
        pixels = pixels.swapaxes(0, 1) if transposed else pixels
        return np.ascontiguousarray(pixels[::rows, ::columns])

    def _checked_pixels(self) -> np.ndarray:
        pixels = self.data
        if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8:
            raise InputError(
                f"{self.location} is no image",
                value=(pixels.shape, str(pixels.dtype)),
                rule="an array of pixels is [height, width, 3] of uint8",
                fix="convert it to RGB",
            )
        self._check_size(*pixels.shape[:2])
        return pixels

    @contextlib.contextmanager
    def _open(self) -> Iterator[tuple]:
        """Opens the image: yields (the image, of which the header alone is read, the file)."""
        pillow = _pillow(self.location)
        try:
            with self._file() as file:
                with warnings.catch_warnings():
                    # Pillow's own bounds warn, and refuse where ours have refused before.
                    warnings.simplefilter("ignore")
                    image = pillow.open(file, formats=FORMATS)
                    self._check_size(image.height, image.width)
                    if image.format in ("PNG", "GIF", "WEBP") and image.is_animated:
                        raise InputError(
                            f"{self.location} has {image.n_frames} frames",
                            rule="an image has one",
                            fix="save the frame that is meant as an image of its own",
                        )
                    yield image, file
        except InputError:
            raise
        except pillow.DecompressionBombError as error:
            raise _too_large(self.location, str(error)) from None
        except Exception as error:  # Pillow has no class for the faults of a file
            first = next(iter(str(error).splitlines()), "").partition(" <_io")[0]
            raise InputError(
                f"{self.location} is not a readable image",
                rule=f"{type(error).__name__}: {first}",
                fix=f"one of {', '.join(FORMATS)}, whole; copy it again, or remove the row",
            ) from None

    def _file(self):
        if isinstance(self.data, bytes):
            if len(self.data) > MOST_BYTES:
                raise _too_large(self.location, f"{len(self.data)} bytes, at most {MOST_BYTES}")
            return io.BytesIO(self.data)
        try:
            return os.fdopen(open_file(self.data, MOST_BYTES), "rb")
        except InputError as error:
            raise error.within(f"{self.location}: ") from None

    def _check_size(self, height: int, width: int) -> None:
        if height * width > MOST_PIXELS:
            raise _too_large(self.location, f"{width} x {height} pixels, at most {MOST_PIXELS}")

    def _check_end(self, kind: str, file) -> None:
        """Raises InputError for a file that was cut: its header would only fail when it is read."""
        length = file.seek(0, os.SEEK_END)
        file.seek(max(length - _TAIL, 0))
        tail = file.read(_TAIL)
        file.seek(0)
        head = file.read(8)
        file.seek(0)
        if kind == "PNG":
            is_whole = b"IEND" in tail
        elif kind == "WEBP":
            is_whole = int.from_bytes(head[4:], "little") + 8 <= length
        elif kind == "BMP":
            is_whole = int.from_bytes(head[2:6], "little") <= length
        elif kind == "GIF":
            is_whole = _gif_ends(file.read())
        else:  # phones write films and depths behind a photo
            is_whole = tail.endswith(b"\xff\xd9") or _jpeg_ends(file.read())
        file.seek(0)
        if not is_whole:
            raise InputError(
                f"{self.location} ends early",
                value=f"{length} bytes",
                rule=f"a {kind} file has an end, and this one lacks it",
                fix="copy it again",
            )


def _jpeg_ends(data: bytes) -> bool:
    """Returns whether the end of a JPEG image, not that of a thumbnail in its header, is there."""
    position = 2
    while position + 4 <= len(data):
        if data[position] != 0xFF or data[position + 1] == 0xFF:
            position += 1
            continue
        marker = data[position + 1]
        position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
        if marker == 0xDA:  # a scan: coded pixels up to the next marker
            next_marker = _JPEG_MARKER.search(data, position)
            if next_marker is None:
                return False
            position = next_marker.start()
            if data[position + 1] == 0xD9:
                return True
    return False


def _gif_ends(data: bytes) -> bool:
    """Returns whether the trailer of a GIF file is there, behind all its blocks."""

    def table(flags):
        return 3 * 2 ** ((flags & 7) + 1) if flags & 0x80 else 0

    position = 13 + table(data[10])
    while position + 10 < len(data) and data[position] in b"\x21\x2c":
        position += 2 if data[position] == 0x21 else 11 + table(data[position + 9])
        while position < len(data) and data[position]:  # parts, each behind its length
            position += 1 + data[position]
        position += 1
    return position < len(data) and data[position] == 0x3B


def _too_large(location: str, rule: str) -> InputError:
    return InputError(f"{location} is too large", rule=rule, fix="scale it down, or remove the row")


def _pillow(location: str):
    try:
        import PIL.Image
    except ImportError:
        raise InputError(
            f"{location}: the package pillow, which reads images, is not installed",
            fix="pip install 'pillow>=11'",
        ) from None
    return PIL.Image


def _orientation(image) -> int:
    """Reads the EXIF orientation of the pixels, 1 to 8; 1 = not at all."""
    if image.format == "PNG" and "exif" not in image.info:
        return 1  # Pillow would decode the whole file to look for it behind the pixels
    orientation = image.getexif().get(_ORIENTATION, 1)
    return orientation if orientation in _ORIENTATIONS else 1


def _rgb(image) -> np.ndarray:
    """Returns the pixels of an image of any mode [H, W, 3] uint8."""
    if image.mode == "I" or image.mode.startswith("I;16"):
        grey = np.clip(np.asarray(image), 0, 2**16 - 1).astype(np.uint32)
        levels = ((grey * 255 + 32767) // 65535).astype(np.uint8)
        return np.repeat(levels[..., None], 3, axis=2)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        return _on_white(np.asarray(image.convert("RGBA")))
    return np.asarray(image.convert("RGB"))


def _on_white(pixels: np.ndarray) -> np.ndarray:
    """Returns pixels [H, W, 4] with transparency as [H, W, 3] on a white ground. It computes a row
    at a time, to save memory."""
    white = np.empty((*pixels.shape[:2], 3), np.uint8)
    for row, white_row in zip(pixels, white, strict=True):
        opaque = row[:, 3:].astype(np.uint32)
        white_row[:] = (row[:, :3] * opaque + 255 * (255 - opaque) + 127) // 255
    return white
