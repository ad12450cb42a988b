"""Strings, formatting and printing: the interpreter agrees with CPython."""

from __future__ import annotations

import pytest

from tests.support.interpreter import bodies, check
from tests.support.interpreter_values import Num


def body_str_repr():
    class A:
        def __str__(self):
            return "str"

        def __repr__(self):
            return "repr"

    class B:
        def __repr__(self):
            return "only repr"

    class C(A):
        pass

    return str(A()), repr(A()), str(B()), str(C()), [A()].__repr__(), str([B()]), ascii(B()), "%s %r" % (A(), A())


def body_str_wrong_type():
    class A:
        def __str__(self):
            return 3

    str(A())


def body_fstrings():
    n, x, w = Num(3), 3.14159, 10
    name = "é"
    return (
        f"{n}", f"{n:>5}", f"{x:.2f}", f"{x:{w}.{2}f}|", f"{name!r} {name!a} {name!s:>4}", f"{n=}", f"{x=:.1f}",
        f"{'nested ' + f'{w}'}", "{literal}", f"{[1, 2]}", f"{None} {True}", f"{w:,} {w:#x} {w:08b}", f"{w!r:^6}|",
    )  # fmt: skip


def body_fstring_order():
    log = []

    class A:
        def __init__(self, n):
            self.n = n

        def __format__(self, spec):
            log.append((self.n, spec))
            return str(self.n)

    return f"{A(1)}{A(2):x}{A(3)!s:.0}", log


def body_fstring_bad_spec():
    return f"{'a':d}"


def body_format_method():
    n = Num(3)
    return "{} {1} {k:>4} {k!r} {d[a]} {n.v}".replace("{}", "{0}").format(n, 2, k=n, d={"a": 5}, n=n), format(n, "zz")


def body_format_method_of_fields():
    log = []

    class Level(str):
        def __format__(self, spec):
            log.append(spec)
            return f"<{spec}>"

        def __str__(self):
            return "a level"

    class Numbered(dict):
        def __missing__(self, key):
            log.append(key)
            return Level(key)

    class Items:
        def __getitem__(self, key):
            log.append(key)
            return key

    level, n = Level("high"), Num(3)
    return (
        "{level} {level!s:>9} {level!r} {d[k]:{w}} {l[0]} {n.v:{{}".replace("{{}", "{w}}").format(
            level=level, d={"k": level}, l=[n], n=n, w=4
        ),
        "{level:x} {other} {{}}".format_map(Numbered(level=level)),
        "{0[a b]} {0[-1]} {0[2]} {1}".format(Items(), level),
        "{} {} {!a}".format(level, [n], "é"),
        log,
    )


def body_format_method_errors():
    found = []
    for template in (
        "{} {0}", "{0} {}", "{1} {5}", "{", "}", "{!x}", "{0!}", "{0[}", "{0.}", "{k} {l}", "{0:{0:{0}}}",
        "{0:{1:{2:}}}", "{0.a}", "{0[a]}", "{0!r", "{:{}}", "{0:d}", "{0]}",
    ):  # fmt: skip
        for how in ("format", "map"):
            try:
                found.append(
                    template.format(Num(1), Num(2), k=Num(3)) if how == "format" else template.format_map({"k": 1})
                )
            except Exception as error:
                found.append((type(error).__name__, str(error)))
    return found


def body_percent_format():
    return "%s-%d-%.2f-%r-%%" % ("a", 3, 2.5, "q"), "%(a)s" % {"a": 1}, "%5s|%-5s|" % ("x", "y")


def body_string_methods():
    return "a,b".split(","), "-".join(["a", "b"]), " x ".strip(), "abc"[::-1], "abc".find("c"), "x".zfill(3)


def body_string_building():
    out = ""
    for i in range(3):
        out += str(i) + ("," if i < 2 else "")
    return out, "".join(reversed(out)), out * 2, out.replace(",", "")


def body_print_objects():
    class A:
        def __str__(self):
            return "an A"

    print(A(), [1], None, sep="|")
    print("%s" % A(), end="")


@pytest.mark.parametrize("body", bodies(globals()), ids=lambda body: body.__name__)
def test_agrees_with_cpython(body):
    check(body)
