"""Text that a step writes to open files: after the graph, in order, with the values of its line."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import sys

import pytest
import torch

from tests.support.parity import Program, parity


class Log:
    """A logger of the program, which writes a line for each step."""

    def __init__(self, file):
        self.file, self.count = file, 0
        self.rows, self.dicts = csv.writer(file), csv.DictWriter(file, ["n", "loss"])

    def line(self, **values):
        self.count += 1
        self.file.write(json.dumps({"step": self.count, **values}) + "\n")
        self.file.flush()


def lines_of_json(log, x):
    log.line(loss=x.square().mean().item(), size=x.shape[0])


def numbers_of_the_graph(log, x):
    log.file.write(f"{x.sum().item():.4f} ")
    x.mul_(2)
    log.file.write(f"{x.sum():.4f}\n")


def in_order(log, x):
    log.count += 1
    log.file.write(f"first {log.count}, ")
    print("between", x.sum().item(), file=log.file)
    log.file.write("läßt")
    sys.stdout.write(f"{log.count}\n")
    sys.stdout.flush()


def what_write_returns(log, x):
    return log.file.write("four\n"), log.file.write(f"{x.sum().item()}\n")


def under_a_condition(log, x):
    log.count += 1
    if log.count % 2 == 0:
        log.file.write(f"{log.count}\n")


class Tee:
    def __init__(self, *files):
        self.files = files

    def write(self, text):
        for file in self.files:
            file.write(text)


def through_an_object_of_the_step(log, x):
    log.count += 1
    print(f"step {log.count}", x.sum().item(), file=Tee(log.file, sys.stdout))
    with contextlib.redirect_stdout(log.file):
        print("redirected", log.count)


def rows_of_csv(log, x):
    log.count += 1
    log.rows.writerow([log.count, x.sum().item(), 'a, "b"', None, True, x.shape[0]])
    x.mul_(2)
    log.rows.writerow(("mean", f"{x.mean().item():.3f}", log.count / 3))


def rows_of_dicts(log, x):
    log.count += 1
    log.dicts.writerow({"loss": x.square().mean().item(), "n": log.count})
    log.dicts.writerow({"n": -log.count})


def lines(log, x):
    log.count += 1
    log.file.writelines([f"{log.count}\n", f"{x.sum().item():.4f}", " end\n"])
    log.rows.writerow([1, "läßt"])
    log.file.writelines(("a", "b\n"))
    (lambda row: log.rows.writerow(row))([x.mean().item()])


WHOLE = [lines_of_json, numbers_of_the_graph, in_order, what_write_returns, under_a_condition]
WHOLE += [through_an_object_of_the_step, rows_of_csv, rows_of_dicts, lines]


def where_it_is(log, x):
    log.file.write("abc")
    return log.file.tell()


def closed_later(log, x):
    log.count += 1
    if log.count == 3:
        log.file.close()
    try:
        log.file.write("text\n")
    except ValueError as error:
        return str(error)


def lone_surrogates(log, x):
    try:
        log.file.write("\ud800")
    except UnicodeEncodeError as error:
        return str(error)


def no_text(log, x):
    try:
        log.file.write(log.count)
    except TypeError as error:
        return str(error)


def opened_in_the_step(log, x):
    with open(log.file.name, "a", encoding="utf-8") as file:
        file.write(f"{x.sum().item()}\n")


def read_again(log, x):
    log.file.write(f"{x.sum().item()}\n")
    log.file.flush()
    with open(log.file.name, encoding="utf-8") as file:
        return file.read()


class Shown:
    def __init__(self, log):
        self.log = log

    def __str__(self):
        return str(self.log.count)


def rows_of_objects(log, x):
    log.rows.writerow([Shown(log), 1])
    log.count += 1
    log.rows.writerow([x.sum()])


def what_writerow_returns(log, x):
    log.file.write("before\n")
    return log.rows.writerow([1, "läßt"]), log.rows.writerow([x.sum().item()])


def rows_that_raise(log, x):
    log.count += 1
    log.rows.writerow([log.count])
    errors = []
    for write in (lambda: csv.writer(log.file, quoting=csv.QUOTE_NONE).writerow(["a,b"]), lambda: log.rows.writerow(3)):
        try:
            write()
        except (csv.Error, TypeError) as error:
            errors.append(str(error))
    try:
        log.dicts.writerow({"another": 1})
    except ValueError as error:
        errors.append(str(error))
    return errors


def rows_closed_later(log, x):
    log.count += 1
    if log.count == 3:
        log.file.close()
    try:
        log.rows.writerow([log.count])
    except ValueError as error:
        return str(error)


def lines_with_an_error(log, x):
    try:
        log.file.writelines(["first\n", 2, "third\n"])
    except TypeError as error:
        return str(error)


OTHERS = [where_it_is, closed_later, lone_surrogates, no_text, opened_in_the_step, read_again]
OTHERS += [what_writerow_returns, rows_of_objects, rows_that_raise, rows_closed_later, lines_with_an_error]


def compare(body, tmp_path, **options):
    opened = []

    def make() -> Program:
        layer = torch.nn.Linear(3, 3)
        file = open(tmp_path / f"{len(opened)}.txt", "w", encoding="utf-8")  # noqa: SIM115
        opened.append(file)
        log = Log(file)

        def step(x):
            answer = body(log, x)
            loss = layer(x).square().mean()
            loss.backward()
            return answer, loss.detach()

        return Program(step, lambda index: (torch.randn(2, 3),), (layer, log.count))

    report = parity(make, steps=6, **options)
    for file in opened:
        file.close()
    eager, captured = ((tmp_path / f"{place}.txt").read_text(encoding="utf-8") for place in (0, 1))
    assert captured.replace("1.txt", "0.txt") == eager
    return report


@pytest.mark.parametrize("body", WHOLE, ids=lambda body: body.__name__)
def test_text_is_written_after_the_graph(body, tmp_path):
    report = compare(body, tmp_path, captures=3)
    assert not report.breaks


@pytest.mark.parametrize("body", OTHERS, ids=lambda body: body.__name__)
def test_what_else_is_done_with_a_file(body, tmp_path):
    compare(body, tmp_path, captures=None, whole=False)


class Raw(io.RawIOBase):
    """A file of the program, which reads what the step changes."""

    def __init__(self, state):
        self.state, self.read = state, []

    def writable(self):
        return True

    def write(self, data):
        self.read.append((self.state["count"], bytes(data)))
        return len(data)


def test_a_file_over_one_of_the_program_is_written_at_once():
    def make() -> Program:
        state = {"count": 0}
        raw = Raw(state)
        file = io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", write_through=True)

        def step(x):
            state["count"] += 1
            file.write("text")
            file.flush()
            state["count"] += 1
            return x * 2

        return Program(step, lambda index: (torch.randn(2),), (raw.read, state))

    parity(make, steps=4, captures=None, whole=False)
