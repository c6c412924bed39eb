"""The placement of late devices; the tables of Duan et al., "FedGroup", are in `shoal_lab.experiments.studies`.

- `newcomers` compares how CFL and FedGroup place devices that join later.
- Neither paper has figures for it.

Example: ``shoal simulate newcomers`` runs `newcomers`.
"""
