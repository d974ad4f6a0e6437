"""2,000 requests that no client should send, and a client that sends bytes as they are."""

import dataclasses
import json
import random
import socket

from rljax.serving.fields import _CHAT_FIELDS, _COMPLETION_FIELDS, NEUTRAL

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD = {
    COMPLETIONS: {"prompt": '"the"', "max_tokens": "2"},
    CHAT: {"messages": '[{"role": "user", "content": "the"}]', "max_tokens": "2"},
}
MANY = '[{"role": "user", "content": "a"}' + ', {"role": "user", "content": "a"}' * 6000 + "]"


def nested(depth: int, opened: str = "[", closed: str = "]") -> str:
    return opened * depth + closed * depth


# JSON as text: half of it cannot be written by a JSON library.
VALUES = [
    "null",
    "true",
    "false",
    "0",
    "1",
    "-1",
    "2",
    "17",
    "64",
    "65",
    "3.5",
    "-0.0",
    "1e-300",
    "1e30",
    "1e400",
    "-1e400",
    "NaN",
    "Infinity",
    "-Infinity",
    "2147483647",
    "2147483648",
    "4294967296",
    "9223372036854775808",
    "1" * 400,
    "1" * 5000,
    '""',
    '"a"',
    '"0"',
    '"true"',
    '"\\u0000"',
    '"\\ud800"',
    '"\\udc00\\ud800"',
    '"\u00e9 \ud55c \U0001f642"',
    '"' + "x" * 1001 + '"',
    '"' + "ab" * 50_000 + '"',
    '"' + "\\n" * 300_000 + '"',
    "[]",
    "[[]]",
    "[null]",
    '[""]',
    '["a"]',
    "[" + ", ".join(['"a"'] * 17) + "]",
    '["' + "x" * 1001 + '"]',
    '["the", "the", "the"]',
    "[0]",
    "[5, 6, 7]",
    "[1.5]",
    "[true]",
    "[-1]",
    "[100000]",
    "[[5], [6]]",
    "[[[5]]]",
    "[" + "5, " * 100_000 + "5]",
    "[" + '"the", ' * 5000 + '"the"]',
    nested(500),
    nested(960),
    nested(100_000),
    nested(960, '{"a": ', "}").replace("}", "1}", 1),
    "{}",
    '{"a": 1}',
    '{"0": 1}',
    '{"5": -100, "6": 1e4}',
    '{"0": NaN}',
    '{"0": 1, "0": 2}',
    '{"999999": 1}',
    '{"": {}}',
    '{"\\ud800": 1}',
    '{"include_usage": true}',
    '{"include_usage": 1}',
    '{"' + "k" * 90_000 + '": 1}',
    "{" + ", ".join(f'"{i}": 1' for i in range(4000)) + "}",
    '{"type": "text"}',
    '[{"role": "user", "content": "a"}]',
    '[{"role": "user", "content": null}]',
    '[{"role": "user", "content": [{"type": "text", "text": "a"}]}]',
    '[{"role": 1, "content": ""}]',
    '[{"role": "\\ud800", "content": "\\ud800"}]',
    '[{"role": "user", "content": "the", "x": NaN}]',
    '[{"role": "user", "content": "a", "x": ' + nested(960) + "}]",
    MANY,
]


@dataclasses.dataclass(frozen=True)
class Hostile:
    """Bytes to send. `hang_up`: without waiting for an answer."""

    name: str
    raw: bytes
    hang_up: bool = False


def request(path: str, body: bytes, *, method="POST", host="127.0.0.1", more=(), length=None):
    """An HTTP/1.1 request whose connection ends with its answer."""
    head = [
        f"{method} {path} HTTP/1.1",
        f"Host: {host}",
        "Content-Type: application/json",
        f"Content-Length: {len(body) if length is None else length}",
        "Connection: close",
        *more,
    ]
    return "\r\n".join([*head, "", ""]).encode("latin-1") + body


def json_body(fields: dict[str, str]) -> bytes:
    text = ", ".join(f"{json.dumps(name)}: {value}" for name, value in fields.items())
    return f"{{{text}}}".encode()


def field_cases() -> list[Hostile]:
    """Every field of both endpoints, and fields that are not known, with every value."""
    unknown = (*NEUTRAL, "functions", "__class__", "a b\x00")
    names = {COMPLETIONS: (*_COMPLETION_FIELDS, *unknown), CHAT: tuple(_CHAT_FIELDS)}
    return [
        Hostile(f"{path} {name}={value[:40]}", request(path, json_body(GOOD[path] | {name: value})))
        for path, fields in names.items()
        for name in fields
        for value in VALUES
    ]


def mixed_cases(count: int = 600) -> list[Hostile]:
    """Four fields at a time, each as often with a value that is right for it."""
    rng, cases = random.Random(0), []
    right = {
        "prompt": "[[5, 6], [7]]",
        "n": "3",
        "max_tokens": "40",
        "temperature": "0.5",
        "top_p": "0.9",
        "top_k": "4",
        "min_p": "0.1",
        "seed": "3",
        "stop": '["a", "the"]',
        "logit_bias": '{"7": 9}',
        "stream": "true",
        "stream_options": '{"include_usage": true}',
        "echo": "true",
        "logprobs": "0",
        "best_of": "1",
        "user": '"me"',
    }
    for _ in range(count):
        fields = dict(GOOD[COMPLETIONS])
        for name in rng.sample(list(right), 4):
            fields[name] = rng.choice([right[name], rng.choice(VALUES)])
        raw = request(COMPLETIONS, json_body(fields))
        cases.append(Hostile(f"{list(fields.items())}"[:200], raw))
    return cases


def body_cases() -> list[Hostile]:
    good = json_body(GOOD[COMPLETIONS])
    bodies = {
        "not an object": b"[]",
        "text": b'"x"',
        "number": b"7",
        "empty": b"",
        "blank": b" \n ",
        "latin-1": '{"prompt": "é"}'.encode("latin-1"),
        "utf-16": good.decode().encode("utf-16"),
        "null bytes": b"\x00" * 100,
        "bytes": bytes(range(256)),
        "BOM": b"\xef\xbb\xbf" + good,
        "surrogate in UTF-8": b'{"prompt": "\xed\xa0\x80"}',
        "two values": good + good,
        "duplicate keys": b'{"prompt": 1, "prompt": "the", "n": 1, "n": 2}',
        "escaped key": b'{"\\u0070rompt": "the"}',
        "trailing comma": b'{"prompt": "the",}',
        "comment": b'{"prompt": "the"} // x',
        "single quotes": b"{'prompt': 'the'}",
        "10 MB of text": b'{"prompt": "' + b"x" * 10_000_000 + b'"}',
        "3 MB of text": b'{"prompt": "' + b"x " * 1_500_000 + b'"}',
        "3 MB of lists": b'{"prompt": [' + b"[]," * 1_000_000 + b"[]]}",
        "a list of 3 MB": b"[" + b"[]," * 1_000_000 + b"[]]",
        "3 MB of numbers": b'{"prompt": [' + b"7," * 1_500_000 + b"7]}",
        "3 MB of keys": b"{" + b",".join(b'"%d":1' % i for i in range(300_000)) + b"}",
        "half the nesting": b"[" * 3_000_000,
        "keys of nests": b'{"a":' * 600_000,
    }
    cut = {f"cut at {at}": good[:at] for at in range(0, len(good), 2)}
    flipped = {
        f"byte {at} is {byte}": good[:at] + bytes([byte]) + good[at + 1 :]
        for at in range(0, len(good), 3)
        for byte in (0, 34, 92, 255)
    }
    paths = {COMPLETIONS: bodies | cut | flipped, CHAT: bodies}
    return [
        Hostile(f"{path} {name}", request(path, body))
        for path, all_bodies in paths.items()
        for name, body in all_bodies.items()
    ]


def http_cases() -> list[Hostile]:
    good, end = json_body(GOOD[COMPLETIONS]), "\r\nConnection: close\r\n\r\n"
    post = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
    chunked = f"{post}\r\nTransfer-Encoding: chunked{end}"
    whole = b"%x\r\n%b\r\n0\r\n\r\n" % (len(good), good)
    raws = {
        "not HTTP": b"hello\r\n\r\n",
        "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,
        "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "HTTP/0.9": b"GET /health\r\n\r\n",
        "HTTP/1.0": b"GET /health HTTP/1.0\r\n\r\n",
        "HTTP/3": b"GET / HTTP/3.0\r\n\r\n",
        "no Host": b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n",
        "two Hosts": b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: b\r\n\r\n",
        "null in a header": b"GET / HTTP/1.1\r\nHost: localhost\r\nX: \x00" + end.encode(),
        "folded header": b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b" + end.encode(),
        "long header": b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000 + end.encode(),
        "many headers": b"GET / HTTP/1.1\r\nHost: localhost" + b"\r\nX: a" * 20_000 + end.encode(),
        "long path": b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: localhost" + end.encode(),
        "many lines": b"\r\n" * 10_000 + b"GET /health HTTP/1.1\r\nHost: localhost" + end.encode(),
        "no length": f"{post}{end}".encode() + good,
        "length of a word": f"{post}\r\nContent-Length: many{end}".encode() + good,
        "length below 0": f"{post}\r\nContent-Length: -5{end}".encode() + good,
        "length of 400 digits": f"{post}\r\nContent-Length: {'9' * 400}{end}".encode() + good,
        "two lengths": f"{post}\r\nContent-Length: 3\r\nContent-Length: 9{end}".encode() + good,
        "a terabyte": f"{post}\r\nContent-Length: {10**12}{end}".encode() + good,
        "short length": request(COMPLETIONS, good, length=len(good) - 3),
        "chunked": chunked.encode() + whole,
        "length and chunked": (
            f"{post}\r\nContent-Length: 4\r\nTransfer-Encoding: chunked{end}"
        ).encode()
        + whole,
        "gzip": f"{post}\r\nTransfer-Encoding: gzip{end}".encode() + good,
        "bad chunk": chunked.encode() + b"zz\r\n" + good,
        "chunk below 0": chunked.encode() + b"-1\r\n",
        "huge chunk": chunked.encode() + b"f" * 30 + b"\r\n" + good,
        "small chunks": chunked.encode() + b"1\r\n \r\n" * 60_000 + b"0\r\n\r\n",
        "bad chunk behind an answer": b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\nzz\r\n" * 9,
        "pipelined": b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 300
        + b"GET /health HTTP/1.1\r\nHost: localhost"
        + end.encode(),
        "rubbish behind a request": request(COMPLETIONS, good) + b"\x00rubbish\r\n" * 100,
        "upgrade": request(COMPLETIONS, b"", more=["Upgrade: websocket", "Connection: upgrade"]),
        "expects": request(COMPLETIONS, good, more=["Expect: 100-continue"]),
        "expects no more than a refusal": request(
            COMPLETIONS, b"", length=10**9, more=["Expect: 100-continue"]
        ),
        "compressed": request(COMPLETIONS, good, more=["Content-Encoding: gzip"]),
        "range": request(COMPLETIONS, good, more=["Range: bytes=0-1", "If-Match: *"]),
        "forwarded": request(COMPLETIONS, good, more=["X-Forwarded-For: \xff", "Forwarded: a;;"]),
        "authorized": request(COMPLETIONS, good, more=["Authorization: Bearer " + "a" * 8000]),
    }
    methods = (
        "GET",
        "HEAD",
        "PUT",
        "DELETE",
        "PATCH",
        "OPTIONS",
        "TRACE",
        "CONNECT",
        "post",
        "A" * 99,
    )
    paths = (
        COMPLETIONS,
        CHAT,
        "/v1/models",
        "/health",
        "/metrics",
        "/metrics.json",
        "/",
        "/v1",
        "/health/",
        "//health",
        "/v1/models/../../etc/passwd",
        "/%2e%2e/%00%ff",
        "/?a=%zz",
        "/v1/models/%ed%a0%80",
        "http://example.com/health",
        "*",
        "/v1/models/" + "x" * 3000,
    )
    for method in (*methods, "POST"):
        for path in paths:
            raws[f"{method[:8]} {path[:40]}"] = request(path, b"", method=method)
    for name in (
        "text/plain",
        "multipart/form-data; boundary=x",
        "application/jsonp",
        "",
        "\xff",
        "a" * 9000,
    ):
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {name}"
        raws[f"type {name[:20]!r}"] = (
            f"{head}\r\nContent-Length: {len(good)}{end}".encode("latin-1") + good
        )
    return [Hostile(name, raw) for name, raw in raws.items()]


def mutated_cases(count: int) -> list[Hostile]:
    """Requests of `http_cases` with some bytes changed, put in, taken out or written twice."""
    rng, cases = random.Random(0), []
    whole = [case.raw for case in http_cases() if len(case.raw) < 5000]
    parts = [
        b"\r\n",
        b"\n",
        b"\r",
        b"\0",
        b":",
        b" ",
        b"\r\n\r\n",
        b"0\r\n\r\n",
        b"Content-Length: 5\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Connection: upgrade\r\nUpgrade: h2c\r\n",
    ]
    for number in range(count):
        raw = rng.choice(whole)
        for _ in range(rng.randint(1, 6)):
            at, size = rng.randrange(len(raw) + 1), rng.randint(1, 40)
            new, rest = rng.choice(
                [
                    (bytes([rng.randrange(256)]), at + 1),
                    (rng.choice(parts), at),
                    (b"", at + size),
                    (raw[size : 2 * size], at),
                    (rng.choice(whole), at),
                ]
            )
            raw = raw[:at] + new + raw[rest:]
        cases.append(Hostile(f"mutated {number}", raw))
    return cases


def vanishing_cases() -> list[Hostile]:
    """Clients that leave: in the headers, in the body, while it is decoded, in the stream."""
    streamed = GOOD[COMPLETIONS] | {"max_tokens": "60", "stream": "true", "n": "3"}
    long = GOOD[CHAT] | {"max_tokens": "40", "n": "8", "user": '"' + "x" * 100_000 + '"'}
    raws = [request(COMPLETIONS, json_body(streamed)), request(CHAT, json_body(long))]
    return [
        Hostile(f"leaves at {part}/100 of {i}", raw[: len(raw) * part // 100], hang_up=True)
        for i, raw in enumerate(raws)
        for part in range(0, 101, 2)
    ]


def exchange(port: int, case: Hostile, timeout_s: float = 120) -> bytes:
    """Sends a case and returns what comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection:
        answer = bytearray()
        try:
            connection.sendall(case.raw)
            if case.hang_up:
                return b""
            while part := connection.recv(65536):
                answer += part
        except (ConnectionResetError, BrokenPipeError):  # refused while it was sent
            pass
        return bytes(answer)


def answers(raw: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    """(status, headers, body) of each answer of a connection."""
    found = []
    while raw:
        head, _, raw = raw.partition(b"\r\n\r\n")
        status, *lines = head.decode("latin-1").split("\r\n")
        headers = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in lines)}
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while (size := int(raw.partition(b"\r\n")[0] or b"0", 16)) > 0:
                raw = raw.partition(b"\r\n")[2]
                body, raw = body + raw[:size], raw[size + 2 :]
            raw = raw.partition(b"\r\n\r\n")[2]
        else:
            size = int(headers.get("content-length", 0))
            body, raw = raw[:size], raw[size:]
        code = int(status.split()[1])
        if code != 100:
            found.append((code, headers, body))
    return found
