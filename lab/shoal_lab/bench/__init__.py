"""Measurements of the real code, program `shoal bench`.

- `rounds` times rounds of real devices; `load` times the aggregator with many devices.
- `numerics` compares kernels with a ceiling and a naive form, `privacy` compares mask modes, and `attacks` attacks them.
- `poison` compares robust rules under attacks on the mean, `links` precisions of the vectors that are sent, and `race` the
  simulator with its peers.
- Kernels, masks and rounds are also reported as multiples of a reference measured in the same run, so that figures of
  different machines can be compared.

Example: ``shoal bench numerics --quick`` prints each kernel's time as a multiple of its ceiling's.
"""
