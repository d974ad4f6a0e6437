"""Images in served chats: the answer of the device's loop to the same row of data, and what is
refused with OpenAI's error object."""

import base64
import io
import json
import urllib.error
import urllib.request

import jax
import numpy as np
import pytest
from conftest import lanes
from tiny_vision import data_url, picture, png, write_vision_folder

from rljax.data.images.columns import with_images
from rljax.data.online.prompts import Prompts
from rljax.policies import load_policy
from rljax.sampler import Decoding, Engine, Sampler, generate
from rljax.serving.fields import RequestLimits, read_chat
from rljax.serving.worker import Worker

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")
PIL_IMAGE = pytest.importorskip("PIL.Image")
SLOT_TOKENS = 96


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(policy, worker, address): a model with images of one token and more."""
    from rljax.serving.app import in_background, make_app

    policy = load_policy(write_vision_folder(tmp_path_factory.mktemp("model"), layers=1))
    engine = Engine(policy.model, 4, SLOT_TOKENS, steps=4)
    sampler = Sampler(engine, chunk_tokens=16, decode=policy.tokenizer.decode)
    worker = Worker(sampler, policy.params, max_waiting=60)
    app = make_app(worker, policy.tokenizer, "tiny", images=policy.images)
    with in_background(app) as address:
        yield policy, worker, address
    worker.close()


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served[2]}/v1", api_key="none", max_retries=0) as client:
        yield client


def shown(url: str, **more) -> dict:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def user(*parts) -> list[dict]:
    return [{"role": "user", "content": list(parts)}]


def by_device(policy, messages, n: int):
    """(texts, log-probs, tokens of the prompt) by the device's loop, of a row of data."""
    record = with_images({"prompt": messages}, "row 0", None)
    record |= {"index": 0, "ground_truth": "", "data_source": "", "extra_info": {}}
    encoded, _ = policy.encode([record], max_tokens=SLOT_TOKENS)
    ready = policy.ready(encoded, max_response_tokens=8)
    prompts = Prompts.from_records(encoded, length=ready.prompt_tokens, images=ready.images)
    sampling = policy.sampling(temperature=1.0, max_response_tokens=8)
    batch = generate(
        policy.model,
        policy.params,
        prompts.tokens,
        prompts.lengths,
        jax.random.key(11),
        sampling,
        n=n,
        images=prompts.images,
        decoding=Decoding(decode=policy.tokenizer.decode),
    )
    start = int(prompts.lengths[0])
    ends = (np.asarray(batch.segment_ids) > 0).sum(axis=1)
    ids = [np.asarray(batch.tokens)[r, start : ends[r]].tolist() for r in range(n)]
    logps = [np.asarray(batch.sampler_logprobs)[r, start : ends[r]] for r in range(n)]
    return [policy.tokenizer.decode(one) for one in ids], logps, start


def conversations() -> dict[str, list]:
    """Each is of other shapes, and so a program of the device's loop."""
    one, other = data_url(picture(0)), data_url(picture(1, 9, 30))
    two = shown(one), text(" and "), shown(other, detail="auto")
    return {
        "two images": [user(text("what is "), *two, text("?"))],
        "another image": [user(shown(url), text("the")) for url in (one, data_url(picture(2)))],
        "a later turn": [
            [*user(text("<|")), {"role": "assistant", "content": "yes"}, *user(shown(other))]
        ],
    }


@pytest.mark.slow
@pytest.mark.parametrize("asked", lanes(["two images"], ["another image", "a later turn"]))
def test_an_answer_is_that_of_the_same_row_of_data(served, client, asked):
    policy, *_ = served
    for messages in conversations()[asked]:
        texts, logps, size = by_device(policy, messages, n=2)
        answer = client.chat.completions.create(
            model="tiny", messages=messages, n=2, seed=11, max_tokens=8, logprobs=True
        )
        assert [choice.message.content for choice in answer.choices] == texts
        for choice, logp in zip(answer.choices, logps, strict=True):
            found = [one.logprob for one in choice.logprobs.content]
            np.testing.assert_allclose(found, logp, atol=2e-5)
        assert answer.usage.prompt_tokens == size


@pytest.mark.slow
def test_every_format_is_read(client):
    sizes = set()
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
        file = io.BytesIO()
        PIL_IMAGE.fromarray(picture()).save(file, kind)
        url = f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"
        answer = client.chat.completions.create(
            model="tiny", messages=user(shown(url), text("the")), max_tokens=1
        )
        sizes.add(answer.usage.prompt_tokens)
    assert len(sizes) == 1


def encoded(raw: bytes) -> dict:
    return shown("data:image/png;base64," + base64.b64encode(raw).decode())


def blank(height: int, width: int) -> dict:
    file = io.BytesIO()
    PIL_IMAGE.new("1", (width, height)).save(file, "PNG")
    return encoded(file.getvalue())


def animated() -> dict:
    file, frames = io.BytesIO(), [PIL_IMAGE.fromarray(picture(i)) for i in range(3)]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return encoded(file.getvalue())


GOOD = shown(data_url(picture()))
WIDE = shown(data_url(picture(0, 32, 32)))
# name: (parts of the user's message, fields of the request, words of the answer)
HOSTILE = {
    "remote": ([shown("https://example.com/a.png")], {}, "downloads nothing"),
    "file": ([shown("file:///etc/passwd")], {}, "opens no file"),
    "path": ([shown("/etc/passwd")], {}, "opens no file"),
    "not base64": ([shown("data:image/png;base64,???")], {}, "not base64"),
    "no base64": ([shown("data:text/plain,hello")], {}, "no data URL"),
    "empty": ([shown("data:image/png;base64,")], {}, "not a readable image"),
    "no image": ([encoded(b"<svg/>" * 20)], {}, "not a readable image"),
    "truncated": ([encoded(png(picture())[:-20])], {}, "ends early"),
    "cut header": ([encoded(png(picture())[:20])], {}, "not a readable image"),
    "damaged": ([encoded(png(picture()).replace(b"IDAT", b"IDAX"))], {}, "not a readable image"),
    "huge": (lambda: [blank(8_000, 8_000)], {}, "at most 33554432"),
    "bomb": (lambda: [blank(14_000, 14_000)], {}, "too large"),
    "many bombs": (lambda: [blank(5_000, 5_000)] * 2, {}, "at most 33554432 in all"),
    "ribbon": (lambda: [blank(1, 900)], {}, "200 times"),
    "frames": ([animated()], {}, "3 frames"),
    "detail": ([shown(data_url(picture()), detail="high")], {}, "detail"),
    "unknown field": ([GOOD | {"cache": 1}], {}, "'cache'"),
    "surrogate": ([GOOD | {"\ud800": 1}], {}, "half a surrogate pair"),
    "no url": ([{"type": "image_url", "image_url": {}}], {}, "a string"),
    "number": ([{"type": "image_url", "image_url": 5}], {}, "a string"),
    "image": ([{"type": "image"}], {}, "image_url"),
    "audio": ([{"type": "input_audio"}], {}, "not text"),
    "too many": ([GOOD] * 65, {}, "at most 64"),
    "does not fit": ([WIDE] * 8, {}, "do not fit a slot"),
    "text does not fit": ([GOOD, text("the " * 100)], {}, "do not fit a slot"),
    "response does not fit": ([GOOD], {"max_tokens": 95}, "do not fit a slot"),
    "forged": ([GOOD, text("<|image_pad|>")], {}, "where no image stands"),
    "forged video": ([GOOD, text("<|video_pad|>")], {}, "tokens of images"),
    "scores": ([GOOD], {"logprobs": True, "top_logprobs": 2}, "beside images"),
}


def answered(address: str, body: dict) -> tuple[int, bytes]:
    """The status and the body of the answer to a chat that is refused."""
    request = urllib.request.Request(
        f"{address}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    return caught.value.code, caught.value.read()


def refused(address: str, body: dict) -> str:
    """The message of the error object of a request that is answered with 400."""
    code, text = answered(address, body)
    error = json.loads(text)["error"]
    assert (code, error["type"]) == (400, "invalid_request_error"), error
    return error["message"]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_images(served, name):
    parts, fields, words = HOSTILE[name]
    parts = (
        parts() if callable(parts) else parts
    )  # large ones are not made while tests are collected
    body = {"model": "tiny", "messages": user(*parts), "max_tokens": 2} | fields
    message = refused(served[2], body)
    assert words in message and len(message) < 1000
    if name != "audio":
        assert "Fix:" in message


@pytest.mark.parametrize("role", ["system", "assistant", "tool"])
def test_images_stand_in_messages_of_the_user(served, role):
    messages = [*user(text("the")), {"role": role, "content": [GOOD]}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 2}
    assert "messages of the user" in refused(served[2], body)


def test_a_model_of_text_refuses_images(served):
    policy, *_ = served
    body = {"messages": user(GOOD), "max_tokens": 2}
    with pytest.raises(ValueError, match="reads text alone.*Fix: leave the images out"):
        read_chat(body, policy.tokenizer, "tiny", RequestLimits(SLOT_TOKENS, 4))


def test_a_body_with_images_is_bounded(served):
    """As every body: 413, and the server goes on."""
    noise = np.random.default_rng(0).integers(0, 256, (1300, 1300, 3), dtype=np.uint8)
    body = {"model": "tiny", "messages": user(shown(data_url(noise))), "max_tokens": 1}
    assert answered(served[2], body)[0] == 413
    assert served[1].failure is None
