"""Compile a torch model and a loss to an ONNX task that devices train without torch.

- The gradient is part of the graph: forward and backward pass are traced together and lowered to standard operators.
- A layer that cannot be compiled, or must not be (batch norm, dropout), is refused with its name and a replacement.
- Each task is compared with torch before it is signed: gradients agree to a relative 1e-5, at three batch sizes.

`builtin` has the ready-made models, `compile` the entry point; `layers` refuses models, `flat` makes a model a function
of one vector, `graphs` and `decompositions` produce ONNX, `selfcheck` compares, `signed` stores, `origin` draws initial
models, `quiet` silences the exporter.

Example: ``compile_task(*build("logistic", inputs=64)[:3], name="digits", kind="classification")`` returns a `TaskBundle`
with 650 coordinates.
"""
