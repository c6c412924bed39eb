"""A device's files: protocol state, the current upload, and models, across restarts and power cuts.

- A file is replaced by one rename, so that a reader sees the old bytes or the new ones. Only the two slots of the pending
  upload are overwritten, in turn.
- The sealed upload is on disk before it is sent, with the replay watermark of its round.
- All files are private to the device's user; those that hold secrets or models have mode 0600.

`state` is the directory, `pending_upload` the sealed upload of the current round, `scales` the scales of samples,
`finished_models` the models of the last runs, with those above the device's cluster in CFL's tree, and the choice of the one
that answers.

Example: in the final round the device writes its model first and its upload second, so that an acknowledged upload always
has its model on disk.
"""
