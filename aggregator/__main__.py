"""`python -m aggregator` is `shoal-aggregator`: torchrun starts modules."""

from aggregator.cli import main

main()
