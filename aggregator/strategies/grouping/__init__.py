"""Find groups of devices without being told how many there are: for IFCA, FedGroup and one-shot clustering with ``auto``.

- `search` trains one model for all devices and checks now and then whether their updates form groups.
- It decides between the groups and the one model by the devices' losses.

Example: after the first round the cosines of 20 updates form four groups. Four rounds later the losses say that each group gains
from its own model, and the strategy begins with four models.
"""
