"""Images of strangers: decoded right or refused with their place, in bounded memory."""

import io
import struct
import subprocess
import sys
import textwrap
import zlib

import numpy as np
import pytest

from rljax.data.images.files import MOST_PIXELS, Source
from rljax.errors import InputError

PIL = pytest.importorskip("PIL.Image")
PLACE = "train.parquet: row 3, image 0"


def encoded(pixels, kind="PNG", mode=None, **options) -> bytes:
    image = PIL.fromarray(np.asarray(pixels)) if isinstance(pixels, np.ndarray) else pixels
    file = io.BytesIO()
    (image.convert(mode) if mode else image).save(file, kind, **options)
    return file.getvalue()


def picture(height=5, width=7, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def bomb(width: int, height: int) -> bytes:
    """A whole PNG of zeros, a thousandth of its pixels large."""

    def chunk(name: bytes, data: bytes) -> bytes:
        whole = name + data
        return struct.pack(">I", len(data)) + whole + struct.pack(">I", zlib.crc32(whole))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(min(height * (1 + 3 * width), 2**22)), 9)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("kind", ["PNG", "BMP", "GIF", "WEBP", "JPEG"])
def test_every_format_gives_its_pixels(kind):
    flat = np.full((6, 9, 3), (200, 40, 90), np.uint8)
    source = Source(encoded(flat, kind), PLACE)
    assert source.size() == (6, 9)
    np.testing.assert_allclose(source.pixels().astype(int), flat, atol=4)


def test_other_modes_are_seen_as_a_viewer_shows_them():
    alpha = np.dstack([picture(), np.full((5, 7), 255, np.uint8)])
    alpha[0, 0, 3], alpha[1, 1, 3] = 0, 128
    seen = Source(encoded(alpha), PLACE).pixels()
    np.testing.assert_array_equal(seen[0, 0], [255, 255, 255])  # on white
    half = (alpha[1, 1, :3].astype(int) * 128 + 255 * 127 + 127) // 255
    np.testing.assert_array_equal(seen[1, 1], half)
    np.testing.assert_array_equal(seen[2:], alpha[2:, :, :3])
    deep = np.array([[0, 32768, 65535]], np.uint16)
    np.testing.assert_array_equal(Source(encoded(deep), PLACE).pixels()[0, :, 0], [0, 128, 255])
    colours = PIL.fromarray(picture()).quantize(16)
    np.testing.assert_array_equal(
        Source(encoded(colours), PLACE).pixels(), np.asarray(colours.convert("RGB"))
    )
    for mode in ("L", "1", "LA"):
        want = np.asarray(PIL.fromarray(picture()).convert(mode).convert("RGB"))
        np.testing.assert_array_equal(Source(encoded(picture(), mode=mode), PLACE).pixels(), want)


@pytest.mark.parametrize("turn", range(1, 9))
def test_exif_rotation(turn):
    from PIL import ImageOps

    image = PIL.fromarray(np.repeat(np.repeat(picture(2, 3), 16, 0), 16, 1))
    exif = PIL.Exif()
    exif[0x0112] = turn
    for kind in ("PNG", "JPEG"):
        data = encoded(image, kind, exif=exif)
        want = np.asarray(ImageOps.exif_transpose(PIL.open(io.BytesIO(data))).convert("RGB"))
        source = Source(data, PLACE)
        assert source.size() == want.shape[:2]
        np.testing.assert_array_equal(source.pixels(), want)


def test_one_pixel_is_an_image():
    source = Source(encoded(picture(1, 1)), PLACE)
    assert source.size() == (1, 1) and source.pixels().shape == (1, 1, 3)


# EXIF data that hold a JPEG image of their own, as cameras write them.
THUMBNAIL = b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0" + encoded(picture(8, 8), "JPEG")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "WEBP"])
@pytest.mark.parametrize("behind", [b"", bytes(100_000), b"MotionPhoto_Data" * 9_000])
def test_a_whole_image_is_read_whatever_stands_behind_it(kind, behind):
    """Phones write films behind photos. (Of a PNG the end is looked for in its last 64 KiB.)"""
    pixels = picture(20, 30)
    for options in ({}, dict(exif=THUMBNAIL, progressive=True)) if kind == "JPEG" else ({},):
        source = Source(encoded(PIL.fromarray(pixels), kind, **options) + behind, PLACE)
        if kind != "PNG" or not behind:
            assert source.size() == (20, 30)
        assert source.pixels().shape == (20, 30, 3)


FRAMES = [PIL.fromarray(picture(seed=i)) for i in range(3)]
HOSTILE = {
    "no image": (b"\x7fELF" + bytes(100), "not a readable image"),
    "empty": (b"", "not a readable image"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>", "not a readable"),
    "tiff": (encoded(picture(), "TIFF"), "not a readable image"),
    "bomb": (bomb(60_000, 60_000), "too large.*pixels"),
    "wide": (bomb(2**31 - 1, 1), "too large|not a readable"),
    "just above": (bomb(MOST_PIXELS // 1024 + 1, 1024), "too large"),
    "cut png": (encoded(picture(64, 64))[:-40], "ends early.*copy it again"),
    "cut jpeg": (encoded(picture(64, 64), "JPEG")[:-900], "ends early"),
    "cut jpeg with a thumbnail": (
        encoded(PIL.fromarray(picture(64, 64)), "JPEG", exif=THUMBNAIL)[:-900],
        "ends early",
    ),
    "cut progressive jpeg": (
        encoded(PIL.fromarray(picture(64, 64)), "JPEG", progressive=True)[:-900],
        "ends early",
    ),
    "cut bmp": (encoded(picture(64, 64), "BMP")[:-40], "ends early"),
    "cut gif": (encoded(picture(64, 64), "GIF")[:-40], "ends early"),
    "cut webp": (encoded(picture(64, 64), "WEBP")[:-90], "ends early|not a readable"),
    "animated gif": (
        encoded(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]),
        "3 frames",
    ),
    "animated webp": (
        encoded(FRAMES[0], "WEBP", save_all=True, append_images=FRAMES[1:], lossless=True),
        "3 frames",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_images_are_refused_by_their_headers(name):
    data, says = HOSTILE[name]
    with pytest.raises(InputError, match=f"(?s){PLACE}.*({says})"):
        Source(data, PLACE).size()


def test_pixels_that_do_not_decode_name_their_place():
    data = bytearray(encoded(picture(64, 64)))
    data[len(data) // 2] ^= 255  # the checksum of the pixels is wrong
    source = Source(bytes(data), PLACE)
    assert source.size() == (64, 64)
    with pytest.raises(InputError, match=f"{PLACE} is not a readable image"):
        source.pixels()
    with pytest.raises(InputError, match=f"{PLACE}.*does not exist"):
        Source("/no/such/file.png", PLACE).size()
    with pytest.raises(InputError, match=f"{PLACE} is no image.*convert it to RGB"):
        Source(np.zeros((2, 2)), PLACE).size()


@pytest.mark.slow
def test_bombs_take_no_memory(tmp_path):
    """What bombs and the largest image that is read add to a process, in kB."""
    (tmp_path / "bomb.png").write_bytes(bomb(60_000, 60_000))
    side = int(MOST_PIXELS**0.5)
    PIL.new("RGBA", (side, side), (9, 9, 9, 99)).save(tmp_path / "large.png", compress_level=1)
    PIL.new("RGB", (16383, 16383)).save(tmp_path / "bomb.webp", lossless=True, quality=0, method=0)
    program = f"""
        import resource
        import PIL.Image, PIL.PngImagePlugin, PIL.WebPImagePlugin
        from rljax.data.images.files import Source
        from rljax.errors import InputError
        used = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = used()
        for name in ("bomb.png", "bomb.webp"):
            try:
                Source({str(tmp_path)!r} + "/" + name, "here").pixels()
            except InputError as error:
                assert "too large" in str(error), error
            else:
                raise AssertionError(name)
        bombs = used() - start
        assert Source({str(tmp_path / "large.png")!r}, "here").pixels().shape == ({side}, {side}, 3)
        print(bombs, used() - start)
    """
    run = [sys.executable, "-c", textwrap.dedent(program)]
    said = subprocess.run(run, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    bombs, largest = map(int, said.stdout.split())
    assert bombs < 50_000 and largest < 700_000, said.stdout
