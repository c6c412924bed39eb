"""The interface of an experiment: options in, a result beside the published figure out.

- `Options` are the command line's; None stands for the study's default.
- `Study.result` makes the JSON object of ``shoal simulate --json``; numbers that are not finite become null.
- A setting that is not one of the study's values is one of the strategy's, or refused.

Example: a setting is read as the type of its default.

    >>> from shoal_lab.experiments.common.experiment import parsed
    >>> parsed("trials", "3", 10)
    3
"""
