"""The task that devices train: a manifest and three ONNX graphs in one checked bundle.

- A model is one flat float32 vector; the manifest gives the order, shape and segment of each parameter.
- The graphs are pure functions of that vector: ``score`` (loss, correct count), ``grad`` (loss, gradient), ``predict``.
- `onnx_graph` checks every graph before an executor sees it: standard operators only, no control flow, no external
  data, no local functions. A `TaskBundle` exists only if its graphs pass and match their digests.
- The aggregator does not import this package: it knows a task by its digest alone.

`manifest` is the data and its TOML form, `data_declaration` the names and preparation of the samples, `bundle` the container,
`onnx_graph` the check of the protobuf bytes, `onnx_contents` the nodes and constants of a checked graph.

Example: the default recipe of local training, one epoch of mini-batches.

    >>> from shoal.protocol.recipe import LocalTraining
    >>> LocalTraining(lr=0.05).batch_size
    10
"""
