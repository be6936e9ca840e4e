"""Expected answers as data sets of the field write them: MATH, GSM8K, AIME, Countdown, multiple choice and others."""

from collections.abc import Callable

BY_HAND = {
    "numbers": r"72|-5|+8|−9|0|.5|-.25|0.333|9.78|10 000|10,001|1,000,000|1,234.5|1,\!002|24,\!000|10^{100}|2^{10}",
    "AIME and bases": r"073|007|204|999|000025|25_8|1011_2|52_{8}",
    "small and large": r"1e-3|2.5e6|1.5E+11|2 \times 10^5|2×10^7|2.5 \cdot 10^{-3}|0.0000001|0.0000002|10!",
    "money and shares": r"$18.90|\$18.95|\$5,\!000|€5.50|£71|\$1,234|57%|61\%|63 percent",
    "fractions": r"1/2|-3/4|\frac{1}{3}|\frac15|\dfrac{3}{8}|-\frac{3}{5}|3 1/2|4\frac{1}{2}|\frac{10}{7}|\frac{-1}{6}",
    "roots": r"½|2\sqrt{3}|\sqrt[3]{2}|\sqrt5|sqrt(7)|\frac{\sqrt{3}}{2}|-\sqrt{2}|70 \sqrt{2}|3\sqrt{13}|√11|5^{1/3}",
    "functions": r"\pi|2π|\frac{\pi}{3}|16\pi|\frac{9}{16}\pi|e^{2}|\ln 2|\log_2 3|\log 5|sin(x)|\cos x|\infty|-\infty",
    "units": r"90^\circ|91°|92 degrees|95 cm|96cm|97 m|98\text{ cm}|99\text{ cm}^2|94\text{ apples}|93 square units",
    "algebra": r"2x+1|x^2+1|p - q|x^2+2x-1|(x-1)(x+2)|4x^3-3x|-x+2|2ab|5t|2h|3xyz|2r|6r^2-4r-24|n(n+1)/2|2^{n-1}",
    "more algebra": r"\frac{x+1}{x-1}|\frac{1}{x}+\frac{1}{y}|x^3 + 3x - 6|16x+8y|6+9i|6 - 5i|-2i|5 + 3i",
    "equations": r"x+2y-z=3|y = 2x+3|y = 5x+3|x=31|a^2+b^2=c^2|y^2 = 4x|x \le 5|x<6|x > 3|1 < x < 2",
    "lists": r"1,-2|1,2,3|-2,1,7|3, 4, 5|\{1,9\}|\{4, 5, 6\}|2 \text{ and } 9|4 or 7|x = 1 \text{ or } x = 8",
    "tuples": r"(2,-3)|(-1, 6)|(1,2,3)|(1,2),(3,4)|\left(\frac{1}{2}, 3\right)|\left( 3, \frac{\pi}{2} \right)",
    "intervals": r"[0,1)|(-\infty, 3]|(3,\infty)|(-\infty,2)\cup(3,\infty)|\left[-2,7\right]",
    "Countdown": r"(1+2)*5|(25-1)*4|3*(4+5)|100 - 25/5",
    "spaces in LaTeX": r"17\,000|18\ 000|2\,345\,678|19~000|\text{88 cm}|\left( 1,\; 9 \right)",
    "places and ratios": r"41st|43^{\text{rd}}|44^{th}|3:2:1|2:3:7|\varnothing",
    "words in LaTeX": r"\text{Evelyn}|\text{even}|\text{odd}",
    "marked": r"$x=2$|$\frac{1}{9}$|\(55\)|\[x+7\]|\boxed{77}",
}
"""Golds that are read, by form."""
LONG = (
    "48/2 = 24 clips, 48+24 = 71\n#### 71",
    "He has 3 dogs.\nThen he buys more.\n#### 1,250",
    "We complete the square, so the answer is $\\boxed{x^2+5}$.",
    "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}",
    "\\begin{pmatrix} 0 & 2 \\\\ 3 & 4 \\end{pmatrix}",
    "\\begin{pmatrix} 1 \\\\ -2 \\end{pmatrix}",
)
DRAWN: tuple[Callable[[int], str], ...] = (
    lambda n: f"{1000 + 7 * n}",
    lambda n: f"-{2000 + n}",
    lambda n: f"{n + 3},{100 + n}",
    lambda n: f"{n + 20} {300 + n}",
    lambda n: f"{n}.{51 + n}",
    lambda n: f"{n + 1}/{10 * n + 23}",
    lambda n: f"\\frac{{{n + 1}}}{{{10 * n + 21}}}",
    lambda n: f"{n + 30}\\sqrt{{{n * 4 + 2}}}",
    lambda n: f"({n + 5}, -{n + 2})",
    lambda n: f"{n + 2}x^2 - {n + 7}",
    lambda n: f"y = {n + 11}x + {n}",
    lambda n: f"\\{{{n + 40}, {n + 60}\\}}",
    lambda n: f"[{n}, {n + 41})",
    lambda n: f"Step {n} gives {n * n}.\n#### {3000 + n}",
    lambda n: f"\\${4000 + n}.75",
    lambda n: f"{n + 3}.5e{n + 12}",
)
"""Forms of which each number makes a gold with a value of its own."""
REFUSED = (
    *("B", "(B)", "b", "A, C", "A and D", "B.", "yes", "no", "No solution", "True", "Tuesday", "Paris", "x", "xyz"),
    *(
        "3 apples",
        "$15 per hour",
        "The answer is 5",
        "5 (five)",
        "no real roots",
        "June 20",
        "2 dogs",
        "1.2.3",
        "5'10\"",
        "7 \\pmod{11}",
    ),
    *("5 \\quad 6", "2\\,3", "0xFF", "1_000", "1.000,50", "12 (mod 7)", "1.5\\text{ million}", "3\\text{ dozen}"),
    *("1969-07-20", "2020-12-25", "12/25/2020", "12:30", "1 2 3", "x +", "{", "\\frac{1}{", "!", "?", "7" * 2000),
    *('{"target": 24, "numbers": [1, 2]}', "[{'a': 1}]", "print(4)", "https://a.b/4"),
)
"""Golds that are no mathematics, or whose mathematics is ambiguous."""
DECOYS = (
    *(("17\\,000", "0"), ("17\\,000", "17"), ("3:2:1", "3:2"), ("41st", "4"), ("\\text{88 cm}", "8")),
    *(("2x+1", "2"), ("2x+1", "1"), ("x^2+1", "1"), ("(2,-3)", "-3"), ("(2, -3)", "(-3, 2)"), ("6+9i", "6")),
    *(("6+9i", "9"), ("1,-2", "1"), ("1,-2", "-2"), ("p - q", "q - p"), ("\\$18.90", "18"), ("10 000", "0")),
    *(("10 000", "10"), ("1e-3", "1"), ("1e-3", "-3"), ("y = 2x+3", "y = 5x+3"), ("2ab", "2"), ("5t", "5")),
    *(("3 1/2", "3/2"), ("3 1/2", "1/2"), ("0.0000001", "0"), ("[0,1)", "(0,1]"), ("x \\le 5", "x < 5")),
    *(
        ("−5", "5"),
        ("25_8", "25"),
        ("25_8", "25_9"),
        ("-3", "(2, -3)"),
        ("2", "2x+1"),
        ("6", "6+9i"),
        ("1", "1,-2"),
        ("1", "\\{1,2\\}"),
        ("2h", "2"),
    ),
    *(("\\text{even}", "\\text{odd}"), ("50%", "5"), ("1,234.5", "1234"), ("$18.90", "$18.09"), ("2^{10}", "10")),
)
"""A gold and another answer, which a reading of parts would take for the same."""


def read_golds() -> list[str]:
    """More than 300 golds that are read, each with a value of its own."""
    by_hand = [gold for line in BY_HAND.values() for gold in line.split("|")]
    return [*by_hand, *LONG, *(form(n) for form in DRAWN for n in range(10))]
