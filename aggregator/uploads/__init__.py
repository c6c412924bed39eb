"""Uploads of one run, from the first chunk to the acknowledgement: one state machine for each upload.

An upload is identified by its device and its transfer id (`states.UploadRef`). It is in one of five states:

    RECEIVING      no chunk has arrived yet, or only some have; the initial state, which needs no entry
    VALID          the seal, the signature and the rules of the open round hold; appended to the store's open batch
    COMMITTING     in the batch that the disk is writing
    ACKNOWLEDGED   durable, and the device was told so
    REFUSED        not used, and the device was told why

Rules:

1. `states.TRANSITIONS` lists every transition; any other raises `states.TransitionError`.
2. A device is answered only about an authentic message: one that it signed itself. A forged or malformed message leaves
   the upload in RECEIVING and is answered with nothing.
3. An acknowledgement follows the commit. If the process stops before it, the device repeats the upload, and the restarted
   aggregator acknowledges it at once if it finds it in the store.
4. Only RECEIVING takes chunks. A copy of an upload in another state is dropped at its first chunk.
5. A device has at most one upload in VALID or COMMITTING. A second one is refused (`Engine.validate`).
6. The engine sees committed uploads before any later event, so that a round never closes without an upload that the disk
   already has. An upload that is still VALID when its round closes is refused.

Example: the upload of ``dev-1`` has three chunks, and the second is lost.

    chunks 1 and 3           RECEIVING
    reminder of dev-1        RECEIVING       the aggregator asks for chunk 2 (retransmission.py)
    chunk 2                  VALID           joined, opened, validated (validation.py, Engine.validate), appended
    flush                    COMMITTING      the batch goes to the disk (commit_queue.py)
    fsync and commit done    ACKNOWLEDGED    the engine counts it, and dev-1 is told (acknowledgements.py)
    reminder of dev-1        ACKNOWLEDGED    dev-1 missed the answer, which is sent again

`uploads.Uploads` is the only class that the rest of the aggregator uses.
"""
