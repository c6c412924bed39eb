"""Silence inside the block, and the process as it was afterwards."""

import logging
import sys
import warnings

import pytest

from shoal.owner.task_compiler.compile import quiet


class FailedError(Exception):
    """Ends the block."""


def make_noise():
    """Print, warn and log as torch's exporter does."""
    sys.stdout.write("to stdout\n")
    sys.stderr.write("to stderr\n")
    warnings.warn("a warning", stacklevel=1)
    logging.getLogger("torch.onnx").error("an error")
    logging.getLogger("onnxscript").warning("a warning")


def test_nothing_is_printed_inside(capsys, caplog):
    """Nothing is printed or logged inside the block."""
    with quiet():
        make_noise()
    assert capsys.readouterr() == ("", "")
    assert caplog.records == []


@pytest.mark.parametrize("failing", [False, True])
def test_streams_and_loggers_are_restored(capsys, caplog, failing):
    """Streams warnings and loggers are restored."""
    level, filters, streams = logging.getLogger("torch.onnx").level, list(warnings.filters), (sys.stdout, sys.stderr)

    def block():
        with quiet():
            if failing:
                raise FailedError

    if failing:
        with pytest.raises(FailedError):
            block()
    else:
        block()
    assert (logging.getLogger("torch.onnx").level, warnings.filters) == (level, filters)
    assert (sys.stdout, sys.stderr) == streams
    with pytest.warns(UserWarning, match="a warning"):
        make_noise()
    assert capsys.readouterr().out == "to stdout\n"
    assert [r.getMessage() for r in caplog.records] == ["an error", "a warning"]


def test_earlier_level_is_set_again():
    """A level that was set before is set again."""
    logger = logging.getLogger("onnxscript")
    before = logger.level
    try:
        logger.setLevel(logging.DEBUG)
        with quiet():
            assert logger.level == logging.CRITICAL
        assert logger.level == logging.DEBUG
    finally:
        logger.setLevel(before)
