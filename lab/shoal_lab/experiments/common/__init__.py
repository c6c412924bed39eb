"""The interface of an experiment: options in, a result beside the published figure out.

- `Options` are the command line's; None stands for the experiment's default.
- `Result.data` is the JSON object of ``shoal simulate --json``; numbers that are not finite become null.
- A setting that is not one of the experiment's own is passed to the strategy, which refuses unknown ones.

Example: a setting is read as the type of its default.

    >>> from shoal_lab.experiments.common.experiment import Options
    >>> Options(settings={"trials": "3"}).knob("trials", 10)
    3
"""
