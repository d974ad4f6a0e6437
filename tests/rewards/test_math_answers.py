"""math_verify: what is equal, what only looks so, where the answer stands, hostile strings."""

import threading

import pytest
from conftest import lanes
from hostile_math import hostile_responses, kinds

from rljax.errors import InputError
from rljax.rewards import math_verify
from rljax.rewards.pool.pool import RewardPool

EQUAL = [
    (r"\frac{1}{2}", "1/2"),
    ("1/3", "0.333333"),
    ("0.1", r"\frac{1}{10}"),
    ("7/2", "3 1/2"),
    ("7/2", r"3\frac12"),
    (r"0.\overline{3}", "1/3"),
    ("5,000", "5000"),
    ("5000000", "5 million"),
    ("1e-7", "10^{-7}"),
    ("0.5", r"50\%"),
    ("50%", "0.5"),
    ("50%", "50"),
    ("12", r"12\text{ cm}"),
    ("12 cm", "12"),
    ("12", "12 cm^2"),
    ("30", "30 km/h"),
    ("24+48=72\n#### 72", "72"),
    ("5 oranges", "5"),
    ("90^\\circ", "90"),
    ("-5", "\u22125"),
    (r"\frac{\pi}{2}", "\u03c0/2"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"2\sqrt{3}+1", r"1+2\sqrt3"),
    ("2^{10}", "1024"),
    ("5!", "120"),
    (r"\log_2 8", "3"),
    (r"\frac 1 2", "0.5"),
    ("2516_8", "2516_{8}"),
    (r"\frac{\sqrt{21}}{7}", r"\sqrt{\frac{3}{7}}"),
    ("x>3", "(3,\\infty)"),
    ("10080", r"10,\!080"),
    ("1234000", r"1\,234\,000"),
    ("12345.5", "12~345.5"),
    (r"\emptyset", r"\varnothing"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("1,2", "2, 1"),
    (r"\pm 2", "-2,2"),
    (r"\emptyset", "\u2205"),
    ("x=1 or x=2", "x=1,x=2"),
    ("(3,1)", "(3, 1)"),
    (r"\left(-\infty,3\right]", r"(-\infty,3]"),
    (r"(-\infty,3]", r"x\le 3"),
    (r"x\le 3", r"(-\infty,3]"),
    (r"[0,1]\cup[2,3]", r"[2,3]\cup[0,1]"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&2^2\end{bmatrix}"),
    ("x=5", "5"),
    ("5", "x=5"),
    ("y=2x+1", "2x-y+1=0"),
    ("(x+1)^2", "x^2+2x+1"),
    (r"\frac{1}{x+1}", "1/(x+1)"),
    ("3+4i", "4i+3"),
    (r"\text{Evelyn}", "evelyn"),
    (r"\text{(B)}", "B"),
    ("no solution", "No solution."),
    (r"\int_0^x f(t) dt", r"\int_0^x f(t)\,dt"),
]
UNEQUAL = [
    ("72", "71"),
    ("1/3", "0.33"),
    ("1e-7", "2e-7"),  # both are 0.000000
    (r"2.5\times 10^{-7}", "0"),
    (r"\sqrt{2}\cdot10^{-30}", r"\pi\cdot10^{-30}"),
    ("9007199254740993", "9007199254740992"),  # equal as floats
    ("11", "5 6"),  # which a mixed number adds
    ("56", "5 6"),
    ("0", r"10\,000"),  # no product
    ("6", r"2\,3"),
    ("5", "5 million"),
    ("50%", "0.05"),
    ("11_2", "11_3"),
    ("2516_8", "2516"),
    (r"\{1,2\}", "(1,2)"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "[1,2]"),
    ("(5,2)", "(3,1)"),
    (r"(-\infty,3)", r"(-\infty,3]"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"),
    ("x=5", "y=5"),
    ("y=2x+1", "y=2x+2"),
    ("x^2", "x^3"),
    ("2", "x=1 or x=2"),  # one of them
    ("2", r"1, 2"),
    ("3", "3 or 4"),
    ("72", "70, 71, 72, 73"),
    ("dog", "god"),  # letters commute, words do not
    ("A", "B"),
    ("5", "the quick"),
    (r"\frac{1}{2}", r"\int_0^1 x dx"),  # the problem restated
    ("5050", r"\sum_{i=1}^{100} i"),
    ("5", r"\text{5 or 6, I cannot tell}"),
]

EQUAL += [
    ("abc", "bca"),
    ("abc", r"a \cdot b \cdot c"),
    ("abc", "a b c"),
    (r"a\cdot b\cdot c", "cab"),
    ("-abc", "-bca"),
    ("2abc", "2bca"),
    ("bca^2", "a^2bc"),
    ("xyz", "zyx"),
    ("lwh", "whl"),
    ("abcd", "dcba"),
    (r"\pi r^2 h", r"h \pi r^2"),
    (r"\frac{abc}{2}", r"\frac{bca}{2}"),
    ("bad", "Bad"),
    ("1", "1 day"),
    ("5", "5 lbs"),
    ("5", "5 pm"),
    ("2x", "2x cm"),
    ("8:00 PM", r"8:00 \text{ PM}"),
    ("8:00 p.m.", r"8:00\text{ p.m.}"),
    ("8:00 PM", r"8{:}00~\mathrm{p.m.}"),
    ("8:00 PM", "8 PM"),
    ("5 or 6", r"5\text{ or }6"),
    (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", r"\begin{vmatrix}1&2\\3&4\end{vmatrix}"),
]
UNEQUAL += [
    ("cat", "act"),
    ("abc", "abd"),
    ("abc", "ab"),
    ("2", "2abc"),
    ("2abc", "2"),
    ("a^2", "a^2bc"),
    (r"\pi r^2", r"\pi r^2 h"),
    (r"\text{bad}", "dab"),
    ("8:00 p.m.", "9:00 p.m."),
    ("8:00 PM", "8:00 a.m."),
    ("8:00 PM", "8:00"),
    ("-2", r"\begin{vmatrix}1&2\\3&4\end{vmatrix}"),
    ("-2", r"\left|\begin{array}{cc}1&2\\3&4\end{array}\right|"),
    ("-4", r"2\begin{vmatrix}1&2\\3&4\end{vmatrix}"),
]

# Both ways: either of the two may be the reference. Units are not compared, numbers are.
UNITS_AND_FUNCTIONS = [
    ("5", r"5\ \mathrm{m/s^2}"),
    ("5", r"5\,\mathrm{m/s^2}"),
    ("5", r"5 \mathrm{m/s}^2"),
    ("5", r"5\text{ m/s}^2"),
    ("5", r"5\text{ m/s^2}"),
    ("5", r"5~\text{m}/\text{s}^2"),
    ("5", r"5\ \mathrm{m\,s^{-2}}"),
    ("5", r"5\ \mathrm{m \cdot s^{-2}}"),
    ("5", r"5\ \mathrm{m}\cdot\mathrm{s}^{-2}"),
    ("5", r"5\ \frac{\mathrm{m}}{\mathrm{s}^2}"),
    ("5", r"5\ \mathrm{\frac{m}{s^2}}"),
    ("5", "5 m/s^2"),
    ("5", r"5\ \text{km/h}"),
    ("5", r"5\ \mathrm{kg\cdot m^2/s^2}"),
    ("5", r"5\ \mathrm{N}"),
    ("5", r"5\ \mathrm{J/(kg\cdot K)}"),
    ("5", r"5\text{ square units}"),
    ("5", r"5\text{ units}^2"),
    ("5", r"5\ \text{meters per second}"),
    ("5", r"5\ \text{meters/second}"),
    ("5", r"5\ \text{mi/h}"),
    (r"\frac{1}{2}", r"\frac{1}{2}\ \mathrm{m/s^2}"),
    (r"\sqrt{2}", r"\sqrt{2}\ \mathrm{m/s}"),
    (r"3\times 10^8", r"3.0\times 10^8\ \mathrm{m/s}"),
    ("9.8", r"9.8\ \mathrm{m/s^2}"),
    (r"5\ \mathrm{m/s^2}", r"5\text{ m/s}^2"),
    ("6", r"\gcd(12,18)"),
    ("6", r"\gcd(12, 18)"),
    ("6", r"\gcd\left(12,18\right)"),
    ("36", r"\lcm(12,18)"),
    ("36", r"\operatorname{lcm}(12,18)"),
    ("36", r"\mathrm{lcm}(12,18)"),
    ("36", r"\text{lcm}(12,18)"),
    ("6", r"\operatorname{gcd}(12,18)"),
    ("6", r"\mathrm{gcd}(12,18)"),
    ("6", "gcd(12,18)"),
    ("2", r"\min(2,5,7)"),
    ("7", r"\max(2,5,7)"),
    ("7", r"\max\{2,5,7\}"),
    ("2", r"\gcd(12,18,4)"),
    ("3", r"\gcd(12,\lcm(3,1))"),
    ("6", r"\max(\gcd(12,18),\min(7,3))"),
    ("6", r"2\gcd(12,9)"),
    ("7", r"\gcd(12,18)+1"),
    ("2", r"\frac{\gcd(12,18)}{3}"),
    (r"\gcd(12,18)", "6"),
    (r"\max(a,b)", r"\max(b,a)"),
    (r"\max(x,1)", r"\max(1,x)"),
    ("5e", r"5\mathrm{e}"),
    ("5", "5m"),
    ("0.5", r"\min(0.5,1)"),
    (r"\frac{1}{3}", r"\min(\frac{1}{2},\frac{1}{3})"),
    (r"\sqrt{2}", r"\max(1,\sqrt{2})"),
    ("5", r"5/\mathrm{s}"),
    ("5", r"5\ \mathrm{s^{-1}}"),
    ("5", r"5\ \Omega"),
    ("5", r"5\ \mathrm{\mu m}"),
    ("5", r"5\ \mu\mathrm{m}"),
    ("5", r"5\ ^\circ\mathrm{C}"),
    ("5", r"5\,{}^{\circ}\text{C}"),
    ("5", r"5\ \mathrm{rad/s}"),
    ("5", r"5\ \mathrm{mol\,L^{-1}}"),
    (r"50\%", r"50\text{ percent}"),
    ("6", r"\mathrm{GCD}(12,18)"),
    ("x=5", r"x=5\ \mathrm{m/s^2}"),
    ("5", r"v=5\ \mathrm{m/s}"),
    ("5", r"5\ \mathrm{k}\Omega"),
    ("6", r"\frac{1}{2}\gcd(12,24)"),
    ("6", r"\gcd(2\cdot 6, 18)"),
    ("64", r"\gcd(2^{10},2^6)"),
    ("24", r"\operatorname{lcm}(1,2,3,4,8,6)"),
    ("36", r"\gcd(12,18)^2"),
    ("8", r"\gcd(2^{3},4!)"),
    ("-2", r"\min(-2,5)"),
    ("3", r"\min(-2,5)+5"),
    ("10", r"5\min(2,3)"),
    ("5", r"\{5\}"),
    (r"\gcd(12,18)", r"\gcd(18,30)"),
    ("x^2", r"x^2\ \mathrm{m}"),
    (r"5\text{ cm}", r"5\ \mathrm{m^3\,kg^{-1}\,s^{-2}}"),
    (r"6.67\times10^{-11}", r"6.67 \times 10^{-11}\ \mathrm{N\,m^2/kg^2}"),
    (r"5\mathrm{y}", "5y"),
    ("12", r"12\text{ cm}^2"),
    ("(3,4)", r"(3,4)\ \mathrm{m/s^2}"),
    ("6", r"\gcd [12,18]"),
]
UNLIKE_UNITS_AND_FUNCTIONS = [
    ("9.8", r"9.81\ \mathrm{m/s^2}"),
    ("6", r"5\ \mathrm{m/s^2}"),
    ("25", r"5\ \mathrm{m/s^2}"),
    ("12", r"\gcd(12,18)"),
    ("1218", r"\gcd(12,18)"),
    ("(12,18)", r"\gcd(12,18)"),
    (r"\max(a,b)", r"\min(a,b)"),
    (r"\max(a,b)", "a"),
    ("5", r"5\mathrm{x}"),
    ("5", r"5\mathrm{i}"),
    ("5", r"5\mathrm{e}"),
    ("5", "5x"),
    ("5", r"5\text{ or }6"),
    ("5", r"5\ \mathrm{m^2/s^2}+1"),
    ("2", r"2\mu"),
    ("7", r"\gcd(12,18)=6"),
    ("6", r"\gcd(12,18)=7"),
    ("1", r"\gcd(10^{9999},3)"),
    (r"\gcd(12,18)", r"\gcd(18,27)"),
    ("32", r"3\ \mathrm{m}^2"),
    ("9", r"3\ \mathrm{m}^2"),
    ("5", r"5\ \mathrm{m/s^2} \text{ or } 6"),
    ("2.5", r"5\ \mathrm{m}/2"),
    (r"\max(a,b)", "a"),
]


@pytest.mark.smoke
@pytest.mark.parametrize("reference, answer", EQUAL)
def test_equal_answers(reference, answer):
    found = math_verify(rf"So it is \boxed{{{answer}}}.", reference)
    assert found == {"score": 1.0, "extracted": 1.0}


@pytest.mark.smoke
@pytest.mark.parametrize("reference, answer", UNEQUAL)
def test_answers_that_only_look_equal(reference, answer):
    assert math_verify(rf"So it is \boxed{{{answer}}}.", reference)["score"] == 0.0


@pytest.mark.parametrize("one, other", UNITS_AND_FUNCTIONS)
def test_units_and_functions_of_whole_numbers(one, other):
    for reference, answer in ((one, other), (other, one)):
        assert math_verify(rf"\boxed{{{answer}}}", reference) == {"score": 1.0, "extracted": 1.0}


@pytest.mark.parametrize("one, other", UNLIKE_UNITS_AND_FUNCTIONS)
def test_units_and_functions_make_nothing_unlike_equal(one, other):
    assert math_verify(rf"\boxed{{{other}}}", one)["score"] == 0.0


def test_functions_of_large_numbers_are_bounded():
    """Neither a size nor a number of arguments, nor a depth, takes long or raises."""
    many = ",".join(str(10**90 + k) for k in range(200))
    for answer in (
        r"\operatorname{lcm}(10^{400},3^{900})",
        rf"\operatorname{{lcm}}({many[:900]})",
        r"\gcd(" * 60 + "1,2" + ")" * 60,
        r"\gcd(9!!!,4)",
        r"\gcd(,)",
        r"\gcd()",
        r"\gcd(1,",
        r"\max\{",
        r"\lcm(0,0)",
        r"\gcd(2^{2^{2^{2^{9}}}},3)",
    ):
        assert math_verify(rf"\boxed{{{answer}}}", "6")["score"] == 0.0


@pytest.mark.parametrize(
    "response, extraction, score, extracted",
    [
        (r"\boxed{71} no, \boxed{72}", "any", 1, 1),
        (r"\boxed{72} no, \boxed{71}", "any", 0, 1),
        (r"\boxed{71}, \boxed{72}", "any", 1, 1),
        (r"\boxed{72} and \boxed{}", "any", 0, 0),
        (r"\boxed{}", "any", 0, 0),
        (r"\boxed{ \$ }", "any", 0, 0),
        (r"\boxed{72", "any", 0, 0),  # cut off
        (r"\boxed{\boxed{72}}", "any", 1, 1),
        (r"\boxed{71} #### 72", "any", 0, 1),  # a box is looked for first
        (r"\boxed{71} #### 72", "marked", 1, 1),
        ("#### 71 no wait #### 72", "any", 1, 1),
        ("#### 72 no wait #### 71", "any", 0, 1),
        ("#### 72", "boxed", 0, 0),
        ("####", "any", 0, 0),
        ("The answer is 72.", "any", 1, 1),
        ("**Answer:** 72", "any", 1, 1),
        ("The final answer is:\n\n**72**\n\nI hope so.", "any", 1, 1),
        ("Answer: `72`", "any", 1, 1),
        ("The final answer is $72$. I hope so.", "any", 1, 1),
        ("The answer is 71 or 72", "any", 0, 1),
        ("The answer is 72. No, the answer is 71", "any", 0, 1),
        ("we get $x = 71$ and so $72$", "any", 1, 1),
        (r"we get \[ 8 \cdot 9 \]", "any", 1, 1),
        ("24 and 48 make 72", "any", 1, 1),
        ("72 is not 71", "any", 0, 1),
        ("I do not know", "any", 0, 0),
        ("", "any", 0, 0),
        ("72" + " " * 3000, "any", 0, 0),  # outside the window
    ],
)
def test_where_the_answer_stands(response, extraction, score, extracted):
    found = math_verify(response, "72", extraction=extraction)
    assert found == {"score": score, "extracted": extracted}


TAGGED = [  # content, reference, score
    (r"\frac{1}{2}", r"\frac{1}{2}", 1),
    (r"\frac{1}{2}", "2", 0),
    ("(3, 5)", "(3,5)", 1),
    ("(3, 5)", "5", 0),
    ("3 or 5", "5", 0),
    ("3\n5", "5", 0),
    ("$3$ or 5", "3", 0),
    ("x^2+1", "1", 0),
    ("x = 5", "5", 1),
    ("B", "B", 1),
    ("(B) Paris", "B", 1),
    ("Monday", "Monday", 1),
    ("March 5", "March 5", 1),
    ("the lines are all parallel", "The lines are all parallel.", 1),
    ("`5`", "5", 1),
    ("$5$ apples", "5", 1),
    ("Total: 5", "5", 1),
    ("\n\\[\n\\frac12\n\\]\n", "1/2", 1),
    ("\\begin{pmatrix}\n1 \\\\ 2\n\\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", 1),
    ("The answer is 5", "5", 1),
    (r"so \boxed{4}, no: \boxed{5}", "5", 1),
    ("6 - 1 = 5\n#### 5", "5", 1),
    ("So she has 5 apples left.", "5", 1),  # a sentence: its last number, as without a tag
    ("So she has 4 or 5 apples left.", "5", 0),
    ("", "5", 0),
    ("4 <answer>5", "5", 1),
]


@pytest.mark.parametrize("content, reference, score", TAGGED)
def test_the_answer_in_a_tag_is_read_as_it_stands(content, reference, score):
    for response in (
        f"<think>7 or 8</think><answer>{content}</answer>",
        rf"\boxed{{7}} #### 8 <answer>9</answer> no: <answer>{content}</answer> 10",
        f"So:\n<answer>{content}",  # a stop string may have cut what closes it
    ):
        assert math_verify(response, reference)["score"] == score
    assert math_verify(r"\boxed{5}", "so <answer>5</answer>")["score"] == 1.0


ON_LINES_OF_ITS_OWN = [
    "The answer is:\n{}",
    "Thus the answer is\n{}",
    "**Final Answer:**\n\n{}\n\nThat is 7.",
    "The answer is given by\n{}",
    "The final answer is, in simplest form:\n\n{}\n",
    "The answer is therefore\n\n{}.",
]


@pytest.mark.parametrize("text", ON_LINES_OF_ITS_OWN)
def test_a_formula_on_lines_of_its_own_behind_answer_is(text):
    for formula in (
        "\\[\n{}\n\\]",
        "$$\n{}\n$$",
        "\\[{}\\]",
        "$${}$$",
        "\\begin{{equation*}}\n{}\n\\end{{equation*}}",
    ):
        for content, score in ((r"\frac{1}{2}", 1), ("x = 0.5.", 1), (r"\frac{1}{3}", 0)):
            response = text.format(formula.format(content))
            assert math_verify(response, "1/2")["score"] == score, response
        one = formula.format("5")
        assert math_verify(text.format(f"{one} or {formula.format('6')}"), "5")["score"] == 0.0


@pytest.mark.parametrize(
    "response, reference",
    [
        (r"The answer is $\$36$.", "36"),
        (r"So he pays $\$36$ in total.", "36"),
        (r"Thus it costs $\$1{,}234.56$.", "1234.56"),
        (r"so $$\$36$$", "36"),
        (r"\(x = \$5\) and \(y = \$36\)", "36"),
        ("He pays $30 and $36 in total.", "36"),
        ("The answer is Monday\n\n$$x=5$$", "Monday"),
        ("The answer is:\n```\n36\n```", "36"),
    ],
)
def test_amounts_and_texts_beside_formulas(response, reference):
    assert math_verify(response, reference)["score"] == 1.0


def test_the_options_reach_the_comparison():
    assert math_verify(r"\boxed{0.33}", "1/3", decimals=2)["score"] == 1.0
    assert math_verify(r"\boxed{\sqrt{2}}", "1.414", decimals=3)["score"] == 1.0
    assert math_verify(r"\boxed{\sqrt{2}}", "1.414")["score"] == 0.0
    assert math_verify(r"\boxed{y+1}", "x+1")["score"] == 0.0
    assert math_verify(r"\boxed{y+1}", "x+1", strict=False)["score"] == 1.0
    assert (
        math_verify(r"\boxed{5}", r"so \boxed{5}")["score"] == 1.0
    )  # a whole solution as reference
    with pytest.raises(InputError, match="'extraction'.*'box'.*'boxed'"):
        RewardPool("math_verify(extraction='box')")


@pytest.mark.parametrize(
    "reference, message",
    [
        ("", "empty"),
        (r"\frac{5}", "cannot be read"),
        ("5 6 7", "cannot be read"),
        ("5^{5^{5^5}}", "cannot be read"),
        ("{" * 100, "cannot be read"),
        (r"\boxed{}", "empty"),
        ("####", "empty"),
        ("He has five apples and eats two of them. " * 6, "is a text, not an answer"),
    ],
)
def test_a_reference_that_cannot_be_read_is_an_error_not_a_zero(reference, message):
    with pytest.raises(ValueError, match=message):
        math_verify(r"\boxed{5+0}", reference)
    with pytest.raises(TypeError, match="must be text, got int"):
        math_verify(r"\boxed{5}", 5)


def test_no_signal_is_used_so_that_a_thread_may_call_it():
    found = []

    def call():
        return found.append(math_verify(r"\boxed{\sqrt{8}}", r"2\sqrt{2}"))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(60)
    assert found == [{"score": 1.0, "extracted": 1.0}]


def test_an_answer_that_cannot_be_compared_scores_nothing():
    matrices = r"\begin{pmatrix}x&y\\z&w\end{pmatrix}" * 9
    for reference in ("5", "x^2=4", r"\{1,2\}", "x<3"):
        assert math_verify(rf"\boxed{{{matrices}}}", reference)["score"] == 0.0


# -- hostile strings ----------------------------------------------------------------------------

REFERENCES = ("5", r"\frac{x}{2}+1", "x^2=4", r"\{1,2\}", r"(-\infty,3]", "x<3")


def score_hostile(pairs):
    """Scores hostile responses, with their kinds: each has a score, so that none escapes a bad one
    by being late."""
    names, responses = zip(*pairs, strict=True)
    samples = [
        {"response": text, "ground_truth": REFERENCES[i % len(REFERENCES)]}
        for i, text in enumerate(responses)
    ]
    with RewardPool("math_verify()", workers=1, timeout_s=15.0) as pool:
        scores = pool.score(samples)
    for name, score in zip(names, scores, strict=True):
        assert score.status == "ok", (name, score)
        assert score.parts["extracted"] in (0.0, 1.0), (name, score)
    return {
        name.partition(",")[0]: sample["ground_truth"]
        for name, sample, score in zip(names, samples, scores, strict=True)
        if score.value == 1.0
    }


# Kinds that keep a worker for half a second or more.
LONG = {
    "inequality",
    "nested subscripts",
    "polynomial",
    "product of matrices",
    "set",
    "tower of e",
    "tower of names",
    "tower of powers",
    "unordered set",
}


@pytest.mark.parametrize("left_out", lanes([LONG], [set()]), ids=len)
def test_hostile_strings_are_scored_and_score_nothing(left_out):
    assert kinds().keys() >= LONG
    pairs = hostile_responses(len(kinds()))
    right = score_hostile([one for one in pairs if one[0].partition(",")[0] not in left_out])
    # What says 5, and only where 5 is the reference.
    assert set(right) <= {
        "nested boxes",
        "many boxes",
        "dollars",
        "answer and dollars",
        "spaces",
        "points",
        "unclosed boxes",
        "marks",
        "equals",
    }
    assert set(right.values()) <= {"5"}


@pytest.mark.slow
def test_ten_thousand_hostile_strings():
    score_hostile(hostile_responses(10_000))
