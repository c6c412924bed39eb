"""The experiments of the CFL, IFCA and FedGroup papers, program `shoal simulate`.

- An experiment runs one table or figure of a paper and reports its own result beside the published one.
- An option that is not given takes the paper's value, unless the module's docstring names another default.
- Everything that is drawn follows from ``--seed``.

`registry` names the experiments and imports one when it is asked for; `common` defines them; `cfl`, `ifca` and `fedgroup`
hold them, one module for a family of tables; `data` loads and splits the data sets; `cli` and `report` are the command
line, and `table` writes the table of docs/algorithms.md from the results in results/.

Example: the id of the first experiment.

    >>> from shoal_lab.experiments import registry
    >>> registry.ids()[0]
    'ifca-synthetic'
"""
