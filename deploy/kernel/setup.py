"""Builds the kernel: no option may let the compiler reorder, contract or approximate sums."""

from setuptools import Extension, setup

SAME_BITS = ["-O3", "-ffp-contract=off", "-fno-fast-math", "-fno-associative-math"]

setup(
    packages=["shoal_kernel"],
    ext_modules=[Extension("shoal_kernel._kernel", ["shoal_kernel/kernel.c"], extra_compile_args=SAME_BITS)],
)
