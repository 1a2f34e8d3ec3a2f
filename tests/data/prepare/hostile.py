"""Texts that must never become a formula, and a fuzzer that makes more of them.

    python -m tests.data.prepare.hostile [texts] [seed]

Each text has to be refused as a user's mistake, or be a formula that keeps what formulas promise.
"""

from __future__ import annotations

import random
import sys
from collections import Counter

import numpy as np

from slipstream.base.errors import UserError
from slipstream.data.prepare.formulas import FUNCTIONS, parse_formula

ACCESS = """
a.__class__
a.__class__.__mro__
(1).__class__
1.0.__class__
().__class__.__bases__
a.real
a.T
a.tofile
mean.__globals__
lag.__code__
a.__array_interface__
(a + b).__class__
log(a).tobytes()
a.dtype.type
a . b
a.__init__.__globals__
hour().__class__
a.b.c.d
1 .real + a
mean(a, 3).dump
""".strip().splitlines()
CALLS = """
__import__(a)
__builtins__(a)
eval(a)
exec(a)
compile(a, b, a)
open(a)
input()
print(a)
globals()
locals()
vars(a)
dir(a)
getattr(a, b)
setattr(a, b, 1)
type(a)
object()
breakpoint()
exit()
quit()
help()
memoryview(a)
bytes(10000000000)
range(1000000000)
list(a)
sorted(a)
map(log, a)
super()
id(a)
hash(a)
repr(a)
os()
system(a)
np(a)
numpy(a)
pow(a, 2)
round(a)
compute_mean(a, 3)
_evaluate(a)
Operation(a)
log(a)(a)
(log)(a)(b)
where(a, b, a)()
lag(a)(1)
a(b)
a()
1(a)
(a)(b)
(lambda)(a)
mean(mean)(3)
log(*a)
log(**a)
mean(*a, 3)
mean(a, *b)
mean(a, rows=3)
log(x=a)
mean(x=a, rows=3)
lag(a, n=1)
log(a for a in b)
sum(a for b in a)
mean(a, 3 for b in a)
log(a, b)
log()
where(a)
where(a, b)
where(a, b, a, b)
hour(a)
cumsum(a, 3)
mean(a)
mean(3)
mean()
mean(a, 3, 3)
clip(a, 1)
maximum(a)
LOG(a)
Mean(a, 3)
mean (a, b)
`log`(a)
`mean`(a, 3)
log`a`
`a`b
`a``b`
2`a`
""".strip().splitlines()
SYNTAX = """
a[0]
a[:]
a[0:1]
a[a > 1]
[a]
[a for a in b]
{a}
{a: b}
{}
[]
(a, b)
a, b
()
(a,)
a; b
a = b
a := b
(a := b)
a += 1
lambda: a
lambda a: a
a if b else a
a if b
not
yield a
(yield a)
await a
return a
import os
from os import path
del a
pass
assert a
raise a
global a
print a
for a in b
while a
def f(a)
class A
with a
try
a in b
a not in b
a is b
a is not b
a is None
None
True
False
a == None
a and True
...
a + ...
Ellipsis()
"a"
'a'
a + "b"
f"{a}"
f'{a.__class__}'
b"a"
r"a"
u"a"
\"\"\"a\"\"\"
a # comment
# a
a \\\\ b
a @ b
a & b
a | b
a ^ b
~a
a << 2
a >> 2
a <> b
a === b
a =! b
a ** b
2 ** a
a ** 17
a ** -17
a ** 1e9
9 ** 9 ** 9 * a
a ** 9 ** 9
a ** (2)  ** 99
a ** log(2)
a ** True
1j * a
a + 3J
1e31 * a
1e999 * a
-1e999 * a
0777 * a
1_ + a
1__0 + a
0xg + a
1if a else 2
1or a
0_7 + a
a ? b
a ?: b
a $ b
a! + b
@a
a : b
a -> b
(a
a)
((a)
)a(
a +
+ * a
* a
/ a
a b
a 1
1 a
``
` `
`a
a`
`a``
a + `b
1 + 2
3
""".strip().splitlines()
ROWS = """
lag(a, b)
lag(a, 1.5)
lag(a, 1e3)
lag(a, 1j)
lag(a, True)
lag(a, None)
lag(a, lag(a))
lag(a, 1 + 1)
lag(a, --1)
lag(a, +1)
lag(a, 100001)
lag(a, -100001)
lag(a, 99999999999999999999999)
mean(a, 0)
mean(a, -1)
mean(a, 1 - 2)
mean(a, 100001)
std(a, 1)
zscore(a, 1)
ema(a, 0)
max(a, b)
min(a, 0)
""".strip().splitlines()
UNICODE = [
    "\u0430 + 1",  # a Cyrillic letter
    "\uff41 + 1",  # a full-width a, which Python reads as a
    "\U0001d41a + 1",  # a bold a
    "\u00aa + 1",  # an ordinal, which Python reads as a
    "\ufb01 + a",
    "\uff3f\uff3fimport\uff3f\uff3f(a)",
    "__\u0131mport__(a)",
    "a\u200b + 1",
    "a\u202e + 1",
    "a\u00a0+ 1",
    "a\u2028+ 1",
    "a \u2212 1",
    "a \u00d7 2",
    "\u0663 * a",
    "a \uff0b 1",
    "a\ufeff",
    "\ufeffa",
    "a\u0301",
    "\u03bb + a",
    "\u03bbaa",
    "\u03bbaa_ + `x`",
    "\ud800",
    "a\x00",
    "a\x00b",
    "a\x1b[2J",
    "a\x0c+ 1",
    "a\x0b",
    "a\\",
    "a\\\n+ 1",
    "`\n`",
]
LONG = [
    "(" * 400 + "a" + ")" * 400,
    "-" * 900 + "a",
    "+" * 900 + "a",
    "not " * 240 + "a",
    "log(" * 190 + "a" + ")" * 190,
    "+".join(["a"] * 400),
    "**2".join(["a"] * 250),
    "<".join(["a"] * 500) + "<" * 2,
    "a" * 1001,
    " " * 1000 + "a",
    "a + " + "1" * 997,
    "9" * 900 + " * a",
    "0." + "0" * 990 + "1*a(",
    "where(a," * 100 + "a",
    "lag(" * 60 + "a" + ", 1)" * 60,
    "`" * 999,
    "`a` " * 200,
    "a" + "()" * 400,
    "a" + ".b" * 400,
    "[" * 500,
    "{" * 500,
    "-(" * 300 + "a" + ")" * 300,
    "",
    " ",
    "\n\t",
]
HOSTILE = [*ACCESS, *CALLS, *SYNTAX, *ROWS, *UNICODE, *LONG]
FORMULAS = [
    "a + b * 2",
    "log(a / lag(a, 1))",
    "zscore(`c d`, 20)",
    "where(a > b and not b <= 0, mean(a, 5), -b)",
    "(a - min(b, 9)) / (max(b, 9) - min(b, 9))",
    "clip(diff(a, 3), -1, 1) ** 2",
    "ema(a, 12) - ema(a, 26)",
    "cumsum(abs(b)) % 7 // 2",
    "sin(hour() / 24) + weekday() * month()",
    "lag(a, -3) + std(lag(b, 2), 4)",
    "1e-3 * a ** 0.5 - .5",
    "fill(`c d`, median(a, 3)) * missing(b)",
]
FRAGMENTS = [
    *("a", "b", "`c d`", "1", "2.5", "1e9", "-", "+", "*", "/", "**", "%", "(", ")", ",", " "),
    *("<", ">=", "==", "and", " or ", "not ", ".", "__class__", "[", "]", ":", "=", "lambda"),
    *("`", "'", '"', "\\", "\n", "é", "\x00", "if", " else ", " for a in b", "9" * 40, "True"),
    *(f"{name}(" for name in FUNCTIONS),
]


def mutate(draw: random.Random) -> str:
    """Return a formula or hostile text with some pieces cut, moved, repeated or put in."""
    text = draw.choice(FORMULAS if draw.random() < 0.8 else HOSTILE)
    for _ in range(draw.randrange(5)):
        begin = draw.randrange(len(text) + 1)
        end = min(begin + draw.randrange(8), len(text))
        piece = draw.choice(
            [draw.choice(FRAGMENTS), "", text[begin:end] * 2, f"({text})", draw.choice(FORMULAS)]
        )
        text = text[:begin] + piece + text[end:]
    return text[:1200]


def check_text(text: str, columns: dict[str, np.ndarray], times: np.ndarray, cut: int) -> str:
    """Return what a text is: refused, or a formula whose past does not depend on its future."""
    try:
        formula = parse_formula(text)
        formula.check_columns(columns)
    except UserError as error:
        return "refused" if str(error) else "wrong"
    whole = formula.evaluate(columns, times)
    part = formula.evaluate({name: x[:cut] for name, x in columns.items()}, times[:cut])
    certain = max(cut - formula.look_ahead, 0)
    same = np.array_equal(part[:certain], whole[:certain], equal_nan=True)
    if formula.look_back is not None:
        late = formula.evaluate({name: x[cut:] for name, x in columns.items()}, times[cut:])
        back = formula.look_back
        same &= np.array_equal(late[back:], whole[cut + back :], equal_nan=True)
    sound = whole.shape == times.shape and whole.dtype == np.float64 and not np.isinf(whole).any()
    return "evaluated" if same and sound else "wrong"


def fuzz(count: int, seed: int) -> Counter[str]:
    """Return how many of so many random texts were refused, evaluated, or wrong."""
    draw, random_values = random.Random(seed), np.random.default_rng(seed)
    columns = {name: random_values.standard_normal(60) for name in ("a", "b", "c d")}
    columns["b"][random_values.random(60) < 0.1] = np.nan
    times = 1_700_000_000_000_000 + 900_000_000 * np.arange(60)
    outcomes: Counter[str] = Counter()
    for _ in range(count):
        text = mutate(draw)
        try:
            outcome = check_text(text, columns, times, draw.randrange(61))
        except Exception as error:
            outcome = "wrong"
            text += f" ({error!r})"
        outcomes[outcome] += 1
        if outcome == "wrong":
            sys.stderr.write(f"formula: {text!r}\n")
    return outcomes


if __name__ == "__main__":
    numbers = [int(text) for text in sys.argv[1:]]
    sys.stdout.write(f"{dict(fuzz(*(numbers + [10_000, 0][len(numbers) :])))}\n")
