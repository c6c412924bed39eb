"""The trial of ONNX Runtime in a child process: what it says when the child fails, is killed, or hangs."""

import subprocess
import sys

import numpy as np
import pytest

from edge_client.learning.executor import trial


def test_onnx_runtime_works_here():
    assert trial.failure() == ""


def test_model_is_a_product_of_two_matrices():
    onnx = pytest.importorskip("onnx", reason="the checker of ONNX models is not installed")
    reference = pytest.importorskip("onnx.reference")
    model = onnx.load_from_string(trial.product_model())
    onnx.checker.check_model(model, full_check=True)
    (out,) = reference.ReferenceEvaluator(model).run(None, {n: np.eye(8, dtype=np.float32) for n in "ab"})
    np.testing.assert_array_equal(out, np.eye(8))


@pytest.mark.parametrize(
    ("child", "words"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "ended its process with SIGILL"),
        ("import os; os.kill(os.getpid(), 40)", "ended its process with signal 40"),
        ("raise ImportError('libonnx.so: cannot open')", "can't be used: ImportError: libonnx.so: cannot open"),
        ("raise SystemExit(3)", "can't be used: exit status 3"),
        ("import time; time.sleep(60)", "did not multiply two matrices within 0.5 s"),
    ],
)
def test_failing_child_is_told_in_one_line(monkeypatch, child, words):
    """A child that fails is told in one line."""
    real = subprocess.run

    def run(command, **options):
        assert command == [sys.executable, "-m", "edge_client.learning.executor.trial"]
        return real([sys.executable, "-c", child], **options)

    monkeypatch.setattr(trial.subprocess, "run", run)
    if "sleep" in child:
        monkeypatch.setattr(trial, "TRIAL_TIMEOUT_S", 0.5)
    found = trial.failure()
    assert words in found
    assert "\n" not in found


def test_a_child_that_cannot_start_is_told(monkeypatch):
    monkeypatch.setattr(trial.sys, "executable", "/nowhere/python")
    assert trial.failure() == "the trial of ONNX Runtime can't be started: No such file or directory"
