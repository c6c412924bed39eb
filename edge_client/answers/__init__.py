"""A device's answers: the model that answers, and how people and programs of its machine use it.

- `inference`: finds the model, and answers from files of samples, for the commands.
- `export`: writes a model as one ONNX file, with names and probabilities.
- `model_in_use`: does so for other programs after each change, and runs the operator's program.
- `loaded_model`: `shoal.load`, which reads that file in another program's process, without the device's keys.

Example:
    model = shoal.load("/var/lib/shoal-edge")
    model.predict([41.0, 0.3, 1480, 62.5])  # "ok"
"""
