"""Random training steps as Python source."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.fuzz import templates

Choose = Callable[[int], int]
"""``choose(n)`` returns a number below ``n``; 0 is the simplest choice."""

_HOLE = re.compile(r"\{([+=]?[A-Z]+)(\d?)\}")
_DECLARE = "nonlocal c_n, c_list, c_box\nglobal G_N, G_LIST, G_TABLE"
_DEEPEST = 3


def from_seed(seed: int) -> str:
    """Returns the program of a seed."""
    return generate(random.Random(seed).randrange)


@dataclass
class _Scope:
    """Names that the code at this place may use."""

    ints: list[str] = field(default_factory=list)
    assignable: list[str] = field(default_factory=list)
    lists: list[str] = field(default_factory=list)
    tensors: list[str] = field(default_factory=list)
    objects: list[str] = field(default_factory=list)

    def inner(self, function: bool) -> _Scope:
        """Returns the scope of a block; a nested function only reads the names around it."""
        assignable = [] if function else list(self.assignable)
        return _Scope(list(self.ints), assignable, list(self.lists), list(self.tensors), list(self.objects))


class _Generator:
    def __init__(self, choose: Choose) -> None:
        self.choose = choose
        self.scope = _Scope()
        self.count = 0
        self.depth = 0

    def pick(self, options: list[str]) -> str:
        return options[self.choose(len(options))]

    def fresh(self, stem: str) -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def expression(self, kind: str, level: int = 0) -> str:
        """Returns code of one kind; deeply nested, only the simplest."""
        if kind == "N":
            return str(self.choose(5))
        if kind == "K":
            return self.pick(templates.KEYS)
        options, simple = {
            "I": ([*self.scope.ints, *templates.INTS], 12),
            "B": (templates.BOOLS, 1),
            "L": ([*templates.LISTS, *self.scope.lists], 9),
            "C": (templates.ANY_LISTS, 3),
            "D": (templates.DICTS, 4),
            "S": (templates.SETS, 1),
            "V": (templates.VALUES, 3),
            "T": ([*self.scope.tensors, *templates.TENSORS], 2),
            "W": (templates.HELD, 1),
            "O": ([*templates.OBJECTS, *self.scope.objects], 4),
        }[kind]
        if level > 2:
            options = options[:simple]
        return self.fill(self.pick(options), {}, level + 1)

    def fill(self, text: str, names: dict[str, str], level: int = 0) -> str:
        """Fills the holes of an expression."""

        def hole(match: re.Match[str]) -> str:
            kind = match.group(1)
            if kind.startswith("+"):
                if kind not in names:
                    names[kind] = self.fresh({"+I": "i", "+T": "t", "+L": "l", "+O": "o", "+F": "f"}[kind])
                return names[kind]
            if kind == "=I":
                return self.pick(self.scope.assignable) if self.scope.assignable else "box.n"
            if match.group(2):
                if match.group(0) not in names:
                    names[match.group(0)] = self.expression(kind, level)
                return names[match.group(0)]
            return self.expression(kind, level)

        return _HOLE.sub(hole, text).replace("{{", "{").replace("}}", "}")

    def statement(self, template: str) -> list[str]:
        """Returns the lines of one statement."""
        lines: list[str] = []
        names: dict[str, str] = {}
        outer = self.scope
        block = "\n    " in template
        function = template.startswith(("def ", "made"))
        for line in template.split("\n"):
            indent, text = line[: len(line) - len(line.lstrip())], line.lstrip()
            if text == "DECLARE":
                lines += [indent + part for part in _DECLARE.split("\n")]
            elif text == "{BODY}":
                self.scope = outer.inner(function)
                if block and not function:
                    self.learn(names, self.scope)
                lines += [indent + part for part in self.body()]
                self.scope = outer
            else:
                lines.append(indent + self.fill(text, names))
        inside = block and not template.startswith(("def ", "made"))
        if not inside:
            self.learn(names, self.scope)
        return lines

    def learn(self, names: dict[str, str], scope: _Scope) -> None:
        """Adds the new names of a statement to the scope."""
        known = {"+I": scope.ints, "+L": scope.lists, "+T": scope.tensors, "+O": scope.objects}
        for kind, name in names.items():
            if kind in known and name not in known[kind]:
                if kind == "+I":
                    scope.ints.insert(0, name)
                    scope.assignable.append(name)
                else:
                    known[kind].append(name)

    def body(self) -> list[str]:
        self.depth += 1
        lines: list[str] = []
        for _ in range(1 + self.choose(2 if self.depth > 1 else 3)):
            lines += self.statement(self.one_statement())
        self.depth -= 1
        return lines

    def one_statement(self) -> str:
        while True:
            template = self.pick(templates.STATEMENTS)
            if "{BODY}" not in template or self.depth < _DEEPEST:
                return template

    def section(self, options: list[str], most: int) -> list[str]:
        lines: list[str] = []
        for _ in range(self.choose(most + 1)):
            lines += self.statement(self.pick(options))
        return lines

    def program(self) -> str:
        step = [*_DECLARE.split("\n"), "loss_before = x.sum() * 0"]
        for _ in range(1 + self.choose(6)):
            step += self.statement(self.one_statement())
        trains = self.choose(4)
        if trains:
            step += ["h = model(x)"]
            step += ["loss_before = h.pow(2).mean()"] if trains < 3 else ["loss_before = F.mse_loss(h, y)"]
            step += self.section(templates.BEFORE_BACKWARD, 2)
            if trains == 2:
                step += ["loss_before = loss_before + h.sum()"]
            step += ["loss_before.backward()"]
            step += self.section(templates.AFTER_BACKWARD, 2)
            step += ["opt.step()", "opt.zero_grad()"]
        for _ in range(self.choose(4)):
            step += self.statement(self.one_statement())
        step += [f"return {self.fill(self.pick(templates.RETURNS), {})}"]
        optimizer = self.pick(["torch.optim.SGD(model.parameters(), lr=0.1)",
                               "torch.optim.Adam(model.parameters(), lr=0.1)",
                               "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)"])  # fmt: skip
        model = self.pick(["nn.Linear(3, 2)", "nn.Linear(3, 2, bias=True).double().float()"])
        changes: list[str] = ["global G_N, G_LIST, G_TABLE, add_global", "nonlocal c_n, c_list, c_box",
                              "nonlocal x_next, arg_next, k_next"]  # fmt: skip
        for call in range(1, 4):
            chosen = [self.fill(self.pick(templates.MUTATIONS), {}) for _ in range(self.choose(3))]
            if chosen:
                changes.append(f"if call == {call}:")
                changes += [f"    {line}" for text in chosen for line in text.split("\n")]
        lines = [templates.PRELUDE, "", "def build():", templates.SETUP.rstrip("\n")]
        lines += [f"    model = {model}", f"    opt = {optimizer}"]
        lines += ["    x_next, arg_next, k_next = torch.randn(4, 3), [1, 2], 2"]
        lines += ["", "    def step(x, y, k_arg, arg):", *(f"        {line}" for line in step)]
        lines += ["", "    def between(call):", *(f"        {line}" for line in changes)]
        lines += ["", "    def arguments(call):", "        generator = torch.Generator().manual_seed(call)"]
        lines += ["        return x_next, torch.randn(4, 2, generator=generator), k_next, arg_next"]
        lines += ["", "    def roots():", "        spaces = {n: v for n, v in globals().items() if n[:2] == 'G_'}"]
        lines += ["        return box, c_n, c_list, c_box, keep, model, opt, spaces, Box.total, Box.shared"]
        lines += ["", "    return step, between, arguments, roots", ""]
        return "\n".join(lines)


def generate(choose: Choose) -> str:
    """Returns a program built from choices: a module whose ``build()`` returns step, between, arguments and roots."""
    return _Generator(choose).program()
