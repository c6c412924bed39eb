"""A device's data, model and training, in numpy; `executor` computes the task's graphs in ONNX Runtime or numpy.

- Samples are split into training, validation and test shares; the split depends on a seed and their number alone.
- Training is plain SGD in place, with gradients from the task's ONNX graph; the recipe is in the owner's plan.
- The clear update stays on the device: `update` masks and seals it in the same step.

`data` reads samples with `data_files`, `tables` and `image_folders` as `reading` says, `data_doubts` looks at them,
`watching` notices files that grow, `statistics` has a device's part in the fleet's scale,
`standardisation` scales them, `evaluation` has a model's figures beside a guess's. `model` evaluates the graphs,
`scoring` picks the best of k models, `training` trains, `norm_noise` perturbs an update's length,
`update` carries out an assignment, `worker` runs it in a second thread. `trainer` runs own training code in a process.

Example: `update.carry_out` scores the candidates, trains the best one, and returns the sealed upload.
"""
