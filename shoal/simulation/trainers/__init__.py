"""Training of many simulated devices at once.

- Every trainer gives the same updates up to float32 rounding; `loop`, one device after another with autograd, is the
  reference that the others are tested against.
- `dual` trains linear and softmax regression and one hidden layer, `conv` a CNN. `registry` has the rule that picks a trainer.
- `networks` defines the models, `blocks` the padded data, `dense` the batched passes, `scoring` the losses of k models.

Example: a network is a value with a length, the number of coordinates of its flat vector.

    >>> from shoal.simulation.trainers.networks import Softmax
    >>> Softmax(inputs=784, classes=10).length
    7850
"""
