"""The report of a compiled step: plain data that prints itself.

The compiler fills a :class:`StepReport` while the step is captured and called (``record_*``). People read it: printed,
in a notebook, as JSON. It never holds tensors, only text and numbers. ``records.py`` has the data, ``tables.py`` what
is shown of it, ``rendering.py`` how.
"""

from sidefx_train.report.records import (
    BreakRecord,
    CaptureRecord,
    ChoiceRecord,
    CudaGraphRecord,
    FallbackRecord,
    GuardRecord,
    PrefetchRecord,
    RecaptureRecord,
    TimingRecord,
)
from sidefx_train.report.step_report import StepReport
from sidefx_train.report.tables import changed

__all__ = [
    "BreakRecord",
    "CaptureRecord",
    "ChoiceRecord",
    "CudaGraphRecord",
    "FallbackRecord",
    "GuardRecord",
    "PrefetchRecord",
    "RecaptureRecord",
    "StepReport",
    "TimingRecord",
    "changed",
]
