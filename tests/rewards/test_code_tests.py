"""Unit-test rewards: forms of tests, verdicts, scores, and programs that want one for nothing."""

import json
import os
import sys

import pytest
from conftest import worked_example
from hostile_programs import CHEATS, SQUARE
from spent import at_most

from rljax.errors import InputError
from rljax.rewards import code_tests
from rljax.rewards.pool.pool import RewardPool
from rljax.rewards.sandbox import tiers
from rljax.rewards.sandbox.tiers import sandbox_tier
from rljax.rewards.sandbox.values import encode
from rljax.rewards.unit_tests.code_forms import (
    extract_program,
    read_tests,
    same_output,
    same_value,
    unit_test_score,
)
from rljax.rewards.unit_tests.code_run import run_tests
from rljax.rollout import Reward


@pytest.fixture(scope="module", autouse=True)
def tier():
    try:
        return sandbox_tier()
    except InputError as error:
        pytest.skip(str(error))


def verdicts(program, tests, **options):
    options = {"timeout_s": 60.0, "total_timeout_s": 200.0, **options}
    return run_tests(program, read_tests(tests), **options)


def statuses(program, tests, **options):
    return [verdict.status for verdict in verdicts(program, tests, **options)]


# -- scores


def test_scores_give_the_worked_example():
    example = worked_example("reward.unit_test")
    for scale, expected in example["outputs"].items():
        found = [unit_test_score(passed, scale) for passed in example["inputs"]["passed"]]
        assert found == pytest.approx(expected, abs=1e-6), scale


def test_no_tests_are_an_error():
    for scale in ("binary", "signed", "fraction"):
        with pytest.raises(InputError, match="there are none"):
            unit_test_score([], scale)
    with pytest.raises(InputError, match="scale"):
        unit_test_score([True], "percent")


GCD = {"asserts": ["assert gcd(12, 18) == 6", "assert gcd(7, 5) == 1", "assert gcd(9, 0) == 9"]}
NAME_ERROR = "```python\ndef gcd(a, b):\n    while b:\n        a, b = b, a % c\n    return a\n```"
ENDLESS = "```python\ndef gcd(a, b):\n    while b:\n        a, b = a, a % b + 1\n    return a\n```"
CORRECT = (
    "Euclid:\n```python\ndef gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a\n```"
)


@pytest.mark.parametrize(
    "scale, expected", [("signed", [-1, 1]), ("binary", [0, 1]), ("fraction", [1 / 3, 1, 1 / 3])]
)
def test_three_programs_for_the_gcd(scale, expected):
    """NameError, correct, and once an endless loop; gcd(9, 0) needs no loop."""
    responses, endless = [NAME_ERROR, CORRECT, ENDLESS][: len(expected)], len(expected) - 2
    options = f"scale={scale!r}, timeout_s={2.0 if endless else 60.0}, total_timeout_s=200.0"
    with RewardPool(f"code_tests({options})", workers=1, timeout_s=300.0) as pool:
        truth = json.dumps(GCD)
        scores = pool.score([{"response": r, "ground_truth": truth} for r in responses])
    # A time-out of the program is a score.
    assert [score.status for score in scores] == ["ok"] * len(responses)
    assert [score.value for score in scores] == pytest.approx(expected)
    assert [score.parts["tests_timeout"] for score in scores] == [0, 0, 2][: len(responses)]
    assert [score.parts["tests_error"] for score in scores] == [2, 0, 0][: len(responses)]
    rates = [1 / 3, 1, 1 / 3][: len(responses)]
    assert [score.parts["pass_rate"] for score in scores] == pytest.approx(rates)


def test_every_verdict_has_its_time_and_says_why():
    program = """
import time
n = int(input())
if n == 1: time.sleep(0.2)
if n == 2: raise KeyError("two")
if n == 3: time.sleep(3600)
if n == 4: x = bytearray(100 << 30)
if n == 5: print("wrong")
if n == 6: print("x" * 10_000_000)
if n == 7: import os; os.abort()
print(n)
"""
    tests = {"inputs": [str(n) for n in range(8)], "outputs": [str(n) for n in range(8)]}
    found = verdicts(program, tests, timeout_s=3.0, total_timeout_s=100.0)
    assert [v.status for v in found] == [
        "passed",
        "passed",
        "error",
        "timeout",
        "memory",
        "failed",
        "output",
        "killed",
    ]
    assert 0.2 <= found[1].seconds and 3.0 <= found[3].seconds
    words = ["", "", "KeyError: 'two'", "3.0 s", "MemoryError", "wrong", "bytes of stdout", "6"]
    assert all(word in v.message for word, v in zip(words, found, strict=True))


def test_the_time_of_all_tests_is_bounded():
    tests = {"inputs": ["x"] * 100, "outputs": ["x"] * 100}
    found = verdicts("while True: pass", tests, timeout_s=3600.0, total_timeout_s=0.5)
    assert [v.status for v in found] == ["timeout"] * 100
    assert all("used up the time" in v.message for v in found[1:])


def test_the_tests_behind_a_failure_may_be_left_out():
    tests = {"inputs": [[n] for n in range(5)], "outputs": [0, 1, -1, 3, 4], "fn_name": "f"}
    found = statuses("def f(x): return x", tests, stop_at_failure=True)
    assert found == ["passed", "passed", "failed"]


def test_one_call_that_ends_the_program_does_not_fail_the_others():
    tests = {"inputs": [[n] for n in range(4)], "outputs": list(range(4)), "fn_name": "f"}
    program = (
        "import os\ndef f(x):\n    if x == 1: os._exit(0)\n    while x == 2: pass\n    return x"
    )
    assert statuses(program, tests, timeout_s=2.0) == ["passed", "error", "timeout", "passed"]
    asserts = {"asserts": [f"assert f({n}) == {n}" for n in range(4)]}
    assert statuses(program, asserts, timeout_s=2.0) == ["passed", "error", "timeout", "passed"]


# -- nothing for nothing


def assert_no_score(names, forms):
    for name in names:
        for form in forms:
            options = {"timeout_s": 1.0, "total_timeout_s": 4.0}
            parts = code_tests(CHEATS[name], json.dumps(SQUARE[form]), **options)
            assert (parts["score"], parts["pass_rate"]) == (-1.0, 0.0), (name, form, parts)


def test_a_program_that_cheats_has_no_score():
    assert_no_score(list(CHEATS), ["asserts"])


@pytest.mark.slow
def test_a_program_that_cheats_has_no_score_in_any_form():
    assert_no_score(list(CHEATS), list(SQUARE))


def test_what_the_cheats_are_measured_with_can_be_passed():
    program = "def square(x): return x * x\nif __name__ == '__main__': print(square(int(input())))"
    for form, tests in SQUARE.items():
        assert set(statuses(program, tests)) == {"passed"}, form


def test_a_returned_object_has_no_say_in_the_comparison():
    """What a test asks it with an expected value in hand is not put to the program."""
    program = """
class Yes:
    def __getattr__(self, name): return lambda *a, **k: True
    def __eq__(self, o): return True
    def __contains__(self, o): return True
    def __lt__(self, o): return True
    __gt__ = __le__ = __ge__ = __eq__
    def __hash__(self): return 1
    def __len__(self): return 1
def f(x): return Yes()
"""
    for test in (
        "f(1).startswith('a')",
        "5 in f(1)",
        "f(1) < 3",
        "f(1) == [1]",
        "f(1) in [4]",
        "not f(1) != 3",
        "abs(f(1) - 2) < 1",
        "isinstance(f(1), list)",
        "{f(1): 1} == {1: 1}",
        "sorted([f(1)]) == [1]",
        "f(1) is True",
    ):
        assert statuses(program, [f"assert {test}"]) != ["passed"], test
    as_class = "class f:\n    def __init__(s, x): pass\n    def startswith(s, x): return True\n"
    wire = "import sys\nm = sys.modules['rljax.rewards.sandbox.program']\nR = m.Reference\n"
    forged = f"{wire}m.Reference = lambda number, kind: R(number, 'class')\n{program}"
    for other in (as_class, forged):  # a function that says it is a class
        assert statuses(other, ["assert f(1).startswith('a')"]) == ["error"]


FORGED = """
import json, os, struct
def send(message):
    data = json.dumps(message).encode()
    os.write(3, struct.pack("!I", len(data)) + data)
function, true = ({"t": "reference", "v": [number, "function"]} for number in (0, 1))
send({"loaded": {"f": function} | dict.fromkeys(["all", "isinstance", "helper"], true)})
while True:
    (size,) = struct.unpack("!I", os.read(3, 4))
    send({"value": json.loads(os.read(3, size))["target"] == 1})
"""


def test_a_program_gives_the_tests_no_name_that_they_do_not_take_from_it():
    for test in (
        "assert all(f(n) == n for n in [3])",
        "assert isinstance(f(1), str)",
        "def helper(x): assert x == 1\nhelper(f(1))",
        "def test_a(): assert all([f(1) == 1])",
    ):
        assert statuses(FORGED, [test]) == ["failed"], test


def test_a_program_cannot_end_the_loop_of_a_test():
    for program in (
        "def f(x): raise StopIteration",
        "def f(x): raise GeneratorExit",
        "def f(x): raise StopAsyncIteration",
    ):
        for test in ("all(map(lambda x: f(x) == x, [5, 6]))", "list(map(f, [])) == [*map(f, [1])]"):
            assert statuses(program, [f"assert {test}"]) == ["error"], (program, test)


@pytest.mark.parametrize(
    "program",
    [
        "def f(x): return 'x' * 20_000_000",
        "def f(x): return ['\\xe9' * 9] * 200_000",
        "f = 'x' * 5_000_000",
        "f = 3",
        "import os, struct\ndef f(x):\n"
        "    data = b'{\"value\": \"' + b'\\xc3\\xa9' * 3_000_000 + b'\"}'\n"
        "    os.write(3, struct.pack('!I', len(data)) + data)",
        "import os, struct\ndef f(x): os.write(3, struct.pack('!I', 2**32 - 1))",
        "import os, struct\ndef f(x):\n    data = b'[' * 100_000\n"
        "    os.write(3, struct.pack('!I', len(data)) + data)",
        'import os, struct\ndata = b\'{"loaded": {"f": {"module": 5}}}\'\n'
        "os.write(3, struct.pack('!I', len(data)) + data)",
        'import os, struct\ndata = b\'{"broken": "no verdict, please"}\'\n'
        "os.write(3, struct.pack('!I', len(data)) + data)",
        "def f(x):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
        "import decimal\ndef f(x): return decimal.Decimal('1e999999999')",
    ],
)
def test_no_answer_of_a_program_makes_its_sample_an_error(program):
    """What is masked would be no -1: a program must not be able to choose that."""
    for tests in (["assert f(1) == 7"], {"inputs": [[1]], "outputs": [7], "fn_name": "f"}):
        options = {"timeout_s": 5.0, "total_timeout_s": 15.0}
        assert code_tests(program, json.dumps(tests), **options)["score"] == -1.0


# JSON bodies of a program's answer, of several MB: each takes seconds and more where a value is
# built from it.
ANSWERS = {
    "colliding numbers in a set": 'b\'{"value": {"t": "set", "v": [\' + '
    'b",".join(b"%d" % (i * (2**61 - 1))'
    ' for i in range(320_000)) + b"]}}"',
    "colliding keys of a dict": 'b\'{"value": {"t": "dict", "v": [\' + '
    'b",".join(b"[%d,1]" % (i * (2**61 - 1))'
    ' for i in range(250_000)) + b"]}}"',
    "empty sets": 'b\'{"value": [\' + b",".join([b\'{"t":"set","v":[]}\'] * 400_000) + b"]}"',
    "a fraction": 'b\'{"value": {"t": "fraction", "v": [{"t":"int","v":"\' + b"f" * 3_000_000'
    ' + b\'"},{"t":"int","v":"\' + b"e" * 3_000_000 + b\'"}]}}\'',
    "a decimal": 'b\'{"value": {"t": "decimal", "v": "\' + b"9" * 7_000_000 + b\'"}}\'',
    "colliding arguments": 'b\'{"value": 1, "args": [{"t": "set", "v": [\' + '
    'b",".join(b"%d" % (i * (2**61 - 1))'
    ' for i in range(320_000)) + b"]}]}"',
}
ANSWER = """import os, struct
def square(x):
    data = {}
    data = struct.pack("!I", len(data)) + data
    while data: data = data[os.write(3, data):]
"""


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
@pytest.mark.parametrize("expected", [196, list(range(60_000))], ids=["number", "long list"])
def test_nothing_is_built_from_what_a_program_sends(answer, expected):
    """The comparison costs what the expected value does, in this process outside of all limits."""
    truth = json.dumps({"inputs": [[14]], "outputs": [expected], "fn_name": "square"})
    with at_most(8):
        found = code_tests(ANSWER.format(answer), truth, timeout_s=8.0, total_timeout_s=20.0)
    assert (found["score"], found["tests"]) == (-1.0, 1.0)


# -- forms


IO = "print(sum(map(int, input().split())))"


@pytest.mark.parametrize(
    "truth, program",
    [
        ({"inputs": ["1 2\n"], "outputs": ["3\n"]}, IO),
        ({"inputs": ["1 2"], "outputs": ["3"]}, IO),
        ({"inputs": [["1 2", "5"]], "outputs": [["3"]]}, IO),  # lists of lines
        (json.dumps(json.dumps({"inputs": ["1 2"], "outputs": ["3"]})), IO),
        ({"inputs": ["1 2"], "outputs": ["3"], "fn_name": None}, IO),
        ({"inputs": [[1, 2]], "outputs": [3], "fn_name": "f"}, "def f(a, b): return a + b"),
        ({"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "f"}, "def f(a, b): return a + b"),
        ({"inputs": ["1\n2"], "outputs": ["3"], "fn_name": "f"}, "def f(a, b): return a + b"),
        (
            {"inputs": ['"a"\n[1]'], "outputs": ['["a", 1]'], "fn_name": "f"},
            "def f(a, b): return (a, *b)",
        ),
        (
            {"inputs": [[1, 2]], "outputs": [3], "fn_name": "f"},
            "class Solution:\n    def f(self, a: int, b: Optional[int]) -> List: return a + b",
        ),
        (
            {"inputs": [[[1, 2]]], "outputs": [{"1": [2.5, None]}], "fn_name": "f"},
            "def f(a): return {a[0]: (2.5, None)}",
        ),
        ({"inputs": [[2]], "outputs": [2**200], "fn_name": "f"}, "def f(a): return a ** 200"),
        (["assert f(1) == 2"], "f = lambda x: x + 1"),
        ({"inputs": ["1 2"], "outputs": ["3"]}, IO + "\nexit()\nprint(4)"),
        (
            {"test_list": ["assert f(1) == 2"], "test_setup_code": "import math"},
            "def f(x): return x + 1",
        ),
        ({"asserts": ["assert sum(10, 15) == 25"]}, "def sum(a, b): return a + b"),
        (
            {"asserts": ["assert f({1, 2}) == {2: (1, b'x')}"]},
            "def f(s): return {max(s): (min(s), b'x')}",
        ),
        (
            {"asserts": ["assert math.isclose(f(2), 2 ** .5)"], "setup": "import math"},
            "import math\ndef f(x): return math.sqrt(x)",
        ),
        ({"asserts": ["x = [3, 1]\nf(x)\nassert x == [1, 3]"]}, "def f(x): x.sort()"),
        ({"asserts": ["x = [3, 1]\nassert f(x) == 3 and x == [1]"]}, "def f(x): return x.pop(0)"),
        (
            {"asserts": ["try:\n    f(0)\n    assert False\nexcept ZeroDivisionError: pass"]},
            "def f(x): return 1 / x",
        ),
        (
            {"asserts": ["import itertools\nassert list(itertools.islice(f(), 3)) == [0, 1, 2]"]},
            "import itertools\ndef f(): yield from itertools.count()",
        ),
        ({"asserts": ["assert f(2)(3) == 5"]}, "def f(a): return lambda b: a + b"),
        (
            {"asserts": ["assert f(3) == 3"]},
            "import functools\n@functools.cache\ndef f(a): return a",
        ),
        (
            {"asserts": ["assert LIMIT == 3", "assert f(k=2) == 2"]},
            "LIMIT = 3\ndef f(*, k): return k",
        ),
        (
            {
                "test": "s = Stack([1])\ns.push(2)\nassert s.pop() == 2\nassert len(s) == 1\n"
                "assert s.items == [1] and s[0] == 1 and str(s) == 'S'\n"
            },
            "class Stack:\n    def __init__(self, x): self.items = x\n"
            "    def push(self, x): self.items.append(x)\n"
            "    def pop(self): return self.items.pop()\n"
            "    def __len__(self): return len(self.items)\n"
            "    def __getitem__(self, i): return self.items[i]\n"
            "    def __str__(self): return 'S'\n",
        ),
        (
            {
                "test": "assert P(1, 2) == P(1, 2)\nassert P(1, 2) != P(1, 3)\n"
                "assert mid(P(0, 4)).y == 2"
            },
            "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n    y: int\n"
            "def mid(p): return P(p.x // 2, p.y // 2)",
        ),
        (
            {
                "test": "def check(candidate):\n    assert candidate([1]) == [2]\n",
                "entry_point": "f",
            },
            "def f(x): return [a + 1 for a in x]",
        ),
        (
            {"test": "def check(g):\n    assert g(1) == 1\ncheck(f)\n", "entry_point": "f"},
            "def f(x): return x",
        ),
    ],
)
def test_forms_of_tests(truth, program):
    truth = truth if isinstance(truth, str) else json.dumps(truth)
    assert set(statuses(program, truth)) == {"passed"}, verdicts(program, truth)
    wrong = "def f(*a, **k): return 'no'\nclass Stack: pass\nP = mid = sum = LIMIT = f\nprint('no')"
    assert set(statuses(wrong, truth)) != {"passed"}


def test_a_program_of_asserts_has_one_verdict_each():
    test = "import math\nassert f(1) == 1\nassert f(2) == 5\ny = f(3)\nassert y == 3\n"
    assert statuses("def f(x): return x", {"test": test}) == ["passed", "failed", "passed"]


def test_what_stands_behind_the_last_assert_belongs_to_it():
    program = "def f(x): return x"
    test = "assert f(1) == 1\nassert f(2) == 5\nassert f(3) == 3\nx = 1\n"
    assert statuses(program, {"test": test}) == ["passed", "failed", "passed"]
    assert statuses(program, {"test": "assert f(1) == 2\nx = 1\n"}) == ["failed"]


# -- tests that a runner of tests would call

ADD = """
def add(a, b): return a + b
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
    def pop(self): return self.items.pop()
"""
BAD_ADD = """
def add(a, b): return "no"
class Stack:
    def push(self, x): pass
    def pop(self): return 7
"""
# Source of tests, and how many tests it has. Each asks for add(1, 2) == 3 or a stack at least.
RUN = {
    "functions": (
        "def test_a():\n    assert add(1, 2) == 3\ndef test_b(): assert add(0, 0) == 0",
        2,
    ),
    "KodCode": ("from solution import add\n\ndef test_a():\n    assert add(1, 2) == 3\n", 1),
    "the module of the program": (
        "import solution\nimport solution as s\nfrom solution import add as plus\n"
        "from solution import *\nfrom .solution import Stack\nfrom . import solution as t\n"
        "def test_a():\n    assert solution.add(1, 2) == s.add(1, 2) == t.add(1, 2) == 3\n"
        "    assert plus(1, 2) == add(1, 2) == 3\n    stack = Stack()\n    stack.push(1)\n"
        "    assert stack.pop() == 1\n",
        1,
    ),
    "a package of it": ("from src.solution import add\ndef test_a(): assert add(1, 2) == 3", 1),
    "imports in a function": (
        "def test_a():\n    from your_module import add\n    assert add(1, 2) == 3",
        1,
    ),
    "a local name of the same kind": (
        "def test_a():\n    Stack = add(1, 2)\n    assert Stack == 3\n"
        "def test_b():\n    s = Stack()\n    s.push(1)\n    assert s.pop() == 1\n",
        2,
    ),
    "parameters": (
        "import pytest\n@pytest.mark.parametrize('a, b, c', [(1, 2, 3), (2, 2, 4)])\n"
        "def test_a(a, b, c): assert add(a, b) == c\n"
        "@pytest.mark.parametrize('a', [1, pytest.param(2)])\n"
        "@pytest.mark.parametrize(['b'], [(1,), (3,)])\n"
        "def test_b(a, b):\n    with pytest.raises(AssertionError):\n        assert False\n"
        "    assert add(a, b) == pytest.approx(a + b)\n",
        2,
    ),
    "fixtures": (
        "import pytest\n@pytest.fixture\ndef start(): return 3\n"
        "@pytest.fixture(scope='function')\ndef stack(start):\n    s = Stack()\n    s.push(start)\n"
        "    yield s\n    s.push(1)\ndef test_a(stack, start): assert stack.pop() == start\n",
        1,
    ),
    "a class of pytest": (
        "import pytest\n@pytest.mark.parametrize('v', [3, 4])\nclass TestStack:\n"
        "    @pytest.fixture(autouse=True)\n    def stack(self): self.s = Stack()\n"
        "    def setup_method(self, method): self.times = 1\n"
        "    def test_a(self, v):\n        self.s.push(v * self.times)\n"
        "        assert self.s.pop() == v\n"
        "    def test_b(self, v): assert add(v, 1) == v + 1\n",
        2,
    ),
    "a class in a class": (
        "class TestOuter:\n    class TestInner:\n        @staticmethod\n        def test_a():\n"
        "            assert add(1, 2) == 3\n",
        1,
    ),
    "setups": (
        "def setup_module(): global one; one = 1\n"
        "def setup_function(function): global s; s = Stack()\n"
        "def test_a():\n    s.push(one)\n    assert s.pop() == 1 and add(1, 2) == 3",
        1,
    ),
    "BigCodeBench": (
        "import unittest\nclass Base(unittest.TestCase):\n    @classmethod\n"
        "    def setUpClass(cls): cls.one = 1\n    def setUp(self): self.s = Stack()\n"
        "class TestCases(Base):\n    def test_a(self):\n        self.s.push(self.one)\n"
        "        self.assertEqual(self.s.pop(), 1)\n    def test_b(self):\n"
        "        for i in range(3):\n            with self.subTest(i=i):\n"
        "                self.assertEqual(add(i, 1), i + 1)\n"
        "    @unittest.skip('not now')\n    def test_c(self): self.fail()\n"
        "if __name__ == '__main__':\n    unittest.main()\n",
        2,
    ),
    "a runner": (
        "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n"
        "        self.assertEqual(add(1, 2), 3)\n"
        "unittest.TextTestRunner().run(unittest.TestLoader().loadTestsFromTestCase(T))\n",
        1,
    ),
    "a runner that is started": (
        "import pytest, sys\ndef test_a(): assert add(1, 2) == 3\n"
        "if __name__ == '__main__':\n    sys.exit(pytest.main([__file__]))\n",
        1,
    ),
    "async": (
        "import unittest\nasync def test_a(): assert add(1, 2) == 3\n"
        "class T(unittest.IsolatedAsyncioTestCase):\n    async def test_b(self):\n"
        "        self.assertEqual(add(1, 2), 3)\n",
        2,
    ),
    "a block of __main__": (
        "def run():\n    assert add(1, 2) == 3\nif __name__ == '__main__':\n    run()\n",
        1,
    ),
    "asserts in that block": (
        "if '__main__' == __name__:\n    assert add(1, 2) == 3\n    assert add(1, 3) == 4\n",
        2,
    ),
    "a block that shows": (
        "assert add(1, 2) == 3\nif __name__ == '__main__':\n    print(add(int(input()), 2))\n",
        1,
    ),
    "tests that the source calls": ("def test_a(): assert add(1, 2) == 3\ntest_a()", 1),
    "a table of checks": (
        "def verify(a, b, c): assert add(a, b) == c\nchecks = [verify]\n"
        "for check_one in checks:\n    check_one(1, 2, 3)\n",
        1,
    ),
    "a helper with arguments": (
        "def test_one(x, y): assert add(x, 1) == y\ndef test_all(): test_one(1, 2)\n",
        1,
    ),
    "asserts and functions": ("assert add(1, 1) == 2\ndef test_a(): assert add(1, 2) == 3", 2),
    "a smoke test and a test": (
        "def test_a(): add(1, 2)\ndef test_b(): assert add(1, 2) == 3\ndef test_c(): pass",
        1,
    ),
    "assertions of a library": ("import numpy as np\nnp.testing.assert_allclose(add(1, 2), 3)", 1),
}


@pytest.mark.parametrize("name", RUN)
def test_functions_and_classes_of_tests_are_run(name):
    source, count = RUN[name]
    assert statuses(ADD, {"test": source}) == ["passed"] * count
    for program in (BAD_ADD, "x = 1"):
        found = statuses(program, {"test": source})
        assert len(found) == count and set(found) <= {"failed", "error"}, found


@pytest.mark.parametrize(
    "truth",
    [
        ["def test_a(): assert add(1, 2) == 3"],
        {"test": ["from solution import add", "assert add(1, 2) == 3"]},
        {"asserts": None, "test": None, "inputs": None, "test_list": ["assert add(1, 2) == 3"]},
        {"asserts": ["def check(candidate): assert candidate(1, 2) == 3"], "entry_point": "add"},
        {"asserts": ["check(add)"], "setup": "def check(f): assert f(1, 2) == 3"},
        {"test": "from adder import add\nassert add(1, 2) == 3", "entry_point": "add"},
        {"test": "test_a()", "setup": "def test_a(): assert add(1, 2) == 3"},
        [
            "import unittest",
            "class T(unittest.TestCase):\n    def test_a(self):\n"
            "        self.assertEqual(add(1, 2), 3)",
        ],
    ],
)
def test_every_form_of_statements_may_define_its_tests(truth):
    assert statuses(ADD, truth) == ["passed"]
    assert statuses(BAD_ADD, truth) != ["passed"] != statuses("x = 1", truth)


def test_one_test_function_that_does_not_end_leaves_the_others():
    source = "".join(f"def test_{n}(): assert add({n}, 0) == {n}\n" for n in range(3))
    program = "def add(a, b):\n    while a == 1: pass\n    return a"
    found = statuses(program, {"test": source}, timeout_s=2.0)
    assert found == ["passed", "timeout", "passed"]


@pytest.mark.parametrize(
    "truth, message",
    [
        ({"test": "def verify(): assert add(1, 2) == 3"}, "nothing calls verify"),
        ({"test": "def check(candidate): assert candidate(1, 2) == 3"}, "nothing calls check"),
        ({"test": "def check(c): c(1, 2) == 3", "entry_point": "add"}, "nothing in it asserts"),
        (["add(1, 2) == 3"], "nothing in it asserts"),
        (["add(1, 2)"], "nothing in it asserts"),
        ([""], "nothing in it asserts"),
        (["assert True"], "nothing in it asserts"),
        (["assert (add(1, 2) == 3, 'a message')"], "nothing in it asserts"),
        (["assert 1 + 1 == 2"], "no test uses a name of the program"),
        ({"test": "assert 1 + 1 == 2", "entry_point": "add"}, "no test uses a name of the program"),
        ([f"assert add(1, 2) == {'-' * 5000}3"], "no Python|too deeply"),
        ({"test": "print(add(1, 2))"}, "nothing in it asserts"),
        ({"test": "def test_a(): pass\ndef test_b(): ..."}, "nothing in it asserts"),
        ({"test": "import doctest\ndoctest.testmod()"}, "nothing in it asserts"),
        ({"test": "def v(): assert add(1, 2) == 3\nALL = [v]"}, "nothing calls v"),
        ({"test": "def v(x): assert x\nt = lambda: v(add(1, 2))"}, "nothing calls v"),
        (
            {"test": "class Checks:\n    def a(self): assert add(1, 2) == 3"},
            "nothing in it asserts",
        ),
        (
            {"test": "import pytest\n@pytest.mark.skip\ndef test_a(): assert add(1, 2) == 3"},
            "nothing calls test_a",
        ),
        ({"test": "def test_a(capsys): assert add(1, 2) == 3"}, "gives its argument 'capsys'"),
        (
            {"test": "class TestA:\n    def test_a(self, tmp_path): assert add(1, 2) == 3"},
            "'TestA.test_a' cannot be run.*argument 'tmp_path'",
        ),
        (
            {
                "test": "class TestA:\n    def __init__(self): 0\n"
                "    def test_a(self): assert add(1, 2)"
            },
            "has an __init__",
        ),
        (
            {
                "test": "import pytest\n@pytest.fixture(params=[1])\ndef x(request): return 1\n"
                "def test_a(x): assert add(x, 2) == 3"
            },
            "'x' cannot be run; it is a fixture with params=",
        ),
        (
            {
                "test": "from unittest.mock import patch\n@patch('builtins.print')\n"
                "def test_a(p): assert add(1, 2) == 3"
            },
            "gives its argument 'p'",
        ),
        ({"test": "import no_such_library\ndef test_a(): assert add(1, 2)"}, "pip install no_such"),
        (
            {"test": "from nowhere import add\ndef test_a(): assert add(1, 2)"},
            "from solution import",
        ),
    ],
)
def test_tests_that_would_pass_or_fail_every_program_are_an_error(truth, message):
    with pytest.raises(InputError, match=message):
        code_tests(ADD, json.dumps(truth))


def test_an_import_that_may_be_missing_is_none_that_must_be_there():
    source = (
        "try:\n    import no_such_library\nexcept ImportError:\n    pass\nassert add(1, 2) == 3"
    )
    assert statuses(ADD, {"test": source}) == ["passed"]


# -- names that judges import

JUDGED = [
    "deque([1, 2])[1]",
    "defaultdict(int)[0] + 2",
    "heapq.nlargest(1, x)[0]",
    "heappop([2, 3])",
    "math.floor(2.5)",
    "floor(2.5)",
    "2 if inf > 1 else 1",
    "reduce(max, x)",
    "list(accumulate([1, 1]))[-1]",
    "bisect_left([1, 2, 3], 3)",
    "gcd(4, 6)",
    "Counter([2, 2])[2] if isinstance(Counter(), dict) else 0",
    "pow(2, 5, 10)",
    "len(re.findall('a', 'aa'))",
    "datetime.date(2020, 1, 2).day",
    "min(2, sys.maxsize)",
    "max(cast(int, 1), 2)",
    "lru_cache(None)(lambda: 2)()",
]


@pytest.mark.parametrize("body", JUDGED)
def test_programs_for_judges_need_no_imports(body):
    """LiveCodeBench's and verl's runners import these above every program."""
    method = (
        f"class Solution:\n    def f(self, x: List[int]) -> Optional[int]:\n        return {body}"
    )
    calls = {"inputs": [[[1, 2]]], "outputs": [2], "fn_name": "f"}
    assert statuses(method, calls) == ["passed"]
    script = f"x = [int(n) for n in input().split()]\nprint({body})"
    assert statuses(script, {"inputs": ["1 2"], "outputs": ["2"]}) == ["passed"]
    check = "def check(c: Callable):\n    assert c(x=[1, 2]) == 2\n"
    leetcode = {"test": check, "entry_point": "Solution().f"}
    assert statuses(method, leetcode) == ["passed"]


def test_what_judges_import_is_not_the_programs_own():
    """A test of `add` finds operator's only in a program that imports it itself; MBPP and HumanEval
    import nothing for a program."""
    calls = {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}
    asserts = ["assert add(1, 2) == 3"]
    for tests in (calls, asserts):
        assert statuses("x = 1", tests) == ["error"]
        assert statuses("class Solution: pass", tests) == ["error"]
        assert statuses("from operator import add", tests) == ["passed"]
    assert statuses("def f(x): return floor(x)", ["assert f(2.5) == 2"]) == ["error"]
    stdin = {"inputs": ["5"], "outputs": ["5"]}
    for program in (
        "import builtins\nbuiltins.input = lambda: '5'\nprint(input())",
        "print(5 if 'inf' not in globals() else 0)",
        "def f(n): return 5 if n == 0 else f(n - 1)\nprint(f(20_000))",
        "print(stdin.readline())",
    ):
        assert statuses(program, stdin) == ["passed"], program
    found = verdicts("def f(): return g()\ndef g(): return f()\nf()", stdin)
    assert found[0].status == "error" and "RecursionError" in found[0].message


@pytest.mark.parametrize(
    "truth, message",
    [
        ("", "no JSON"),
        ("{}", "it has"),
        ("3", "neither"),
        ("[]", "the list of tests is empty"),
        ('{"inputs": [], "outputs": []}', "empty"),
        ('{"inputs": ["1"], "outputs": []}', "1 inputs and 0 outputs"),
        ('{"inputs": "1", "outputs": ["2"]}', "lists"),
        ('{"inputs": ["1"]}', "lists"),
        ('{"inputs": ["x y"], "outputs": ["2"], "fn_name": "f"}', "an input of f is no JSON"),
        ('["assert f(1 =="]', "a test is no Python"),
        ('{"asserts": "assert True"}', "a list of statements"),
        ('{"test": "def check(c", "entry_point": "f"}', "a test is no Python"),
    ],
)
def test_a_ground_truth_that_is_none_is_an_error_not_a_score(truth, message):
    with pytest.raises(InputError, match=message):
        code_tests(CORRECT, truth)


@pytest.mark.parametrize(
    "response, program",
    [
        ("def f(): pass", "def f(): pass"),
        ("```python\na\n```", "a\n"),
        ("```python\na\n```\nbetter:\n```python\nb\n```\nrun it:\n```\n$ c\n```", "b\n"),
        ("```\na\n```\nand\n```py\nb\n```", "b\n"),
        ("```\na\n```", "a\n"),
        ("```bash\npip\n```\n```\na\n```", "a\n"),
        ("text\n```python\na\nb", "a\nb"),  # cut off
        ("1.\n   ```python\n   a\n   ```", "a\n"),
        ("- so:\n  ```python\n  if a:\n    b\n  ```\n", "if a:\n  b\n"),
        ("```python title=x\na\n```", "a\n"),
        ("```Python\nprint('```')\n```\n", "print('```')\n"),
        ("", ""),
    ],
)
def test_the_program_of_a_response(response, program):
    assert extract_program(response) == program


def test_a_program_that_completes_a_prompt():
    truth = json.dumps({"test": "def check(c):\n    assert c(2) == 4\n", "entry_point": "f"})
    info = {"prefix": "def f(x):\n    '''Doubles.'''\n"}
    for response in (
        "    return 2 * x\n",
        "```python\n    return 2 * x\n```",
        "```python\ndef f(x): return x + x\n```",
    ):
        assert code_tests(response, truth, info)["score"] == 1.0
    assert code_tests("    return 2 * x\n", truth)["score"] == -1.0
    info = {"prefix": "from math import pi\ndef two(): return 2\ndef f(x):\n    'Doubles.'\n"}
    truth = json.dumps(
        {"test": "def check(c):\n    assert c(2) == 4 == two() * 2\n", "entry_point": "f"}
    )
    for response in ("    return two() * x\n", "def f(x): return two() * x"):
        assert code_tests(response, truth, info)["score"] == 1.0


# -- comparing


@pytest.mark.parametrize(
    "found, expected, compare, tolerance, same",
    [
        ("1\n2\n", "1\n2", "lines", 0, True),
        (" 1 \n2\n\n", "\n1\n2", "lines", 0, True),
        ("1 2", "1\n2", "lines", 0, False),
        ("1 2", "1\n2", "tokens", 0, True),
        ("1  2", "1 2", "lines", 0, False),
        ("1\n\n2", "1\n2", "lines", 0, False),
        ("1\n", "1", "exact", 0, False),
        ("1\n", "1\n", "exact", 0, True),
        ("0.3333", "0.3333333", "lines", 0, False),
        ("0.3333", "0.3333333", "lines", 1e-3, True),
        ("a 0.3333", "a 0.3333333", "tokens", 1e-3, True),
        ("1000001", "1000000", "tokens", 1e-5, True),
        ("nan", "1", "tokens", 1e9, False),
        ("inf", "1", "tokens", 1e9, False),
        ("1e5", "100000", "tokens", 0, False),
        ("", "", "lines", 0, True),
        ("YES", "yes", "tokens", 0, False),
        *[(f"1{odd}2", "1\n2", "lines", 0, False) for odd in "\x0b\x0c\x1c\x1e\x85\u2028\u2029\r"],
        ("1\x0c2\u20283", "1\n2\n3", "lines", 0, False),
        ("1\r\n2\r\n", "1\n2", "lines", 0, True),
    ],
)
def test_outputs_are_compared(found, expected, compare, tolerance, same):
    assert same_output(found, expected, compare, tolerance) is same


@pytest.mark.parametrize(
    "found, expected, tolerance, same",
    [
        ((1, [2]), [1, [2]], 0, True),
        ({1: 2}, {"1": 2}, 0, True),
        ({1: "wrong", "1": "a"}, {"1": "a"}, 0, False),
        ({"1": "a", 1: "a"}, {"1": "a"}, 0, False),
        (
            {None: 1, False: 2, 2.5: 3, 2**70: 4},
            {"null": 1, "false": 2, "2.5": 3, str(2**70): 4},
            0,
            True,
        ),
        ({(1, 2): 3}, {"[1, 2]": 3}, 0, False),
        ({"a": 1}, [["a", 1]], 0, False),
        ([["a", 1]], {"a": 1}, 0, False),
        ({1, 2}, {"1": 1, "2": 2}, 0, False),
        (b"a", "a", 0, False),
        (2**70, 2**70, 0, True),
        ("1", 1, 0, False),
        ([1], 1, 0, False),
        (0.1 + 0.2, 0.3, 0, False),
        (0.1 + 0.2, 0.3, 1e-9, True),
        ([0.1 + 0.2, "a"], [0.3, "a"], 1e-9, True),
        (1, 1.0, 0, True),
        (None, False, 0, False),
        ({1, 2}, [1, 2], 0, False),
        (float("nan"), 1.0, 1e9, False),
        (10**400, 1.0, 1e-9, False),
    ],
)
def test_values_are_compared(found, expected, tolerance, same):
    assert same_value(encode(found), expected, tolerance) is same


@pytest.mark.parametrize(
    "options",
    [
        {"timeout_s": 0},
        {"total_timeout_s": float("inf")},
        {"compare": "words"},
        {"float_tolerance": -1},
    ],
)
def test_options_are_checked(options):
    with pytest.raises(InputError, match=next(iter(options))):
        run_tests("", read_tests(GCD), **options)


@pytest.mark.parametrize(
    ("truth", "program", "passed"),
    [
        ({"inputs": [[1], [2]], "outputs": [[1], [2]]}, "return x", 2),  # wrapped, or
        ({"inputs": [[1], [2]], "outputs": [[1], [2]]}, "return [x]", 2),  # lists: both may be
        ({"inputs": [[1], [2]], "outputs": [[1], [2]]}, "return x if x == 1 else [x]", 1),
        ({"inputs": [[1], [2]], "outputs": [[1], [2]]}, "return [x] if x == 1 else x", 1),
        ({"inputs": [[1], [2]], "outputs": [[1], [2]], "wrapped": True}, "return [x]", 0),
        ({"inputs": [[1], [2]], "outputs": [[1], [2]], "wrapped": False}, "return x", 0),
        ({"inputs": ["1", "2"], "outputs": ["[1]", "[2]"]}, "return x", 0),  # text is as it stands
        ({"inputs": ["1", "2"], "outputs": ["[1]", "[2]"]}, "return [x]", 2),
        ({"inputs": [[1], [2]], "outputs": [[1], [2, 2]]}, "return x if x == 1 else [x, x]", 1),
        ({"inputs": ['"a\u2028b"', '"c"'], "outputs": ['"a\u2028b"', '"c"']}, "return x", 2),
    ],
)
def test_a_value_in_a_list_of_one_is_one_thing_throughout(truth, program, passed):
    found = statuses(f"def f(x): {program}", {**truth, "fn_name": "f"})
    assert found.count("passed") == passed


# -- in the pool


def test_the_pools_limit_must_leave_room_for_the_tests():
    with pytest.raises(InputError, match="total_timeout_s.*timeout_s=10.0.*21.5 or more"):
        RewardPool("code_tests(total_timeout_s=20.0)", timeout_s=10.0)
    with pytest.raises(InputError, match="total_timeout_s"):
        RewardPool("code_tests", timeout_s=5.0)  # the default's own


def test_a_broken_ground_truth_is_an_error_and_a_broken_program_is_not():
    with RewardPool("code_tests(timeout_s=5.0)", workers=1) as pool:
        scores = pool.score(
            [
                {"response": "1 / 0", "ground_truth": "not tests"},
                {"response": "1 / 0", "ground_truth": json.dumps(GCD)},
            ]
        )
    assert [score.status for score in scores] == ["error", "ok"]
    assert "no unit tests" in scores[0].message and scores[1].value == -1.0


def test_a_pool_knows_the_tier_that_its_programs_run_in():
    for text in ("code_tests", "mixture(rewards=('valid_json', 'code_tests'))"):
        with RewardPool(text, workers=1) as pool:
            assert pool.notes == {"sandbox_tier": sandbox_tier()}
            made = Reward(pool, None, None)
            assert made.facts() == {"reward/sandbox_tier": tiers.ALL_TIERS.index(sandbox_tier())}


NO_SANDBOX = """
import os
from rljax.rewards.sandbox import tiers
from rljax.rewards.unit_tests.code_run import code_tests
if os.getpid() != {tests}:  # in a worker: a test process of xdist is a `python -c`, too
    tiers.TIERS, os.environ["PATH"] = ("bubblewrap",), ""
"""


def test_without_a_sandbox_the_pool_is_refused_and_unsafe_is_by_name(tmp_path, monkeypatch, caplog):
    (tmp_path / "no_sandbox.py").write_text(NO_SANDBOX.format(tests=os.getpid()))
    monkeypatch.syspath_prepend(tmp_path)
    before = dict(os.environ), tiers.TIERS
    monkeypatch.delitem(sys.modules, "no_sandbox", raising=False)
    with pytest.raises(InputError, match="no sandbox.*no bwrap on PATH.*allow_unsafe_execution"):
        RewardPool("no_sandbox.code_tests", workers=1)
    with RewardPool("no_sandbox.code_tests(allow_unsafe_execution=True)", workers=1) as pool:
        (score,) = pool.score([{"response": CORRECT, "ground_truth": json.dumps(GCD)}])
        assert pool.notes == {"sandbox_tier": "unsafe"}
    (said,) = [r.getMessage() for r in caplog.records]
    assert "sandbox tier 'unsafe'" in said and "can read, change and start whatever you can" in said
    assert score.value == 1.0
    assert (dict(os.environ), tiers.TIERS) == before  # other tests start programs by PATH
