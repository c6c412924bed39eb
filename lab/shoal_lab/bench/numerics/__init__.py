"""Speed of the numeric kernels and mask modes, against a ceiling and a naive form.

- Kernel, ceiling and naive form take turns on one thread, and the least CPU time of each counts: other load on the machine
  cancels out of the ratios.
- `kernels` measures similarities, means and splits, `training` the simulator's trainer of dense networks, `mask_modes` the
  masks; `naive` has the forms that a reader of the papers would write first.

Example: ``python -m shoal_lab.bench.numerics.mask_modes --quick`` prints the cost of each mask mode.
"""
