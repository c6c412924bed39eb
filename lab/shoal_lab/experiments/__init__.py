"""The experiments of the CFL, IFCA and FedGroup papers, program `shoal simulate`.

- A study reproduces one table or figure of a paper and reports its own result beside the published one.
- An option that is not given takes the paper's value, unless the study's comment names another default.
- Everything that is drawn follows from ``--seed``.

`studies` has a TOML table for each study and what runs them; `registry` finds them by name, and `common` defines studies,
options and results. `cfl`, `ifca` and `fedgroup` have the studies that are programs of their own, `wild` the fleets that no
paper has; `data` loads and splits the data sets; `cli` and `report` are the command line, and `table` writes the table of
docs/algorithms.md from the results in results/.

Example: the id of the first experiment.

    >>> from shoal_lab.experiments import registry
    >>> registry.ids()[0]
    'ifca-synthetic'
"""
