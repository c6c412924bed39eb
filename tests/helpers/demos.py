"""A result of the demo, made by hand."""

import numpy as np

from shoal.demo.runner import DemoResult, RunResult
from shoal.demo.seen import Reading, Seen

RUNS = (
    RunResult("fedavg", 31.25, 0.0, 1, 30, 0.1234, 19876.0, 21543.0, "rotation"),
    RunResult("cfl", 92.5, 1.0, 4, 60, 0.2345, 20123.0, 22321.0, "rotation"),
    RunResult("ifca", 91.75, 0.875, 5, 64, 0.3456, 20456.0, 123987.0, "rotation"),
)


def made(side):
    """Return a result whose true image is white, whose masked reading is black, and whose clear one is half grey."""
    white = np.ones(side * side, np.float32)
    seen = Seen(0.0312, 0.0145, Reading(0 * white, 7.25), Reading(white / 2, 120.0), white)
    return DemoResult("mosquitto", 20, 4, RUNS, 71.6, False, 301.4, seen, side)
