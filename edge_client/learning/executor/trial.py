"""Try ONNX Runtime in a process of its own: on a processor that it does not support it ends the whole program, without a line.

The child loads the library and multiplies two matrices with it, in float32. `shoal-edge join`, `enrol` and `doctor` do this
before a device depends on it.

The model is written here as protobuf: five fields of onnx.proto, and no package more on the device.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Final

from shoal.task.onnx_graph import encode_bytes

SIZE: Final = 8
TRIAL_TIMEOUT_S: Final = 60.0
"""Loading takes up to ten seconds on a small device."""
HINT: Final = (
    "install it again: pip install 'shoal[edge]'; or use numpy, for tasks without convolutions: executor = numpy"
)
MOST_SHOWN: Final = 200
"""Characters of the child's last line that are shown."""

_IR_VERSION: Final = 8
_OPSET: Final = 13
_FLOAT: Final = 1


def failure() -> str:
    """Return why ONNX Runtime can't be used on this machine; empty if it can."""
    command = [sys.executable, "-m", "edge_client.learning.executor.trial"]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=TRIAL_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return f"ONNX Runtime did not multiply two matrices within {TRIAL_TIMEOUT_S:g} s"
    except OSError as error:
        return f"the trial of ONNX Runtime can't be started: {error.strerror or error}"
    if done.returncode == 0:
        return ""
    if done.returncode < 0:
        return (
            f"ONNX Runtime ended its process with {_signal_name(-done.returncode)}: it does not support this processor"
        )
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return f"ONNX Runtime can't be used: {lines[-1][:MOST_SHOWN] if lines else f'exit status {done.returncode}'}"


def product_model() -> bytes:
    """Return an ONNX model that multiplies ``a`` and ``b``, both (SIZE, SIZE), float32, to ``c``."""
    node = _text(1, "a") + _text(1, "b") + _text(2, "c") + _text(4, "MatMul")
    graph = encode_bytes(1, node) + _text(2, "product")
    graph += encode_bytes(11, _matrix("a")) + encode_bytes(11, _matrix("b")) + encode_bytes(12, _matrix("c"))
    return _number(1, _IR_VERSION) + encode_bytes(7, graph) + encode_bytes(8, _number(2, _OPSET))


def _matrix(name: str) -> bytes:
    dimension = encode_bytes(1, _number(1, SIZE))
    kind = _number(1, _FLOAT) + encode_bytes(2, dimension * 2)
    return _text(1, name) + encode_bytes(2, encode_bytes(1, kind))


def _number(field: int, value: int) -> bytes:
    return bytes((field << 3, value))


def _text(field: int, value: str) -> bytes:
    return encode_bytes(field, value.encode())


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def main() -> None:
    """Multiply two matrices with ONNX Runtime; exit status 1 if the product is wrong."""
    import numpy as np

    from shoal.util.telemetry import import_onnxruntime

    runtime = import_onnxruntime()
    session = runtime.InferenceSession(product_model(), providers=["CPUExecutionProvider"])
    a = np.arange(SIZE * SIZE, dtype=np.float32).reshape(SIZE, SIZE)
    (found,) = session.run(["c"], {"a": a, "b": a})
    if not np.array_equal(found, a @ a):
        raise SystemExit("its product of two matrices is wrong")


if __name__ == "__main__":
    main()
