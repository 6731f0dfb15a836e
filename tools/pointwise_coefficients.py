"""Prints the polynomials of csrc/cpu/pointwise/functions.h. Needs mpmath, which torch brings along.

Each is a least-squares fit in 60 digits at Chebyshev nodes, which is close to the polynomial of the
smallest maximum error. Coefficients are rounded to their type one by one, from the lowest, and
those that follow are fitted again to what is left.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import mpmath
from mpmath import mp, mpf

mp.dps = 60


def round_to(value: mpf, kind: str) -> mpf:
    """The nearest number of kind 'f' (float) or 'd' (double)."""
    return mpf(struct.unpack(kind, struct.pack(kind, float(value)))[0])


def fit(
    function: Callable[[mpf], mpf],
    low: float,
    high: float,
    degree: int,
    kind: str,
    weight: Callable[[mpf], mpf] = lambda x: mpf(1),
) -> list[mpf]:
    """c[0] + c[1] x + ... of `kind`, close to the function in [low, high], with weighted errors."""
    count = 12 * (degree + 1)
    middle, half = mpf(low + high) / 2, mpf(high - low) / 2
    nodes = [middle + half * mpmath.cos(mp.pi * (2 * i + 1) / (2 * count)) for i in range(count)]
    rest = [function(x) for x in nodes]
    coefficients: list[mpf] = []
    for first in range(degree + 1):
        powers = range(first, degree + 1)
        matrix = mpmath.matrix(count, len(powers))
        right = mpmath.matrix(count, 1)
        for row, x in enumerate(nodes):
            for column, power in enumerate(powers):
                matrix[row, column] = weight(x) * x**power
            right[row] = weight(x) * rest[row]
        value = round_to(mpmath.lu_solve(matrix, right)[0], kind)
        coefficients.append(value)
        rest = [left - value * x**first for left, x in zip(rest, nodes, strict=True)]
    return coefficients


def show(
    name: str,
    coefficients: list[mpf],
    kind: str,
    error: Callable[[mpf], mpf],
    nodes: list[mpf],
) -> None:
    suffix = "f" if kind == "f" else ""
    digits = 9 if kind == "f" else 17
    texts = [f"{mpmath.nstr(c, digits, min_fixed=0, max_fixed=0)}{suffix}" for c in coefficients]
    worst = max(abs(error(x)) for x in nodes)
    print(f"{name}: {{{', '.join(texts)}}}\n  largest error {mpmath.nstr(worst, 3)}")


def evaluate(coefficients: list[mpf], x: mpf) -> mpf:
    return sum((c * x**i for i, c in enumerate(coefficients)), mpf(0))


def grid(low: float, high: float) -> list[mpf]:
    points = [mpf(low) + mpf(high - low) * i / 997 for i in range(998)]
    return [point for point in points if point]


def main() -> None:
    half_ln2 = 0.3500
    for kind, degree in (("f", 4), ("d", 9)):

        def exp_rest(r: mpf) -> mpf:
            return (mpmath.expm1(r) - r) / r**2 if r else mpf(1) / 2

        c = fit(exp_rest, -half_ln2, half_ln2, degree, kind, lambda r: r**2)
        show(
            f"exp, {kind}",
            c,
            kind,
            lambda r, c=c: (r + r**2 * evaluate(c, r) - mpmath.expm1(r)) / mpmath.exp(r),
            grid(-half_ln2, half_ln2),
        )

    def tanh_rest(z: mpf) -> mpf:
        x = mpmath.sqrt(z)
        return (mpmath.tanh(x) / x - 1) / z if z else -mpf(1) / 3

    c = fit(tanh_rest, 0, 0.3136, 5, "f", lambda z: z)
    show(
        "tanh",
        c,
        "f",
        lambda x, c=c: (x + x**3 * evaluate(c, x**2)) / mpmath.tanh(x) - 1,
        grid(0.01, 0.56),
    )

    def erf_rest(z: mpf) -> mpf:
        x = mpmath.sqrt(z)
        return mpmath.erf(x) / x - 1 if z else 2 / mpmath.sqrt(mp.pi) - 1

    c = fit(erf_rest, 0, 1, 6, "f")
    show(
        "erf below 1",
        c,
        "f",
        lambda x, c=c: (x + x * evaluate(c, x**2)) / mpmath.erf(x) - 1,
        grid(0.01, 1),
    )

    def log_erfc(x: mpf) -> mpf:
        return mpmath.log(mpmath.erfc(x + 1))

    c = fit(log_erfc, 0, 3, 7, "f", lambda x: mpmath.erfc(x + 1))
    show(
        "log erfc(x + 1)",
        c,
        "f",
        lambda x, c=c: (mpmath.exp(evaluate(c, x)) - mpmath.erfc(x + 1)) / mpmath.erf(x + 1),
        grid(0, 3),
    )

    def normal_tail(t: mpf) -> mpf:
        """The normal distribution's share below -a, over e^(-a^2 / 2) t; t = 1 / (1 + 0.35 a)."""
        z = (1 / t - 1) / mpf("0.35") / mpmath.sqrt(2)
        return mpmath.erfc(z) * mpmath.exp(z * z) / 2 / t

    lowest = 1 / (1 + 0.35 * 14.5)
    c = fit(normal_tail, lowest, 1, 8, "f", lambda t: 1 / normal_tail(t))
    show("normal tail", c, "f", lambda t, c=c: evaluate(c, t) / normal_tail(t) - 1, grid(lowest, 1))
    for name, kind, degree, top in (("log1p", "f", 4, 1 / 3), ("log", "d", 7, 0.1716)):

        def atanh_rest(z: mpf) -> mpf:
            s = mpmath.sqrt(z)
            return (2 * mpmath.atanh(s) / s - 2) / z if z else mpf(2) / 3

        c = fit(atanh_rest, 0, top**2, degree, kind, lambda z: z)
        show(
            f"{name}, {kind}",
            c,
            kind,
            lambda s, c=c: (2 * s + s**3 * evaluate(c, s**2)) / (2 * mpmath.atanh(s)) - 1,
            grid(0.001, top),
        )


if __name__ == "__main__":
    main()
