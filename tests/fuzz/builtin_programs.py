"""Random programs over subclasses of builtins: overridden methods that call ``super()``, bound methods that are stored
and returned, objects that the step creates, and global state that is read and changed between calls.

``generate(randrange)`` returns the source of a program for ``tests.fuzz.run``.
"""

from __future__ import annotations

from collections.abc import Callable

Randrange = Callable[[int], int]

PRELUDE = """
import array, collections, contextlib, decimal, fractions, functools, io, queue, random, sys, types, warnings
import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
"""

# name of a class: base, constructor expression, methods with arguments and an override of each, state expression
_CLASSES: dict[str, tuple[str, str, tuple[tuple[str, str, str], ...], str]] = {
    "CList": ("list", "CList([1, 2])", (
        ("append", "{I}", "super().append(({A}, 'w'))"),
        ("__len__", "", "return super().__len__() + 10"),
        ("__getitem__", "0", "return ('got', super().__getitem__({A}))"),
        ("index", "1", "return super().index({A}) + 5"),
        ("__iter__", "", "return iter(['s', *super().__iter__()])"),
        ("__repr__", "", "return 'L' + super().__repr__()"),
    ), "list.__repr__({O})"),
    "CDict": ("dict", "CDict(a=1)", (
        ("__setitem__", "'k', {I}", "super().__setitem__({A0}, ({A1}, 'w'))"),
        ("get", "'a'", "return ('g', super().get({A}))"),
        ("__contains__", "'a'", "return not super().__contains__({A})"),
        ("pop", "'a', 0", "return ('p', super().pop(*{AS}))"),
        ("keys", "", "return ['k', *super().keys()]"),
        ("__repr__", "", "return 'D' + super().__repr__()"),
    ), "dict.__repr__({O})"),
    "COrdered": ("collections.OrderedDict", "COrdered(a=1, b=2)", (
        ("move_to_end", "'a'", "super().move_to_end({A}, last=False)"),
        ("popitem", "", "return ('p', super().popitem())"),
        ("setdefault", "'c', {I}", "return ('s', super().setdefault(*{AS}))"),
    ), "list(collections.OrderedDict.items({O}))"),
    "CDeque": ("collections.deque", "CDeque([1], 5)", (
        ("append", "{I}", "super().append(({A}, 'w'))"),
        ("pop", "", "return ('p', super().pop() if self else None)"),
        ("rotate", "1", "super().rotate({A} + 1)"),
    ), "list(collections.deque.__iter__({O}))"),
    "CSet": ("set", "CSet([1])", (
        ("add", "{I}", "super().add(({A}, 'w'))"),
        ("__contains__", "1", "return not super().__contains__({A})"),
    ), "sorted(map(str, set.__iter__({O})))"),
    "CTuple": ("tuple", "CTuple((1, 2))", (
        ("index", "1", "return 100 + super().index({A})"),
        ("__getitem__", "0", "return ('got', super().__getitem__({A}))"),
        ("__len__", "", "return super().__len__() + 7"),
        ("count", "2", "return -super().count({A})"),
    ), "list(tuple.__iter__({O}))"),
    "CInt": ("int", "CInt({I})", (
        ("bit_length", "", "return 100 + super().bit_length()"),
        ("__add__", "{I}", "return super().__add__({A}) * 2"),
        ("__int__", "", "return 77"),
        ("__hash__", "", "return super().__hash__() + 1"),
    ), "int.__repr__({O})"),
    "CFloat": ("float", "CFloat(1.5)", (
        ("is_integer", "", "return not super().is_integer()"),
        ("__mul__", "2", "return super().__mul__({A}) + 1"),
    ), "float.__repr__({O})"),
    "CStr": ("str", "CStr('ab')", (
        ("upper", "", "return 'U' + super().upper()"),
        ("__add__", "'x'", "return super().__add__({A}) + '!'"),
        ("__str__", "", "return 'shown'"),
        ("join", "['x', 'y']", "return '<' + super().join({A}) + '>'"),
    ), "str.__str__({O})"),
    "CBytes": ("bytes", "CBytes(b'ab')", (
        ("upper", "", "return b'U' + super().upper()"),
        ("__len__", "", "return super().__len__() + 1"),
    ), "bytes.hex({O})"),
    "CText": ("io.StringIO", "CText('q')", (
        ("write", "'a'", "return super().write('<' + {A} + '>')"),
        ("getvalue", "", "return '[' + super().getvalue() + ']'"),
    ), "io.StringIO.getvalue({O})"),
    "CRandom": ("random.Random", "CRandom(3)", (
        ("random", "", "return super().random() * 2 + 10"),
        ("getrandbits", "5", "return super().getrandbits({A}) + 100"),
    ), "random.Random.getstate({O})[1][:2]"),
    "CArray": ("array.array", "CArray('i', [1])", (
        ("append", "{I}", "super().append({A} + 100)"),
        ("pop", "", "return super().pop() if super().__len__() else 0"),
    ), "array.array.tolist({O})"),
    "CQueue": ("queue.SimpleQueue", "CQueue()", (("put", "{I}", "super().put(('w', {A}))"),), "{O}.qsize()"),
    "CBytearray": ("bytearray", "CBytearray(b'a')", (("append", "5", "super().append({A} + 1)"),), "bytes({O})"),
    "CError": ("ValueError", "CError('m', {I})", (("__str__", "", "return 'E' + super().__str__()"),), "{O}.args"),
    "CPartial": (
        "functools.partial", "CPartial(max, {I})", (("__call__", "3", "return super().__call__({A}) + 1"),), "{O}.args"
    ),
}  # fmt: skip
_NO_ATTRIBUTES = ("CText",)
_MADE = (
    "types.SimpleNamespace(a={V})", "[{V}, {V}]", "(1, {V})", "{{'k': {V}}}", "collections.OrderedDict(a={V})",
    "collections.deque([{V}], 3)", "types.CellType({V})", "property(lambda self: {V})",
    "functools.partial(max, 1, {I})",
    "staticmethod(lambda: {I})", "fractions.Fraction({I}, 3)", "types.MethodType(lambda s, *a: a, {V})",
    "frozenset([1, {I}])", "slice(1, {I})", "collections.Counter('aab')", "collections.defaultdict(list, a=[{V}])",
    "(lambda: {V})", "iter([{V}])",
)  # fmt: skip
_STATE = (
    ("np.geterr()['over']", "np.seterr(over=['warn', 'ignore', 'raise'][{i} % 3])"),
    ("torch.is_warn_always_enabled()", "torch.set_warn_always({i} % 2 == 0)"),
    ("torch.backends.cuda.flash_sdp_enabled()", "torch.backends.cuda.enable_flash_sdp({i} % 2 == 0)"),
    ("torch.backends.cuda.math_sdp_enabled()", "torch.backends.cuda.enable_math_sdp({i} % 2 == 1)"),
    ("torch.utils.deterministic.fill_uninitialized_memory",
     "setattr(torch.utils.deterministic, 'fill_uninitialized_memory', {i} % 2 == 0)"),
    ("torch.get_default_dtype()", "torch.set_default_dtype([torch.float32, torch.float64][{i} % 2])"),
    ("torch.is_grad_enabled()", "None"), ("np.getbufsize()", "np.setbufsize(1600 * (1 + {i} % 2))"),
    ("torch.backends.cudnn.benchmark", "setattr(torch.backends.cudnn, 'benchmark', {i} % 2 == 0)"),
    ("torch._C._is_multithreading_enabled()", "None"), ("torch.autograd._profiler_enabled()", "None"),
    ("'fuzz_module' in sys.modules",
     "sys.modules.__setitem__('fuzz_module', types.ModuleType('fuzz_module')) if {i} == 2 else None"),
    ("tries()", "sys.modules.__setitem__('fuzz_module', types.ModuleType('fuzz_module')) if {i} == 2 else None"),
    ("sys.getrecursionlimit()", "None"), ("torch.get_num_threads()", "None"),
)  # fmt: skip


class _Program:
    def __init__(self, randrange: Randrange) -> None:
        self.randrange = randrange
        self.lines: list[str] = []
        self.names = 0
        self.classes: dict[str, list[tuple[str, str]]] = {}
        self.objects: list[tuple[str, str]] = []
        self.between: list[str] = []

    def pick(self, options):
        return options[self.randrange(len(options))]

    def fill(self, text: str) -> str:
        while "{I}" in text:
            text = text.replace("{I}", str(self.randrange(6)), 1)
        while "{V}" in text:
            value = self.pick(["x.sum()", "x + 1", str(self.randrange(9)), "'t'", "loss", "x[0]"])
            text = text.replace("{V}", value, 1)
        return text.replace("{{", "{").replace("}}", "}")

    def fresh(self) -> str:
        self.names += 1
        return f"n{self.names}"

    def define(self, name: str) -> str:
        """Writes a class with some methods overridden, and ``raw_``, which returns the state that ``super()`` sees."""
        base, _, methods, _ = _CLASSES[name]
        lines = [f"class {name}({base}):"]
        known = []
        for method, args, body in methods:
            count = len(args.split(",")) if args and "[" not in args else int(bool(args))
            params = [f"a{i}" for i in range(count)]
            if self.randrange(3):
                given = ", ".join(["self", *params])
                text = body.replace("{AS}", f"({', '.join(params)},)").replace("{A}", ", ".join(params))
                text = text.replace("{A0}", "a0").replace("{A1}", "a1")
                lines.append(f"    def {method}({given}): {text}")
                lines.append(f"    def raw_{method.strip('_')}(self): return super().{method}")
                known.append((method, args))
        if not known:
            lines.append("    pass")
        self.classes[name] = known
        return "\n".join(lines)

    def statement(self) -> None:
        kind = self.randrange(10)
        if kind == 9 or not self.objects:
            made = self.fill(self.pick(_MADE)) if self.randrange(3) == 0 else ""
            name = self.fresh()
            if made:
                self.lines.append(f"{name} = {made}")
                self.lines.append(f"log.append({name})")
                return
            cls = self.pick(list(self.classes))
            self.lines.append(f"{name} = {self.fill(_CLASSES[cls][1])}")
            self.objects.append((name, cls))
            return
        obj, cls = self.pick(self.objects)
        known = self.classes[cls]
        if kind == 8:
            ask, change = self.pick(_STATE)
            self.between.append(change)
            self.lines.append(f"log.append({ask})")
        elif kind == 7:
            self.lines.append(f"log.append({_CLASSES[cls][3].replace('{O}', obj)})")
        elif kind == 6 and cls not in _NO_ATTRIBUTES:
            self.lines.append(f"tag({obj}, {self.fill('{V}')})")
        elif kind == 5 and self.randrange(2):
            self.lines.append(f"log.append({obj})")
        elif known:
            method, args = self.pick(known)
            raw = f"{obj}.raw_{method.strip('_')}()"
            call = f"{obj}.{method}" if self.randrange(2) else raw
            args = self.fill(args)
            way = self.randrange(6)
            if way == 0:
                self.lines.append(f"kept['{self.fresh()}'] = {call}")
            elif way == 1:
                self.lines.append(f"log.append(functools.partial({call}{', ' if args else ''}{args}))")
            elif way == 2 and args and "," not in args and "[" not in args:
                self.lines.append(f"log.append(attempt(lambda: list(map({call}, [{args}]))))")
            else:
                self.lines.append(f"log.append(attempt(lambda: plain({call}({args}))))")
        else:
            self.lines.append(f"log.append({obj} is {self.pick(self.objects)[0]})")


_HELPERS = """
def attempt(call):
    try:
        return call()
    except (TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
        return type(error).__name__


def plain(value):
    return list(value) if type(value).__name__ in ('odict_keys', 'dict_keys', 'list_iterator') else value


def tries():
    try:
        import fuzz_module
        return True
    except ImportError:
        return False


def tag(obj, value):
    try:
        obj.count = getattr(obj, 'count_', 0) + 1
        obj.value = value
    except AttributeError as error:
        return type(error).__name__
"""


def generate(randrange: Randrange) -> str:
    """Returns the source of one program."""
    program = _Program(randrange)
    names = list(_CLASSES)
    chosen = [names.pop(randrange(len(names))) for _ in range(1 + randrange(3))]
    definitions = [program.define(name) for name in chosen]
    outside = []
    for name in chosen:
        if randrange(2):
            holder = f"o{len(outside)}"
            outside.append((holder, name))
            program.objects.append((f"world.{holder}", name))
    if randrange(3) == 0 and outside:
        program.objects.append(("given", outside[0][1]))
    setup = [f"world.{holder} = {program.fill(_CLASSES[cls][1])}" for holder, cls in outside]
    for holder, cls in outside:
        for method, _ in program.classes[cls]:
            if randrange(3) == 0:
                setup.append(f"kept['{holder}_{method}'] = world.{holder}.raw_{method.strip('_')}()")
    stored = [line.split("'")[1] for line in setup if line.startswith("kept")]
    for _ in range(3 + randrange(8)):
        program.statement()
        if stored and randrange(6) == 0:
            key = stored[randrange(len(stored))]
            method = key.split("_", 1)[1]
            args = next(program.fill(a) for n in chosen for m, a in program.classes[n] if m == method)
            program.lines.append(f"log.append(attempt(lambda: plain(kept['{key}']({args}))))")
    given = outside[0] if any(name == "given" for name, _ in program.objects) else None
    replaced = [each for each in outside if randrange(3) == 0]
    renewed = [f"        if index == 2: world.{h} = {program.fill(_CLASSES[c][1])}" for h, c in replaced]
    changes = [f"        {change.format(i='index')}" for change in dict.fromkeys(program.between)]
    body = "\n".join(f"        {line}" for line in program.lines)
    shown = "\n".join(
        f"        seen.append({_CLASSES[cls][3].replace('{O}', f'world.{holder}')})" for holder, cls in outside
    )
    argument = f"world.{given[0]}" if given else "None"
    return f"""{PRELUDE}
{chr(10).join(definitions)}
{_HELPERS}

def build():
    world, kept, log = types.SimpleNamespace(), {{}}, []
    before = np.geterr()
{chr(10).join("    " + line for line in setup)}

    def step(x, given):
        loss = (x * 2).sum()
{body}
        return x.sin(), loss

    def between(index):
        log.clear()
{chr(10).join(renewed + changes) or "        pass"}

    def arguments(index):
        return torch.full((2,), float(index)), {argument}

    def roots():
        seen = []
{shown or "        pass"}
        return [seen, [show(each) for each in log], sorted(kept), [call_of(each) for each in kept.values()]]

    return step, between, arguments, roots


def show(value):
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, types.CellType):
        return ('cell', value.cell_contents)
    if isinstance(value, property):
        return ('property', value.fget(None))
    if isinstance(value, (staticmethod, types.FunctionType)):
        return ('function', value() if isinstance(value, types.FunctionType) else value.__func__())
    if isinstance(value, functools.partial):
        return ('partial', type(value).__name__, call_of(value.func), value.args, vars(value))
    tags = {{name: held for name, held in getattr(value, '__dict__', {{}}).items()}}
    text = type(value).__name__ + ' ' + {{}}.get(type(value).__name__, content(value))
    return text, tags, callable(value) and call_of(value)


def content(value):
    for base in (str, bytes, int, float, tuple, list, collections.OrderedDict, dict, set, frozenset, collections.deque):
        if isinstance(value, base):
            return base.__repr__(value).replace(type(value).__name__, base.__name__)
    return ''


def call_of(method):
    owner = getattr(method, '__self__', None)
    return (getattr(method, '__name__', '?'), type(method).__name__, type(owner).__name__)
"""
