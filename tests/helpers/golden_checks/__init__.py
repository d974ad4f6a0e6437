"""How each golden file is computed here: one module per room, each with a table CHECKS.

`CHECKS["verl/adv_gae"]` is a function (case, dtype) -> {"output/NAME", "grad/NAME", "metric/NAME":
value}.
A value is an array, or (array, keep): compared where keep is true. Every output, gradient and
metric that the
case holds must be there, or be named in "omitted": {key: reason}. Where the product deliberately
differs from
the peer, the check reproduces the peer's behaviour beside a comment that names the difference.
`raise Skip(reason)` leaves out one case. tests/test_golden.py walks the folder and compares.
"""
