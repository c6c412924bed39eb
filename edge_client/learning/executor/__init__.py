"""Executors of a task's ONNX graphs: ONNX Runtime, and numpy for devices without it.

- `base`: the interface, `Executor`.
- `onnx_runtime`: any task that a device may load. `parts` lets it read a model and write its gradient in place.
- `numpy_graph`: walks the checked graph with numpy. It has the operators of models without convolutions and refuses a graph
  with any other when it is loaded, so before training. `operators` lists them; `arithmetic` and `movement` compute them, and
  `bounds` limits the memory that they take.
- `choice`: the executor that a device's configuration asks for: ONNX Runtime if it is installed, else numpy.

Both compute in float32 and agree within round-off, see ADR 40. Neither changes its inputs; an output belongs to the caller.

Example:
    execute = NumpyExecutor(Graph("grad", bundle.grad))
    loss, gradient = execute.run({"theta": theta, "x": x, "y": y})
"""
