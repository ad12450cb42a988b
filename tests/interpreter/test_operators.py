"""Operators, conversions and comparisons: the interpreter agrees with CPython."""

from __future__ import annotations

import math
import operator

import pytest

from tests.support.interpreter import bodies, check
from tests.support.interpreter_values import Num

OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "@", "&", "|", "^", "<<", ">>")


class Logged:
    """Every binary operator returns its own name."""

    def __init__(self, name):
        self.name = name


def _add_operators():
    for word in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split():
        for form in ("", "r", "i"):
            name = f"__{form}{word}__"
            setattr(Logged, name, lambda self, other, name=name: (self.name, name, getattr(other, "name", other)))


_add_operators()


class Half:
    """Supports only numbers as its right operand."""

    def __add__(self, other):
        return ("add", other) if isinstance(other, int) else NotImplemented

    def __lt__(self, other):
        return True if isinstance(other, int) else NotImplemented


def body_arithmetic():
    a, b = 17, 5
    return a + b, a - b, a * b, a / b, a // b, a % b, a**b, a & b, a | b, a ^ b, a << b, a >> b, -a, +a, ~a, not a


def body_inplace():
    a = 10
    a += 1
    a -= 2
    a *= 3
    a //= 2
    a **= 2
    a %= 100
    a <<= 2
    a >>= 1
    a |= 1
    a &= 255
    a ^= 3
    b = 7
    b /= 2
    xs = ys = [1]
    xs += [2]
    xs *= 2
    return a, b, xs, xs is ys


def body_inplace_evaluates_once():
    log = []

    def at(i):
        log.append(i)
        return i

    xs = [1, 2]
    xs[at(0)] += 5
    return xs, log


def body_reflected_all():
    a, b = Logged("a"), Logged("b")
    return [
        a + b, 1 + a, a + 1, a - b, 2 - a, a * b, "s" * a, [1] + a, a / 2, 2 / a, a // b, 3 // a, a % b, 4 % a,
        a**b, 2**a, a @ b, [1] @ a, a & 1, 1 & a, a | 1, 1 | a, a ^ 1, 1 ^ a, a << 1, 1 << a, a >> 1,
        1 >> a,
    ]  # fmt: skip


def body_inplace_dunders():
    out = []
    for text in OPERATORS:
        space = {"a": Logged("a")}
        exec(f"a {text}= 5", space)
        out.append(space["a"] if type(space["a"]) is tuple else type(space["a"]).__name__)
    return out


def body_inplace_falls_back():
    x = Num(1)
    x += Num(2)
    y = 5
    y += Num(1)
    return x, y


def body_not_implemented_both():
    Half() + "a"


def body_not_implemented_inplace():
    h = Half()
    h -= 1


def body_not_implemented_falls_to_right():
    class R:
        def __radd__(self, o):
            return "radd"

    return Half() + R(), Half() + 1


def body_subclass_reflected_first():
    class A:
        def __add__(self, o):
            return "A.add"

        def __radd__(self, o):
            return "A.radd"

    class B(A):
        def __radd__(self, o):
            return "B.radd"

    class C(A):
        pass

    return A() + B(), A() + C(), B() + A(), A() + A()


def body_unary():
    n = Num(3)
    return -n, +n, ~n, abs(Num(-4)), round(n), round(n, 2), bool(Num(0)), not n


def body_conversions():
    n = Num(3)
    return int(n), float(n), [0, 1, 2, 3][n], list(range(n)), operator.index(n), complex(1, 2), "ab" * 2, hex(255)


def body_conversion_wrong_type():
    class A:
        def __int__(self):
            return "x"

    int(A())


def body_bool_wrong_type():
    class A:
        def __bool__(self):
            return 1

    if A():
        pass


def body_len_wrong():
    class A:
        def __len__(self):
            return -1

    len(A())


def body_len_not_int():
    class A:
        def __len__(self):
            return "x"

    len(A())


def body_len_missing():
    len(3)


def body_truth_by_len():
    class A:
        def __init__(self, n):
            self.n = n

        def __len__(self):
            return self.n

    return bool(A(0)), bool(A(2)), [1 if A(0) else 2], not A(1), bool(A(0) and 1), (A(0) or "x")


def body_comparisons():
    a, b = Num(1), Num(2)
    return a < b, a > b, a == Num(1), a != b, a == 1, a != 1, [a] == [Num(1)], (a, b) < (a, Num(3)), a in [Num(1)]


def body_comparison_unsupported():
    Num(1) < 5


def body_comparison_unsupported_builtin():
    return 1 < "a"


def body_comparison_default_eq():
    class A:
        pass

    a = A()
    return a == a, a == A(), a != A(), a is a, a is not A()


def body_comparison_ne_from_eq():
    class A:
        def __eq__(self, o):
            return "yes"

    return A() == 1, A() != 1


def body_comparison_returns_object():
    class A:
        def __lt__(self, o):
            return [o]

        def __eq__(self, o):
            return {}

    return A() < 1, 1 > A(), A() == 2, 2 == A()


def body_comparison_chain():
    calls = []

    def f(x):
        calls.append(x)
        return x

    return f(1) < f(3) < f(2) < f(9), calls


def body_reflected_comparison_subclass():
    class A:
        def __lt__(self, o):
            return "A.lt"

        def __gt__(self, o):
            return "A.gt"

    class B(A):
        def __gt__(self, o):
            return "B.gt"

    return A() < B(), A() < A(), B() < A()


def body_operator_module():
    class A:
        v = 3

    return (
        operator.add(Num(1), 2), operator.attrgetter("v")(A()), operator.itemgetter(1)([4, 5]),
        operator.lt(Num(1), Num(2)),
        operator.methodcaller("upper")("a"), operator.not_(Num(0)), operator.getitem([1], 0), operator.concat([1], [2]),
    )  # fmt: skip


def body_math_dunders():
    class A:
        def __floor__(self):
            return "floor"

        def __ceil__(self):
            return "ceil"

        def __trunc__(self):
            return "trunc"

    return math.floor(A()), math.ceil(A()), math.trunc(A()), math.floor(2.5), math.sqrt(Num(9))


def body_matmul():
    class M:
        def __init__(self, v):
            self.v = v

        def __matmul__(self, o):
            return self.v * o.v

        def __imatmul__(self, o):
            self.v = -self.v
            return self

    a = M(2)
    product = a @ M(5)
    b = a
    a @= M(1)
    return product, a.v, a is b


def body_operators_as_none():
    class A:
        __add__ = None

    A() + 1


def body_getattr_only_on_class_for_operators():
    class A:
        def __getattr__(self, name):
            return lambda *a: 42

    A() + 1


def body_bool_short_circuit():
    log = []

    def f(name, value):
        log.append(name)
        return value

    return f("a", 0) and f("b", 1), f("c", []) or f("d", "d"), f("e", 1) and f("f", 2) or f("g", 3), log


def body_numbers():
    return 0.1 + 0.2, 1e300 * 1e10, -7 // 2, -7 % 3, 2**100, 1j * 1j, True + True, int("ff", 16), float("inf"), 5 // 2.0


def body_ternary_and_lambda_default():
    fs = {n: (lambda x, n=n: x**n) for n in range(3)}
    return [fs[n](3) for n in fs], (lambda: (yield))() is not None


def body_identity():
    x = None
    y = []
    return x is None, y is not None, y is y, y == [], ... is Ellipsis, NotImplemented is NotImplemented


@pytest.mark.parametrize("body", bodies(globals()), ids=lambda body: body.__name__)
def test_agrees_with_cpython(body):
    check(body)
