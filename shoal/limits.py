"""Every bound on what a peer may make us hold, wait for or send; the unit is in the name."""

from __future__ import annotations

from typing import Final

CHUNK_BYTES: Final = 120 * 1024
"""Payload of one chunk where the broker takes it: receives of 128 KiB and more hit mmap each time, at a third of the speed."""

MAX_PACKET_BYTES: Final = 1024 * 1024
"""Largest MQTT packet we accept or send."""

MAX_TRANSFER_BYTES: Final = 1 << 30
"""Largest reassembled transfer: a model of 268 million float32 coordinates."""

MAX_HEADER_BYTES: Final = 1 << 20
"""Largest message header in front of the vectors."""

MAX_PENDING_BYTES: Final = 4 << 30
"""Payload bytes that may wait at the aggregator for the broker to take them."""

MAX_TRANSFERS_PER_SOURCE: Final = 4
"""Transfers one source may have in reassembly at a time; the one that has waited longest for a chunk gives way."""

MAX_NOTE_BYTES: Final = 2048
"""Largest sealed decline, reminder or presence: names and fixed fields only, so it fits one chunk."""

MAX_CONTROL_BYTES: Final = 16 * 1024
"""Largest sealed answer to a device: a list of missing chunks (4 KiB) and a reason (at most 4 KiB)."""

MAX_RENEWAL_BYTES: Final = 16 * 1024
"""Largest grant that only renews keys: it holds no roster."""

SEALED_HEAD_BYTES: Final = 2048
"""Most bytes of a sealed upload or model besides its vectors and margins: envelope (at most 1,148) and message header."""

MAX_ROSTER_CHANGE_BYTES: Final = 1 << 20
"""Largest sealed roster change. The aggregator publishes a larger one without its members; devices then fetch the roster."""

FIRST_PACKAGE_BYTES: Final = 4 << 20
"""Largest run package or mask epoch that a device fetches before a signed announcement has given its size."""

FIRST_ANNOUNCEMENT_BYTES: Final = 1 << 20
"""Announcement bytes that a device allows besides those that grow with its roster and its plan."""

REASSEMBLY_MEMORY_BYTES: Final = 32 << 20
"""Chunks of unfinished transfers that stay in memory where there is a spool for the rest."""

REASSEMBLY_DEADLINE_S: Final = 600.0
"""A transfer that has not completed by then is dropped."""

REASSEMBLY_QUIET_S: Final = 2.0
"""A transfer without a new chunk for this long has its missing chunks asked for, once nothing new of others comes either."""

REASSEMBLY_BUSY_S: Final = 30.0
"""As long as other transfers get on, missing chunks may wait behind theirs: they are asked for after this long."""

MAX_EPOCHS_AHEAD: Final = 100_000
"""Furthest that a mask secret is ratcheted in one go: a second's work on a small device."""

MAX_COORDINATES: Final = 1 << 28
"""Largest model length d."""

MAX_MODELS: Final = 4096
"""Most models (clusters, restarts, trial halves) that one run may hold."""

MAX_DEVICES: Final = 65_534
"""Most devices in one roster: a device's index is 16 bits, 65535 means none."""

MAX_NAME_CHARS: Final = 64
"""Longest fleet or device name."""

MAX_ENROLMENT_BYTES: Final = 16 * 1024
"""Largest enrolment request: it comes from somebody unknown, and fits one chunk."""

MAX_REQUESTS: Final = 1024
"""Most enrolment requests that the owner looks at in one sitting."""

MAX_GRANT_BYTES: Final = 13 << 20
"""Largest grant or roster on its way: a roster of MAX_DEVICES with the longest names, all of them revoked, takes 12.9 MB."""

MAX_SCALE: Final = 1e6
"""Largest multiple of an origin in a model."""

MAX_NORM_NOISE: Final = 0.2
"""Largest relative standard deviation of a blurred norm; the factor, clipped at four of them, stays positive."""

DEFAULT_MAX_SAMPLES: Final = 100_000
"""Largest sample count of an upload, unless the owner's plan says otherwise."""

DEFAULT_WEIGHT_CAP: Final = 3.0
"""Largest weight of a device in a mean, in median weights, unless the owner's plan says otherwise."""

MAX_MARGIN: Final = 5.0
"""Largest margin reported, in units of loss: beyond it the answer is clear and the figure would only tell about the data."""

REMIND_BASE_S: Final = 1.0
"""Earliest reminder of an unanswered upload in the smallest fleet; the time to the next doubles up to a cap, with jitter."""

REMIND_PER_UPLOAD_S: Final = 0.004
"""Added to REMIND_BASE_S for each upload of the round: three times what an aggregator with one shared core needs."""

REMIND_BYTES_PER_S: Final = 50e6
"""An aggregator takes at least so many bytes a second: a reminder sooner than that would only add to its backlog."""

MAX_REMIND_AFTER_S: Final = 600.0
"""Longest first pause that a device grants an announcement."""

REMIND_CAP_S: Final = 10.0
REMINDERS_SOON: Final = 12
REMIND_LATE_CAP_S: Final = 60.0
"""The cap after REMINDERS_SOON reminders: a broker keeps them all for an aggregator that is away."""

MAX_UNHANDLED_BYTES: Final = 8 << 20
"""Received messages that wait for the loop that handles them; above this the transport stops reading its socket. It is
more than RECEIVE_MAXIMUM chunks, so only larger packets, QoS 0 and brokers that ignore the window ever reach it."""

MESSAGE_OVERHEAD_BYTES: Final = 1024
"""Memory that a received message takes besides its payload; counts towards MAX_UNHANDLED_BYTES."""

RECEIVE_MAXIMUM: Final = 64
"""Publishes at QoS 1 that a broker may send us ahead of our acknowledgements (MQTT 5 only); it holds back the rest."""

RECONNECT_MIN_S: Final = 1
RECONNECT_MAX_S: Final = 60

KEEPALIVE_S: Final = 60
SESSION_EXPIRY_AGGREGATOR_S: Final = 3600
SESSION_EXPIRY_DEVICE_S: Final = 600
CONNECT_TIMEOUT_S: Final = 10.0
