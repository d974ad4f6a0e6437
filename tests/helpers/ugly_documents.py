"""300 documents that no parser expects: of every text format at once, and of none."""

import itertools
import json
import random
import struct
import zlib

# What a reader asks for stands in one of these, so that other kinds are met at each of its levels.
EXAMPLES = (
    {
        "steps": 2,
        "model": "m",
        "batch": {"epochs": 1},
        "actor_optimizer": {"lr": 1.0},
        "trackers": ["console"],
        "sft": {"steps": 1},
    },
    {
        "prompt": [{"role": "user", "content": [{"type": "image"}]}],
        "ground_truth": "1",
        "images": ["a.png"],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "extra_info": {"index": 1},
    },
    {
        "stages": [
            {"name": "a", "metrics": {"accuracy": {"value": 1, "low": 0, "high": 1, "n": 1}}}
        ],
        "same_prompts": [{"suite": "s", "rows": [{"prompt": "p", "answers": {"a": ["x", 1]}}]}],
        "pipeline": "p",
    },
    {
        "metadata": {},
        "weight_map": {"a": "model.safetensors"},
        "model_type": "qwen3",
        "hidden_size": 8,
        "rope_parameters": {"rope_type": "default"},
        "alphabet": "ab",
    },
    {
        "version": "1.0",
        "added_tokens": [{"id": 0, "content": "<s>", "special": True}],
        "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
        "bos_token": {"content": "<s>"},
        "added_tokens_decoder": {"0": {"content": "<s>"}},
        "chat_template": "{{ 1 }}",
    },
    {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "files": {"a": {"sha256": "0", "bytes": 1}},
        "time": 1.0,
        "host": "h",
        "pid": 1,
        "metrics": {"accuracy": {"value": 1.0}},
        "checkpoint": 3,
    },
    [
        {
            "step": 1,
            "seconds": 2.0,
            "spans": {"learn": [[0, 1]]},
            "decoding": [[0, 1]],
            "scoring": [[0, 1, 1]],
        }
    ],
    {
        "step": 1,
        "prompt": "p",
        "response": "r",
        "reward": 1.0,
        "parts": {"a": 1.0},
        "status": "finished",
        "steps": 3,
        "versions": {"jax": "1"},
        "accuracy_before": {"value": 0.5},
        "command": "c",
        "git": {"commit": "a"},
        "device": "1 x cpu",
    },
)
OTHERS = (
    None,
    True,
    -1,
    1e308,
    "",
    "x\u0000\x1b[31m\x85\u2028",
    [],
    {},
    [[[]]],
    {"a": {"b": [None]}},
    "9" * 5000,
    [1, "a", None],
)


def _places(value: object, above: tuple = ()):
    yield above
    inside = value.items() if isinstance(value, dict) else ()
    inside = enumerate(value) if isinstance(value, list) else inside
    for name, item in inside:
        yield from _places(item, (*above, name))


def _with(value: object, place: tuple, other: object) -> object:
    if not place:
        return other
    value = json.loads(json.dumps(value))
    node = value
    for name in place[:-1]:
        node = node[name]
    node[place[-1]] = other
    return value


def _written() -> dict[str, bytes]:
    """Documents as they are written."""
    many = ",".join(f'"a{i}":1' for i in range(5000))
    texts = {
        "nothing": "",
        "a blank": " ",
        "a line": "\n",
        "lines": "\n" * 10_000,
        "null": "null",
        "NaN": '{"a": NaN, "step": NaN}',
        "infinity": '{"a": -Infinity, "step": Infinity}',
        "1e400": '{"a": 1e400, "step": 1e400, "steps": 1e400}',
        "-0": '{"step": -0.0}',
        "digits": '{"a": ' + "9" * 5000 + "}",
        "few digits": '{"step": ' + "9" * 400 + "}",
        "a digit of another script": '{"step": ٣}',
        "yaml digits": "steps: ٣\nseed: ²\n",
        "brackets": "[" * 100_000,
        "closed brackets": "[" * 1100 + "]" * 1100,
        "braces": '{"a":' * 50_000,
        "yaml dashes": "- " * 20_000,
        "yaml braces": "{a: " * 20_000,
        "101 levels": '{"a":' * 101 + "1" + "}" * 101,
        "99 levels": "[" * 99 + "]" * 99,
        "twice": '{"steps": 1, "steps": 2}',
        "many and one twice": "{" + many + ',"a4999":1}',
        "many": "{" + many + "}",
        "yaml twice": "steps: 1\nsteps: 2\n",
        "half a pair": '{"prompt": "\\ud800", "model": "\\udfff"}',
        "key of half a pair": '{"\\ud800": 1}',
        "a pair": '{"prompt": "\\ud83d\\ude00"}',
        "a mark": '\ufeff{"steps": 1}',
        "two marks": "\ufeff\ufeff{}",
        "zero": '{"model": "\\u0000"}',
        "zeros": "\0" * 1000,
        "controls": '{"a": "\\u001b[31m\\u0085"}',
        "raw controls": '{"a": "\x1b[31m\x85\u2028\x0b\x0c\x1c"}',
        "separators": '{"a": 1}\u2028{"b": 2}\x85{"c": 3}',
        "cut": '{"steps": 1, "model": "a',
        "cut in an escape": '{"a": "\\u12',
        "python": "{'a': None}",
        "two values": '{"a": 1} {"b": 2}',
        "comma": '{"a": 1,}',
        "comment": '{"a": 1} // b',
        "text": "hello",
        "a long key": '{"' + "k" * 100_000 + '": 1}',
        "a long text": '{"prompt": "' + "t" * 100_000 + '"}',
        "a long line of csv": "a,b\n" + "x" * 100_000 + ",y\n",
        "csv": 'a,b\n1,2,3\n"x',
        "html": "<html>404</html>",
        "csv of quotes": '"' * 9999,
        "csv header": "prompt,answer\n",
        "tabs": "\t" * 999,
        "crlf": '{"a": 1}\r\n{"a": 2}\r\n',
        "yaml aliases": "a: &a [1,1,1,1]\n"
        + "".join(
            f"{c}: &{c} [*{p},*{p},*{p},*{p}]\n" for p, c in itertools.pairwise("abcdefghijklmnopq")
        ),
        "yaml of itself": "a: &a [*a]",
        "yaml merge": "a: &a {b: 1}\nc: {<<: [*a, 3]}",
        "yaml tag": "a: !!python/name:os.system x",
        "yaml timestamp": "a: !!timestamp foo",
        "yaml bool": "a: !!bool foo",
        "yaml int": "a: !!int ''",
        "yaml date": "a: 2024-13-45",
        "yaml key": "? [a]\n: 1",
        "yaml binary": "a: !!binary '*'",
        "yaml documents": "---\na: 1\n---\nb: 2\n",
        "yaml directives": "%YAML 9.9\n---\n" * 99,
        "front matter": "---\nconfigs: [{data_files: [*x]}]\n---\n",
        "template": "{% for x in y %}",
        "template of brackets": "{{" + "(" * 5000,
        "toml": "[a]\nb = 1979-13-45\n",
        "lfs": "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        "number": "3",
        "string": '"qwen3"',
        "private use": json.dumps({"prompt": "".join(map(chr, range(0xE000, 0xF900)))}),
        "bidi": '{"a": "\u202eabc\u2066"}',
    }
    out = {name: text.encode() for name, text in texts.items()}
    out |= {
        "utf-16": '{"a": 1}'.encode("utf-16"),
        "latin-1": '{"a": "é"}'.encode("latin-1"),
        "half a character": b'{"a": "\xc3',
        "surrogate bytes": b'{"a": "\xed\xa0\x80"}',
        "overlong": b'{"a": "\xc0\x80"}',
        "binary": random.Random(0).randbytes(3000),
        "safetensors of no bytes": struct.pack("<Q", 0),
        "a huge header": struct.pack("<Q", 2**63),
        "a long header": struct.pack("<Q", 24_000_000) + b"{}",
        "a header of brackets": struct.pack("<Q", 5000) + b"[" * 5000,
        "a header twice": struct.pack("<Q", 13) + b'{"a":1,"a":2}',
        "a tensor of nothing": struct.pack("<Q", 58)
        + b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}   ',
        "shape": struct.pack("<Q", 64)
        + b'{"a":{"dtype":"F32","shape":[-1,1e9],"data_offsets":[0,null]}} ',
        "parquet": b"PAR1" + bytes(64) + struct.pack("<I", 2**31 - 1) + b"PAR1",
        "short parquet": b"PAR1PAR1",
        "zip": b"PK\x03\x04" + bytes(50),
        "empty zip": b"PK\x05\x06" + bytes(18),
        "png": b"\x89PNG\r\n\x1a\n" + bytes(40),
        "wide png": _png(2**31 - 1, 2**31 - 1, b""),
        "png of no pixels": _png(4, 4, b"x"),
        "jpeg": b"\xff\xd8\xff\xe0" + bytes(20),
        "jpeg markers": b"\xff\xd8" + b"\xff\xe1\x00\x02" * 200,
        "gif": b"GIF89a" + b"\xff" * 40,
        "webp": b"RIFF\xff\xff\xff\xffWEBPVP8 ",
        "bmp": b"BM" + b"\xff" * 60,
        "pickle": b"\x80\x05cos\nsystem\n.",
        "gzip": b"\x1f\x8b\x08" + bytes(20),
        "zlib": zlib.compress(b"x" * 100_000),
    }
    return out


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png(width: int, height: int, pixels: bytes) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", pixels), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


def documents(count: int = 300) -> dict[str, bytes]:
    """{name: bytes}: those that are written out, and for the rest other kinds at places of the
    examples, drawn evenly."""
    out = _written()
    changed = [
        (i, place, other)
        for i, example in enumerate(EXAMPLES)
        for place in _places(example)
        for other in range(len(OTHERS))
    ]
    for i, place, other in random.Random(0).sample(changed, count - len(out)):
        name = f"example {i} with {OTHERS[other]!r:.20} at {'.'.join(map(str, place)) or 'its top'}"
        value = _with(EXAMPLES[i], place, OTHERS[other])
        assert name not in out
        out[name] = json.dumps(value).encode()
    return out
