"""``python -m sidefx_train doctor``: what it prints and its exit status."""

from __future__ import annotations

import torch

from sidefx_train import doctor
from sidefx_train.__main__ import main


def test_all_is_well_here(capsys):
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for word in ("Python", torch.__version__, "lightning", "compiler", "CPU", "GPU", "cache", "native module"):
        assert word in shown, word
    for backend in doctor.BACKENDS:
        assert f"backend='{backend}'" in shown
    assert "all is well" in shown and "failed" not in shown


def test_a_failed_check_is_named_and_sets_the_exit_status(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "BACKENDS", ("eager",))
    monkeypatch.setattr(doctor, "_modules", lambda: [("native module: guards", False, "no C++ compiler")])
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "no C++ compiler" in shown and "bug report" in shown


def test_a_step_that_runs_eagerly_fails_its_check(monkeypatch):
    def refusing(gm, inputs):
        raise ValueError("this backend refuses")

    good, text = doctor._step(refusing)
    assert not good and "0 of 3 calls replayed" in text and "this backend refuses" in text
