"""Own training code in a process of its own: one more executor of a task, for a task that names a trainer in place of graphs.

- `messages`: requests, answers and the shared memory that they are about, with their limits.
- `child`: the process that runs the operator's `edge_client.trainer.Trainer`.
- `process`: the device's side: begins the process, asks, and ends it if it fails, is late or is not needed any more.
- `model`: `TrainerModel`, a backend like `edge_client.learning.model.GraphModel`, which trains by itself.

The process is started by exec, with an environment of chosen names, no descriptor but its socket, and limits on memory. Each
request brings its own shared memory, with a fixed place for the result; so an answer has no length that anyone has to trust.
Whatever goes wrong there is a `TrainerError`: the device declines the round and begins a new process for the next.

Example: ``TrainerModel(bundle, TrainerCommand("my_package:Detector")).losses(theta, x, y)``
"""
