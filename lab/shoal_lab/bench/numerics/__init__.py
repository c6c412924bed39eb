"""Speed of the numeric kernels, against a ceiling and a naive form.

- Kernel, ceiling and naive form take turns on one thread, and the least CPU time of each counts: other load on the machine
  cancels out of the ratios.
- `kernels` measures similarities, means, splits, the permutation mask and the simulator's trainer of dense networks. The naive
  forms are those that a reader of the papers would write first.

Example: ``shoal bench numerics --quick`` prints the figures of every kernel.
"""
