"""Bodies that Python 3.11 cannot read or run, as far as the running Python can."""

from __future__ import annotations

from typing import Any

from sidefx_train.compile.capture.interpreter.bytecode_versions import VERSION
from tests.support.interpreter import bodies

SOURCES = {
    (3, 12): '''
def body_type_parameters():
    def first[T: int, *Ts, **P](a: T, *rest: *Ts) -> T:
        return a
    class Box[T]:
        def get(self, x: T) -> T:
            return x
    type Pairs[T] = list[tuple[T, T]]
    names = [each.__name__ for each in first.__type_params__]
    return first(1, 2), Box[int]().get(2), names, Pairs.__name__, Pairs[int].__origin__ is Pairs

def body_nested_quotes():
    values = {"a": 1}
    return f"{values["a"]} {f"{values["a"]:>{3}}"}"
''',
    (3, 14): '''
def shown(template):
    return [part if isinstance(part, str) else (part.value, part.expression, part.conversion, part.format_spec)
            for part in template]

def body_template_strings():
    n, width, name = 3, 10, "x"
    template = t"a{n}b{name!r:>{width}}{n + 1!s}{width:05d}{n!a}"
    return shown(template), template.strings, template.values

def body_joined_template_strings():
    n = 3
    joined = t"{n}" t"{n + 1}!" + t"" + t"{n=}"
    return shown(joined), joined.strings, t"".strings, t"plain".values

def body_template_string_that_raises():
    n = 0
    return t"{n} {1 / n}"

def body_exceptions_without_parentheses():
    found = []
    for text in ("x", None, "1"):
        try:
            found.append(int(text))
        except ValueError, TypeError:
            found.append(None)
    return found

def body_partial_with_placeholders():
    from functools import Placeholder, partial, partialmethod
    def four(a, b, c, d=0, **more):
        return a, b, c, d, more
    one = partial(four, Placeholder, 2, Placeholder, 4, x=1)
    two = partial(one, 10)
    class Holder:
        method = partialmethod(four, Placeholder, 7)
    results = [one(1, 3), one(1, 3, y=2), two(30), partial(one, Placeholder, 8)(9), Holder().method(1)[1:]]
    errors = []
    for call in (lambda: one(1), lambda: two()):
        try:
            call()
        except TypeError as error:
            errors.append(str(error))
    return results, errors

def body_map_strict():
    found = [list(map(max, [1, 5], [3, 2], strict=True))]
    try:
        list(map(max, [1, 5], [3], strict=True))
    except ValueError as error:
        found.append(str(error))
    return found

def body_truth_of_not_implemented():
    try:
        return bool(NotImplemented)
    except TypeError as error:
        first = str(error)
    return first, "yes" if NotImplemented else "no"

def body_power_with_modulus():
    class Number:
        def __rpow__(self, other, modulus=None):
            return "reflected", other, modulus
    return pow(2, Number(), 5), pow(2, Number()), 2 ** Number()

def body_sums():
    return sum([0.1] * 10), sum([0.1 + 1j] * 10), sum([1, 0.1, 0.2])

def body_deferred_annotations():
    def fn(a: missing, b: int = 3, *, c: "str" = 4) -> list[undefined]:
        return a, b, c
    class Later:
        x: Unknown
        y: int = 3
    errors = []
    for holder in (fn, Later):
        try:
            holder.__annotations__
        except NameError as error:
            errors.append(str(error))
    missing = undefined = Unknown = int
    same = fn.__annotate__(1) == fn.__annotations__ == {"a": int, "b": int, "c": "str", "return": list[int]}
    named = fn.__annotate__.__qualname__, Later.__annotate__.__qualname__
    return fn(1), errors, same, named, Later.__annotations__, Later.y

def body_conditional_annotations():
    class Conditional:
        if True:
            x: int = 1
        else:
            y: str = 2
        for z in range(2):
            w: float = z
    return Conditional.__annotations__, Conditional.w
''',
}  # fmt: skip
"""By the first release that reads it."""


def newer_bodies() -> dict[str, Any]:
    """Returns the bodies by name."""
    found: dict[str, Any] = {}
    for release, source in SOURCES.items():
        if release <= VERSION:
            space: dict[str, Any] = {"__name__": __name__}
            exec(compile(source, f"<syntax of {release}>", "exec", dont_inherit=True), space)
            found.update((body.__name__, body) for body in bodies(space))
    return found
