"""What prints, records and warnings look like depends on objects that a step may change in between."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings

import pytest
import torch
from tqdm import tqdm

import sidefx_train

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")

LOG = logging.getLogger("tests.what_deferred_calls_read")


class State:
    value = 1


STATE = State()


class Kept(logging.StreamHandler):
    """A library's handler would be a ``StreamHandler``: this class is the program's own."""

    def emit(self, record):
        self.stream.write(f"{STATE.value} {record.getMessage()}\n")


@contextlib.contextmanager
def handled_by(handler):
    LOG.propagate = False
    LOG.setLevel(logging.INFO)
    LOG.addHandler(handler)
    try:
        yield
    finally:
        LOG.removeHandler(handler)
        LOG.setLevel(logging.NOTSET)
        LOG.propagate = True
        LOG.filters.clear()


def print_options(x):
    torch.set_printoptions(precision=8)
    print(x * 2)
    text = str(x * 3)
    torch.set_printoptions(profile="default")
    print(x * 2)
    return text


def default_dtype(x):
    torch.set_default_dtype(torch.float64)
    print(x.double() * 2)
    text = f"{x * 2}"
    torch.set_default_dtype(torch.float32)
    print(x.double() * 2)
    return text


def level_of_a_handler(x):
    LOG.handlers[0].setLevel(logging.ERROR)
    LOG.info("not shown %s", x * 2)
    LOG.handlers[0].setLevel(logging.NOTSET)
    LOG.info("shown %s", x * 2)


def level_of_a_logger(x):
    LOG.setLevel(logging.ERROR)
    LOG.info("not shown %s", x * 2)
    LOG.setLevel(logging.INFO)
    LOG.info("shown %s", x * 2)


def disabled(x):
    logging.disable(logging.CRITICAL)
    LOG.info("not shown %s", x * 2)
    logging.disable(logging.NOTSET)
    LOG.info("shown %s", x * 2)


def a_handler_of_its_own(x):
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    LOG.addHandler(handler)
    LOG.info("shown %s", x * 2)
    LOG.removeHandler(handler)
    LOG.info("shown elsewhere %s", x * 2)
    return stream.getvalue()


def a_filter(x):
    def numbered(record):
        record.msg = f"{STATE.value} {record.msg}"
        return True

    LOG.addFilter(numbered)
    STATE.value += 1
    LOG.info("shown %s", x * 2)
    STATE.value += 1
    LOG.removeFilter(numbered)


def reads_the_state(x):
    STATE.value += 1
    LOG.info("first %s", x * 2)
    STATE.value += 1


def warns(x):
    STATE.value += 1
    warnings.warn("text", stacklevel=1)
    STATE.value += 1


PROGRAMS = [
    print_options, default_dtype, level_of_a_handler, level_of_a_logger, disabled, a_handler_of_its_own, a_filter,
    reads_the_state, warns,
]  # fmt: skip


def outcome(function, kind):
    """Returns what three calls print, log, return and leave."""
    STATE.value = 1
    shown = io.StringIO()

    def show(message, *_):
        shown.write(f"{STATE.value} {message}\n")

    found = []
    with warnings.catch_warnings(), contextlib.redirect_stdout(shown), handled_by(kind(shown)):
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", sidefx_train.SideFXWarning)
        warnings.showwarning = show
        for number in range(3):
            found.append(function(torch.tensor([1 / 3, number + 2 / 3])))
    return shown.getvalue(), found, STATE.value


def test_a_print_under_another_default_dtype_stays_in_the_graph():
    step = sidefx_train.compile(default_dtype, backend="eager", fullgraph=True)
    assert outcome(step, logging.StreamHandler) == outcome(default_dtype, logging.StreamHandler)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("kind", [logging.StreamHandler, Kept])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.every(4)
def test_they_look_as_in_eager(program, kind):
    assert outcome(sidefx_train.compile(program, backend="eager"), kind) == outcome(program, kind)


class Numbered(logging.LoggerAdapter):
    """An adapter of the program's own."""

    def process(self, msg, kwargs):
        return f"{STATE.value} {self.extra['label']} {msg}", kwargs


ADAPTERS = [logging.LoggerAdapter(LOG, {"label": "first"}), Numbered(LOG, {"label": "first"})]


@pytest.mark.parametrize("kind", [logging.StreamHandler, Kept])
@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: type(adapter).__name__)
def test_what_an_adapter_adds_is_read_at_once(adapter, kind):
    """Regression: an adapter of the program's own raised, one of the library added what the step set after the call."""

    def program(x):
        adapter.extra["label"] = f"step {STATE.value}"
        adapter.warning("shown %s", x * 2)
        STATE.value += 1
        adapter.extra["label"] = "between"

    def named(shown):
        handler = kind(shown)
        handler.setFormatter(logging.Formatter("%(label)s %(funcName)s %(lineno)d %(message)s"))
        return handler

    step = sidefx_train.compile(program, backend="eager", fullgraph=kind is logging.StreamHandler)
    assert outcome(step, named) == outcome(program, named)


def test_functions_of_the_module_ask_the_handlers_of_the_root():
    """Regression: handlers of the program's own saw what the step did after the call."""

    def program(x):
        STATE.value += 1
        logging.warning("first")
        STATE.value += 1
        return x * 2

    shown_alike(program, logging.root)


def test_captured_warnings_ask_the_handlers_of_their_logger():
    """Regression: the same for warnings that ``logging.captureWarnings`` sends to a logger."""

    def program(x):
        STATE.value += 1
        warnings.warn("first", stacklevel=1)
        STATE.value += 1
        return x * 2

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        try:
            shown_alike(program, logging.getLogger("py.warnings"))
        finally:
            logging.captureWarnings(False)


def test_a_logger_that_the_step_creates():
    """Regression: its handlers are those of its parent, which a capture could not ask: an internal error."""
    names = [0]

    def program(x):
        STATE.value += 1
        names[0] += 1
        logging.getLogger(f"tests.what_deferred_calls_read.{names[0]}").warning("first")
        STATE.value += 1
        return x * 2

    report = shown_alike(program, LOG)
    assert not report.fallbacks, f"{report}"


def shown_alike(program, logger):
    """Compares what a handler of the program's own is given by three calls, and what it then reads."""
    shown = io.StringIO()
    handler = Kept(shown)
    step = sidefx_train.compile(program, backend="eager")
    logger.addHandler(handler)
    try:
        found = []
        for function in (program, step):
            STATE.value = 1
            for _ in range(3):
                function(torch.ones(2))
            found.append([line for line in shown.getvalue().splitlines() if "first" in line])
            shown.seek(0)
            shown.truncate()
        assert found[0] and found[0] == found[1]
    finally:
        logger.removeHandler(handler)
    return step.report()


class Lines:
    """A standard output of the program's own: it numbers what it is given."""

    def __init__(self):
        self.lines = []

    def write(self, text):
        self.lines.append((STATE.value, text))

    def flush(self):
        self.lines.append("flushed")


class Raw(io.RawIOBase):
    """The program's own file below a text stream of the library."""

    def __init__(self):
        self.lines = []

    def writable(self):
        return True

    def write(self, data):
        self.lines.append((STATE.value, bytes(data)))
        return len(data)


class Both(Lines):
    """It passes on what it is given, to a file of the library."""

    def __init__(self):
        super().__init__()
        self.other = io.TextIOWrapper(io.BytesIO())

    def write(self, text):
        super().write(text)
        self.other.write(text)


def prints(x):
    STATE.value += 1
    print("first", x * 2, sep="-")
    STATE.value += 1
    print(f"{x.sum()}", flush=True)


def prints_to_the_standard_error(x):
    STATE.value += 1
    print(x * 2, file=sys.stderr)
    STATE.value += 1


def progresses(x):
    bar = tqdm(total=2, ascii=True, bar_format="{n}", file=sys.stderr, mininterval=0)
    STATE.value += 1
    bar.update(1)
    STATE.value += 1
    bar.close()


def printed(function, kind):
    STATE.value = 1
    stream = kind()
    layered = isinstance(stream, Raw)
    shown = io.TextIOWrapper(stream, write_through=True) if layered else stream
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        for number in range(3):
            function(torch.tensor([1.0, number]))
    return stream.lines, STATE.value


@pytest.mark.parametrize("kind", [Lines, Both, Raw])
@pytest.mark.parametrize(
    "program", [prints, prints_to_the_standard_error, progresses, warns], ids=lambda program: program.__name__
)
@pytest.mark.every(3)
def test_a_stream_of_the_program_reads_the_state_when_it_is_written_to(program, kind):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", sidefx_train.SideFXWarning)
        assert printed(sidefx_train.compile(program, backend="eager"), kind) == printed(program, kind)


def test_a_stream_that_is_replaced_by_one_of_the_program():
    step = sidefx_train.compile(prints, backend="eager")
    with contextlib.redirect_stdout(io.StringIO()):
        step(torch.ones(2))
    assert printed(step, Lines) == printed(prints, Lines)


def test_a_librarys_handlers_leave_one_graph():
    def program(x):
        STATE.value += 1
        LOG.info("%s", x * 2)
        warnings.warn("text", stacklevel=1)

    step = sidefx_train.compile(program, backend="eager", fullgraph=True)
    with handled_by(logging.StreamHandler(io.StringIO())), warnings.catch_warnings(record=True):
        for _ in range(3):
            step(torch.ones(2))
    assert step.report().replays == 3
