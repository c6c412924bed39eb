"""Experiments of Ghosh et al., "An Efficient Framework for Clustered Federated Learning" (IFCA).

- `synthetic` sweeps mixtures of linear models; `linear` runs many starts on one mixture at once for it.
- `images` runs rotated MNIST and CIFAR-10, `femnist` handwriting with shared lower layers.
- `alone` is the baseline in which each device trains by itself; `runs` runs an algorithm and forms the result.

Example: ``shoal simulate ifca-rotated-mnist`` runs `images.rotated_mnist`.
"""
