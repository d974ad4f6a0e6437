"""A few rows in the columns of GSM8K and MATH, to try the pipeline without a download.

The problems were written for this purpose; none is of those data sets, and there are too few to
learn from.
"""

GSM8K = [
    {"question": q, "answer": a}
    for q, a in [
        (
            "Mira packs 6 boxes with 8 pears each and eats 3 pears. How many pears are packed and "
            "not eaten?",
            "She packs 6*8=<<6*8=48>>48 pears.\n48-3=<<48-3=45>>45 are left.\n#### 45",
        ),
        (
            "A train has 12 wagons of 90 seats. 1,000 people board. How many seats stay empty?",
            "There are 12*90=<<12*90=1080>>1080 seats.\n1080-1000=<<1080-1000=80>>80.\n#### 80",
        ),
        (
            "Tom saves $4 a day for 3 weeks. How many dollars does he have?",
            "3 weeks have 3*7=<<3*7=21>>21 days.\n21*4=<<21*4=84>>84 dollars.\n#### 84",
        ),
        (
            "A farm has 25 cows and twice as many sheep. How many animals has it?",
            "There are 25*2=<<25*2=50>>50 sheep.\n25+50=<<25+50=75>>75 animals.\n#### 75",
        ),
        (
            "Lena reads 15 pages an hour. How many hours does a book of 240 pages take?",
            "240/15=<<240/15=16>>16 hours.\n#### 16",
        ),
        (
            "A shop sells 3 pens for $2. What do 18 pens cost?",
            "18/3=<<18/3=6>>6 packs.\n6*2=<<6*2=12>>12 dollars.\n#### 12",
        ),
        (
            "A tank holds 2,400 litres and loses 150 litres a day. After how many days is it half "
            "full?",
            "Half is 2400/2=<<2400/2=1200>>1200.\n1200/150=<<1200/150=8>>8 days.\n#### 8",
        ),
        (
            "Five friends share 3 pizzas of 10 slices. How many slices has each?",
            "3*10=<<3*10=30>>30 slices.\n30/5=<<30/5=6>>6.\n#### 6",
        ),
        (
            "A cinema sold 340 tickets at $9. How many dollars is that?",
            "340*9=<<340*9=3060>>3060.\n#### 3,060",
        ),
        (
            "Ana is 4 years older than Bo, who is 9. How old are they together?",
            "Ana is 9+4=<<9+4=13>>13.\n13+9=<<13+9=22>>22.\n#### 22",
        ),
    ]
]

MATH = [
    {"problem": p, "solution": s, "level": f"Level {level}", "type": kind}
    for p, s, level, kind in [
        (r"Solve $3x - 7 = 11$ for $x$.", r"$3x = 18$, so $x = \boxed{6}$.", 1, "Algebra"),
        (
            r"What is $\frac{1}{3} + \frac{1}{6}$?",
            r"$\frac{2}{6} + \frac{1}{6} = \boxed{\frac{1}{2}}$.",
            1,
            "Prealgebra",
        ),
        (r"Simplify $\sqrt{72}$.", r"$\sqrt{36 \cdot 2} = \boxed{6\sqrt{2}}$.", 2, "Algebra"),
        (
            r"How many subsets has a set of 6 elements?",
            r"$2^6 = \boxed{64}$.",
            2,
            "Counting & Probability",
        ),
        (
            r"Find the sum of the roots of $x^2 - 9x + 14 = 0$.",
            r"By Vieta, it is $\boxed{9}$.",
            2,
            "Intermediate Algebra",
        ),
        (
            r"What is the remainder of $7^{4}$ after division by $10$?",
            r"$7^4 = 2401$, so the remainder is $\boxed{1}$.",
            3,
            "Number Theory",
        ),
        (
            r"A circle has radius $5$. What is its area?",
            r"$\pi r^2 = \boxed{25\pi}$.",
            1,
            "Geometry",
        ),
        (
            r"What is the distance between $(1, 2)$ and $(4, 6)$?",
            r"$\sqrt{3^2 + 4^2} = \boxed{5}$.",
            2,
            "Geometry",
        ),
    ]
]


def gsm8k_rows() -> list[dict]:
    """Returns the rows in GSM8K's columns: a source for `rljax data prepare`."""
    return GSM8K


def math_rows() -> list[dict]:
    """Returns the rows in MATH's columns: a source for `rljax data prepare`."""
    return MATH
