"""Experiments of Duan et al., "FedGroup", and the placement of late devices.

- `mnist`, `synthetic` and `leaf` run the columns of the paper's Table III; `runs` defines these methods and their score:
  the maximum over rounds of the accuracy on the devices that have a group.
- `newcomers` compares how CFL and FedGroup place devices that join later. Neither paper has figures for it.
- `lstm` is the model of Sent140.

Example: ``shoal simulate fedgroup-mnist-mclr`` runs `mnist.mclr`.
"""
