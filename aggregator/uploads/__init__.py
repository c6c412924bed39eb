"""Uploads of one run, from the first chunk to the acknowledgement: one state machine for each upload.

An upload is identified by its device and its transfer id (`UploadRef`). It is in one of six states:

    RECEIVING      no chunk has arrived yet, or only some have; the initial state, which needs no entry
    VERIFYING      complete, and in the hands of the intake's workers, which write it if it is in order
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
6. The engine sees an upload before any event that arrived after its last chunk, so that a round never closes without an upload
   that came in time. An upload that is still VALID when its round closes is refused.

Workers change nothing but files: states, answers and the store's rows belong to the driver's thread. The uploads of one device
leave VERIFYING in the order in which they entered it.

Example: the upload of ``dev-1`` has three chunks, and the second is lost.

    chunks 1 and 3           RECEIVING
    reminder of dev-1        RECEIVING       the aggregator asks for chunk 2 (retransmission.py)
    chunk 2                  VERIFYING       handed to a worker
    the worker has ended     VALID           joined, opened, validated (validation.py, Engine.validate), written, appended
    flush                    COMMITTING      the batch goes to the disk
    fsync and commit done    ACKNOWLEDGED    the engine counts it, and dev-1 is told (retransmission.py)
    reminder of dev-1        ACKNOWLEDGED    dev-1 missed the answer, which is sent again

`uploads.Uploads` is the only class that the rest of the aggregator uses.
"""
