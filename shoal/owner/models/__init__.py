"""The models of a finished run, read from the broker and written to a folder of the owner.

The aggregator publishes the announcement of the final round once more when the run has finished, with the checkpoints that
devices sealed and the statements that certify them. All of it is retained until the next run begins.

- `final_round` opens the announcement and the checkpoints with the owner's keys, and checks the certificates.
- `reader` collects them over any transport; `connection` runs a reader on an MQTT connection for one command.
- `files` writes the models: ONNX, parameters by name, and models.json.

Example: `read_models(fleet, 3.0, note)` returns a `FinishedRun`, and `write_models(found, folder)` writes its files.
"""
