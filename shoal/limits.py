"""Limits on sizes, counts and times, above all on the memory and time that a peer can cost us; the unit is in the name."""

from __future__ import annotations

from typing import Final

CHUNK_BYTES: Final = 120 * 1024
"""Payload of one chunk, unless the broker's packet limit is smaller. A receive buffer of 128 KiB or more costs
an mmap each time and takes three times as long."""

LEAST_CHUNK_BYTES: Final = 3072
"""Smallest payload of a chunk that a setting may ask for, or that a broker's refusals lead to."""

MAX_SCHEDULED_RUNS: Final = 500
"""Most runs of one standing order: more than a year of daily ones, and fewer than the numbers that a restored owner skips."""

MAX_INTERVAL_S: Final = 366 * 24 * 3600
"""Longest time between two runs of a standing order: a year."""

MAX_FOLLOWED_MODELS: Final = 64
"""Most models of a run with which the next run of a standing order begins: a presence lists those that its device holds."""

MAX_PACKET_BYTES: Final = 1024 * 1024
"""Largest MQTT packet we accept or send."""

MAX_TRANSFER_BYTES: Final = 1 << 30
"""Largest reassembled transfer: a model of 268 million float32 coordinates."""

MAX_HEADER_BYTES: Final = 1 << 20
"""Largest encoded message that precedes the vectors of a transfer."""

MAX_PENDING_BYTES: Final = 4 << 30
"""Most payload bytes that the aggregator queues for the broker."""

MAX_TRANSFERS_PER_SOURCE: Final = 4
"""Most transfers of one source in reassembly; the one whose last chunk is oldest is dropped for a new one."""

MAX_NOTE_BYTES: Final = 2048
"""Largest sealed decline, reminder, presence or notice: names and fixed fields only, so it fits one chunk."""

MAX_CONTROL_BYTES: Final = 16 * 1024
"""Largest sealed answer to a device: a list of missing chunks (4 KiB) and a reason (at most 4 KiB)."""

MAX_RENEWAL_BYTES: Final = 16 * 1024
"""Largest grant that only renews keys; it contains no roster."""

SEALED_HEAD_BYTES: Final = 2048
"""Most bytes of a sealed upload or mean besides its vectors and margins: envelope (at most 1,148) and message header."""

MAX_ROSTER_CHANGE_BYTES: Final = 1 << 20
"""Largest sealed roster change. The aggregator publishes a larger one without its members; devices then fetch the roster."""

FIRST_PACKAGE_BYTES: Final = 4 << 20
"""Largest run package that a device fetches before a signed announcement has given its size."""

FIRST_ANNOUNCEMENT_BYTES: Final = 1 << 20
"""Announcement bytes that a device allows besides those that grow with its roster and its plan."""

REASSEMBLY_MEMORY_BYTES: Final = 32 << 20
"""Chunks of unfinished transfers held in memory; a spool, if there is one, takes the rest."""

REASSEMBLY_DEADLINE_S: Final = 600.0
"""A transfer that is not complete this long after its first chunk is dropped."""

REASSEMBLY_QUIET_S: Final = 2.0
"""After this long without a new chunk of any transfer, the missing chunks of a transfer are requested."""

REASSEMBLY_BUSY_S: Final = 30.0
"""The same while other transfers still receive chunks: the missing ones may be queued after theirs."""

CLOCK_OFF_S: Final = 300
"""Difference of two clocks above which it is reported. Messages may take a while, so a smaller one can't be measured."""

MAX_COORDINATES: Final = 1 << 28
"""Largest model length d."""

MAX_MODELS: Final = 4096
"""Most models (clusters, restarts, trial halves) that one run may hold."""

MAX_DEVICES: Final = 65_534
"""Most devices in one roster: a device's index is 16 bits, 65535 means none."""

MAX_NAME_CHARS: Final = 64
"""Longest fleet or device name."""

MAX_LABELS_CHARS: Final = 128
"""Longest text of one device's labels in a roster, its shown name among them; ASCII, so that characters are bytes."""

RECEIVING_KEYS: Final = 32
"""Receiving keys that a device publishes at a time: the owner can draw new secrets that often before it has to hear of more."""

MAX_ENROLMENT_BYTES: Final = 16 * 1024
"""Largest enrolment request. Its sender is unauthenticated; it fits one chunk."""

MAX_REQUESTS: Final = 1024
"""Most refused enrolment requests that the owner's program lists."""

MAX_GRANT_BYTES: Final = 21 << 20
"""Largest sealed grant or roster: a roster of MAX_DEVICES with the longest names and labels, all revoked, takes 21.4 MB."""

MAX_REQUEST_BYTES: Final = 256 << 20
"""Largest sealed request of the owner, with a run package: origins of 60 million coordinates. A larger package is carried by
hand. On a broker without an access list a stranger can make the aggregator hold as many bytes as it sends, up to this, of which
REASSEMBLY_MEMORY_BYTES are in memory."""

MAX_ANSWER_BYTES: Final = 16 << 20
"""Largest sealed answer to the owner: the status of a fleet of MAX_DEVICES would take more, and is cut."""

MAX_ROUNDS: Final = 100_000
"""Most rounds of a run that the owner signs."""

MAX_SKIPPED_ROUNDS: Final = MAX_ROUNDS + 1
"""Most rounds, or runs, of a key chain that are skipped at once: from round 0 to the final round of the longest run. Each costs
some 5 microseconds."""

MAX_SCALE: Final = 1e6
"""Largest multiple of an origin in a model."""

MAX_WEIGHT: Final = 1e6
"""Largest weight of a state or of a mean in a recipe, in either direction."""

MIN_WEIGHT: Final = 1e-12
"""Smallest weight in a recipe besides 0: smaller ones may be denormal numbers in float32, which some processors drop."""

MAX_CERTIFICATE_BYTES: Final = 4 << 20
"""Largest encoded certificate of a state; a statement in it takes some 250 bytes and 38 for each further state."""

MAX_NORM_NOISE: Final = 0.2
"""Largest relative standard deviation of a blurred norm; the factor, clipped at four of them, stays positive."""

DEVICE_BYTES_A_COORDINATE: Final = 36
"""Memory that a model takes on a device at its peak, beside the program's own, for each coordinate."""

LOW_DISK_BYTES: Final = 1 << 20
"""Free space below which a disk counts as full."""

ROBUST_RULES: Final = ("off", "filter", "multi-krum", "rfa", "centred-clipping", "nnm")
"""Rules that weigh the updates of a mean, so that a minority of false ones can't decide it; see `aggregator.numerics.robust`."""

PRECISIONS: Final = ("float32", "float16", "int8")
"""Encodings of vectors on the wire, from the most bytes to the fewest; see `shoal.protocol.precision`."""

MAX_FIGURE: Final = 3.4e38
"""Largest loss or norm that a device may report: the largest float32, so that squares and sums in float64 stay finite."""

MAX_MARGIN: Final = 5.0
"""Largest margin reported, in units of loss: above it the better model is certain, and the exact figure only leaks data."""

MOST_DITTO_WEIGHT: Final = 1e6
"""Largest weight of the proximal term of Ditto's personal model, as of ``prox_mu`` in a task."""

REMIND_BASE_S: Final = 1.0
"""Time to the first reminder of an unacknowledged upload in the smallest fleet; it doubles up to a cap, with jitter."""

REMIND_PER_UPLOAD_S: Final = 0.004
"""Added to REMIND_BASE_S for each upload of the round: three times what an aggregator with one shared core needs."""

REMIND_BYTES_PER_S: Final = 50e6
"""Upload bytes a second that an aggregator receives at least; a reminder sent earlier would only add to its backlog."""

MAX_REMIND_AFTER_S: Final = 600.0
"""Longest time to the first reminder that a device accepts from an announcement."""

REMIND_CAP_S: Final = 10.0
REMINDERS_SOON: Final = 12
REMIND_LATE_CAP_S: Final = 60.0
"""The cap after REMINDERS_SOON reminders: the broker queues every reminder for an aggregator that is offline."""

MAX_UNHANDLED_BYTES: Final = 8 << 20
"""Received messages not handled yet; above this the transport stops reading its socket. It is more than RECEIVE_MAXIMUM
chunks, so only larger packets, QoS 0 and brokers that ignore the window reach it."""

MESSAGE_OVERHEAD_BYTES: Final = 1024
"""Memory of a received message besides its payload; counts towards MAX_UNHANDLED_BYTES."""

RECEIVE_MAXIMUM: Final = 64
"""Most unacknowledged publishes at QoS 1 that a broker may send us (MQTT 5 only); it holds back the rest."""

RECONNECT_MIN_S: Final = 1
RECONNECT_MAX_S: Final = 60

KEEPALIVE_S: Final = 60
SESSION_EXPIRY_AGGREGATOR_S: Final = 3600
SESSION_EXPIRY_DEVICE_S: Final = 600
CONNECT_TIMEOUT_S: Final = 10.0

MAX_SCALED: Final = 1024
"""Models that may have statistics of their own: those of smaller ids."""

MAX_STATISTICS: Final = 512
"""Most figures in a device's statistics of its features, two for each feature and a 1: rows of the matrix that hides them."""

PART_BLOCK: Final = 16
"""Coordinates between two places where a vector may be cut into parts: 64 bytes of float32, a line of a processor's cache."""

MAX_LOOKS: Final = 1000
"""Most looks of a run with a keeper, or of all runs of an order: each adds 16 KB to the run's file."""
SKETCH_WORDS: Final = 512
"""Numbers of 32 bits in the sketch of an update, in a run with looks: cosines of it have a standard error of at most 0.045."""
MOST_LOOKED: Final = 64
"""Most updates that one look compares."""
NORM_LIMIT_RATIO: Final = 10.0
"""Largest norm of an update that counts, as a multiple of the median norm."""

LEAST_CELL: Final = 3
"""Fewest devices in a sum of a run with a keeper, whatever the plan says: of two, each could subtract its own."""

MAX_WORKERS: Final = 64
"""Most workers of an aggregator."""

MAX_JOB_BYTES: Final = 64 << 20
"""Largest sealed job of a worker: the round's devices and their weights in each mean."""

MAX_REPORT_BYTES: Final = 1 << 20
"""Largest sealed report of a worker: the parts that it made durable together, or the digests of its parts of means."""
