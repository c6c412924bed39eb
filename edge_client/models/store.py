"""A device's model states and round keys on disk: crash-safe at every write, and old keys are erased.

``models/index.bin`` holds the key chain, the keys of *pending* rounds (those whose means are not applied yet) and the
digests of the states held. Each state is a file named after its digest. Only the index says what is held:

1. New state files are written and synced.
2. The index is replaced in one rename. It names the new states, and no longer contains the keys of the rounds applied. Its name
   and those of the states become durable with the upload of the round, before that leaves (`edge_client.storage.pending_upload`).
   On a file system that keeps no order of renames, that may take some seconds longer, and a power cut may lose the state of an
   index that is there: the device takes a checkpoint.
3. The files of states that the index no longer names are removed. What a crash leaves over is found at the next start, by a
   look at the whole folder.

A crash before 2 leaves the old step with the keys to repeat it, a crash after 2 the new one. The same write takes the keys of
the open round, so that the chain's step is durable before anything masked with them leaves the device.

The index ends with statements of enough devices about the newest states that they certify. The files of these states stay until
later ones are certified: the owner can begin another run with them.

A replaced or removed file may stay readable in free blocks of the disk; only an encrypted disk prevents that.

The broker retains the means of two rounds. A device that takes part in every round therefore stores its states in the even ones
only: that write takes the keys of two rounds, and after a restart the device applies up to two means. In between, the upload's
slot has the transcript (`StateStore.saw`).

Example: in round 8 the device stores state (0, 7) and takes the keys of rounds 8 and 9, which makes both pending. In round 9 it
stores its upload alone. The step of round 9 brings the mean: `StateStore.commit` stores state (0, 9), and removes state (0, 7)
and the keys of rounds 8 and 9.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from crypto.mask.schedule import RoundKeys, RunChain
from crypto.mask.secret import MaskSecret
from edge_client.checked_files import decoded, read_checked, remove, write_checked
from edge_client.models.states import ModelState, ModelStates
from shoal.errors import IntegrityError
from shoal.membership.statements import read_claims
from shoal.protocol.codec import U16, U32, Fixed16, Fixed32, decode_prefix, encode, message
from shoal.protocol.states import (
    FORKED_ROUND,
    NO_TRANSCRIPT,
    RETAINED_STEPS,
    HeldState,
    Offer,
    StateCertificate,
    StateId,
    read_certificate,
)
from shoal.util.files import private_directory, read_if_there, remove_unfinished, sync_directory, write_atomic

if TYPE_CHECKING:
    from shoal.types import Float32Vector

LOG = logging.getLogger("shoal.edge")
FOLDER: Final = "models"
INDEX_FILE: Final = "index.bin"
STATE_FILES: Final = "state-*.bin"
INDEX_VERSION: Final = 2
"""Version 1 had no certificate."""
OWN_FORK: Final = FORKED_ROUND - 1
"""In place of a stored transcript's round: the announcements contradict each other, so the device has left the run for good."""
RESTING_FROM_BYTES: Final = 4 << 20
"""Shortest vector that `StateStore.at_rest` leaves in its file."""
STATE_HINT: Final = "the device takes a checkpoint"
CERTIFICATE_LENGTH_BYTES: Final = 4
CERTIFIED_HINT: Final = "try another device, or later; `export --live` writes an ONNX file of the newest model"
INDEX_HINT: Final = "have the owner run `shoal-fleet rotate`, or join again: the keys of this run are lost"

T = TypeVar("T")


@message(71)
@dataclass(frozen=True, slots=True)
class StateFile:
    """The head of a state's file; theta, (length,) float32 little-endian, follows, and ``digest`` verifies it."""

    run_id: Fixed16
    model: U16
    round: U32
    length: U32
    digest: Fixed32
    digest_key: Fixed32 = field(repr=False)


@message(72)
@dataclass(frozen=True, slots=True)
class PendingRound:
    """The keys of a round whose means are not applied yet."""

    key_version: U32
    round: U32
    mask: Fixed32 = field(repr=False)
    content: Fixed32 = field(repr=False)


@message(73)
@dataclass(frozen=True, slots=True)
class StateIndex:
    """The head of index.bin; the certificate (`StateCertificate`) of the newest certified states and a SHA-256 follow.

    Attributes:
        key_version, next_round, chain: the key chain.
        pending: ascending by round.
        states: the states held, whose files have these digests.
        transcript: the run's transcript after the announcement of round ``transcript_round``, and the models that this offered.
        longest: norm of the device's longest update in the run; 0 before the first.
    """

    version: U16
    fleet: str
    run_id: Fixed16
    key_version: U32
    next_round: U32
    chain: Fixed32 = field(repr=False)
    pending: tuple[PendingRound, ...]
    states: tuple[HeldState, ...]
    transcript_round: U32 = 0
    transcript: Fixed32 = NO_TRANSCRIPT
    longest: float = 0.0
    offers: tuple[Offer, ...] = ()


@dataclass(frozen=True, slots=True)
class Transcript:
    """The run's transcript as this device knows it: the head after the announcement of ``round``, 0 before the first.

    ``offers`` are the models of that announcement, with which the next run of a standing order may begin.
    """

    round: int = 0
    head: bytes = NO_TRANSCRIPT
    offers: tuple[Offer, ...] = ()


class StateStore:
    """The model states and round keys of one run in a device's directory. One program uses it at a time.

    Attributes:
        pending: keys by round.
        transcript: as stored by the last `commit`, or taken by `saw`.
        longest: norm of the device's longest update in the run; the next write stores it.
    """

    def __init__(
        self, folder: Path, chain: RunChain, pending: Mapping[int, RoundKeys], held: tuple[HeldState, ...]
    ) -> None:
        """Use `begin` or `open` instead."""
        self._folder = folder
        self._chain = chain
        self._held = held
        # Digests of states that have a file, or may have one, and are not held.
        self._left_over: set[bytes] = set()
        self._certificate, self._certified = StateCertificate(()), set[bytes]()
        self._peeked: tuple[RunChain, RoundKeys, RunChain] | None = None
        self._committed = 0
        self.pending = dict(pending)
        self.transcript = Transcript()
        self.longest = 0.0

    @classmethod
    def begin(cls, directory: Path, chain: RunChain) -> StateStore:
        """Start a run: store its chain durably, and remove keys and states of the run before.

        Args:
            directory: the device's.
            chain: the chain of the run. The caller stores the version key that it was derived from only afterwards: after a
                crash in between, that key gives the same chain again.
        """
        store = cls(private_directory(directory / FOLDER), chain, {}, ())
        sync_directory(directory)  # the folder's own name
        store._write_index(chain, {}, ())
        store._clear_folder()
        return store

    @classmethod
    def open(cls, directory: Path) -> StateStore | None:
        """Return the store of the run that the device took part in last, or None before its first run.

        Raises:
            IntegrityError: the index is damaged, or of another version.
        """
        folder = directory / FOLDER
        found = _read_index(folder)
        if found is None:
            return None
        index, certificate = found
        pending = {
            p.round: RoundKeys(
                fleet=index.fleet,
                run_id=index.run_id,
                key_version=p.key_version,
                round=p.round,
                mask=MaskSecret.from_bytes(p.mask),
                content=p.content,
            )
            for p in index.pending
        }
        chain = RunChain(index.fleet, index.run_id, index.key_version, index.next_round, index.chain)
        store = cls(folder, chain, pending, index.states)
        store.transcript = Transcript(index.transcript_round, index.transcript, index.offers)
        store.longest = index.longest
        store._certificate, store._certified = certificate, _named_in(certificate)
        store._clear_folder()
        return store

    @property
    def held(self) -> tuple[HeldState, ...]:
        """The states on disk."""
        return self._held

    @property
    def run_id(self) -> bytes:
        """The run's id."""
        return self._chain.run_id

    @property
    def key_version(self) -> int:
        """The key version of the rounds that are still to come."""
        return self._chain.key_version

    def has_keys(self, round_: int, key_version: int | None = None) -> bool:
        """Return whether the keys of a round, under a version if one is given, are pending or can still be derived."""
        keys, derived = self.pending.get(round_), round_ >= self._chain.next_round
        if key_version is None:
            return keys is not None or derived
        return (keys is not None and keys.key_version == key_version) or (derived and key_version == self.key_version)

    def peek(self, round_: int) -> RoundKeys:
        """Return the keys of a round without a step of the stored chain: nothing masked with them may leave the device yet.

        The next `commit` that takes the round gives the same keys.

        Raises:
            IntegrityError: the keys of the round are erased, or it is too far ahead.
        """
        if round_ in self.pending:
            return self.pending[round_]
        if round_ < self._chain.next_round:
            raise IntegrityError(f"the keys of round {round_} are erased", hint=STATE_HINT)
        return self._ahead(round_)[0]

    def keys_under(self, round_: int, key_version: int) -> RoundKeys:
        """Return the keys of a round under a key version, as `peek` does.

        Raises:
            IntegrityError: they are erased, or the version is another than those in use.
        """
        keys = self.pending.get(round_)
        if keys is not None and keys.key_version == key_version:
            return keys
        if key_version != self.key_version:
            raise IntegrityError(f"the keys of round {round_} under version {key_version} are erased", hint=STATE_HINT)
        return self._ahead(round_)[0]

    def _ahead(self, round_: int) -> tuple[RoundKeys, RunChain]:
        """Return the keys of a round that the chain still gives, and the chain stepped past it.

        A round's keys are asked for several times before they are taken: by then they are derived once. They are dropped when
        the chain is replaced.

        Raises:
            IntegrityError: as `RunChain.skip_to`.
        """
        known = self._peeked
        if known is None or known[0] is not self._chain or known[1].round != round_:
            after = self._chain.copy()
            after.skip_to(round_)
            known = self._peeked = self._chain, after.take(), after
        return known[1], known[2].copy()

    def prefer(self, keys: RoundKeys) -> None:
        """Use these keys for their round from now on; the next `commit` makes that durable."""
        self.pending[keys.round] = keys

    def refuse_run(self, *, own: bool = False) -> None:
        """Record, durably, that the device has left this run.

        Args:
            own: whether an announcement contradicts this device's own history; else it contradicts what others have signed, and
                the device may come back once the owner has revoked those that lied.
        """
        forked = Transcript(OWN_FORK if own else FORKED_ROUND, self.transcript.head)
        self._write_index(self._chain, self.pending, self._held, forked)
        self.transcript = forked

    def renew(self, chain: RunChain, first: int | None = None, retained: Collection[int] = ()) -> None:
        """Continue the run under a newer key version, durably, and erase the chain of the older one.

        Of the rounds before, those become pending whose steps may still be retained. Keys of later rounds, which the device may
        have taken ahead of time, are erased: these rounds are under the newer version.

        Args:
            chain: under the newer version.
            first: the round that is announced under it, by default the chain's next one. The rounds of the chain before it may
                have been under either version: `peek` gives their older keys, `keys_under` both.
            retained: rounds whose steps are announced, besides the last ones before ``first``.

        Raises:
            IntegrityError: the chain is of another run, or of no newer version.
        """
        old, first = self._chain.copy(), chain.next_round if first is None else first
        if (chain.fleet, chain.run_id) != (old.fleet, old.run_id) or chain.key_version <= old.key_version:
            raise IntegrityError(
                f"key version {chain.key_version} does not continue version {old.key_version} of this run"
            )
        pending = {r: keys for r, keys in self.pending.items() if r < first}
        # After a long absence, other rounds before these are of no use: their means are gone.
        rounds = {*range(first - RETAINED_STEPS, first), *retained}
        _take_all(old, sorted(r for r in rounds if old.next_round <= r < first), pending)
        self._write_index(chain, pending, self._held)
        self._chain, self.pending, self._peeked = chain, pending, None

    def load(self) -> tuple[ModelStates, tuple[IntegrityError, ...]]:
        """Return the states held, and an error for each whose file is missing or damaged.

        The device takes checkpoints in place of the damaged states; the next `commit` forgets them.
        """
        found, errors = {}, []
        for held in self._held:
            try:
                found[held.state] = self._read(held)
            except IntegrityError as error:
                errors.append(error)
        # A checkpoint of a damaged state has the same digest, and `commit` must write its file again.
        self._left_over |= {held.digest for held in self._held if held.state not in found}
        self._held = tuple(held for held in self._held if held.state in found)
        return ModelStates(self._chain.fleet, self.run_id, found), tuple(errors)

    def commit(
        self,
        states: ModelStates,
        *,
        applied: int,
        waiting: Collection[int] = (),
        taking: Collection[int] = (),
        transcript: Transcript | None = None,
    ) -> None:
        """Make ``states`` the states held, durably, then erase the keys of the rounds up to ``applied``.

        Rounds that the device never took are erased as well: the chain steps over them.

        Args:
            states: all states to hold.
            applied: the newest round whose step is applied, or superseded by a checkpoint; 0 before the first.
            waiting: rounds up to it whose keys stay, see `edge_client.models.recipes.CatchUp`.
            taking: later rounds, ascending, whose keys become pending in the same write.
            transcript: the run's transcript from now on; None leaves it as it is.

        Raises:
            ConfigError: a file can't be written; the old states and keys are still there.
        """
        held = tuple(states.held[id_].held for id_ in sorted(states.held))
        on_disk = set(self._held)
        new = [h for h in held if h not in on_disk]
        # Also if this commit fails half-way.
        self._left_over |= {h.digest for h in new}
        for h in new:
            self._write_state(states.held[h.state])
        pending = {r: keys for r, keys in self.pending.items() if r > applied or r in waiting}
        chain = self._chain
        for round_ in [r for r in sorted(waiting) if r >= chain.next_round and r not in pending]:
            chain = self._take(chain, round_, pending)
        if chain.next_round <= applied:
            chain = chain.copy()
            chain.skip_to(applied + 1)
        for round_ in [r for r in taking if r >= chain.next_round]:
            chain = self._take(chain, round_, pending)
        transcript = transcript or self.transcript
        old = (self._held, self.pending, self._chain.next_round, self.transcript)
        if (held, pending, chain.next_round, transcript) != old:
            self._write_index(chain, pending, held, transcript, sync_name=False)
        self.transcript = transcript
        self._left_over |= {h.digest for h in self._held}
        self._held, self.pending = held, pending
        if chain is not self._chain:
            self._chain, self._peeked = chain, None
        self._committed = min(taking, default=0)
        self._remove_left_over()

    def saw(self, transcript: Transcript) -> bool:
        """Take the transcript of a round without a write, if the device can go on from the states stored in the round before.

        Returns whether it can. The head then stands in the slot of the round's upload.
        """
        if self._committed != transcript.round - 1 or transcript.round % RETAINED_STEPS == 0:
            return False
        if transcript.round not in self.pending:
            return False  # a newer key version came into force
        self.transcript = transcript
        return True

    def at_rest(self, states: ModelStates, used: Container[StateId]) -> ModelStates:
        """Return the states held: long ones on disk that are not ``used`` now are read from there, and take no memory."""
        on_disk = {held.digest for held in self._held}

        def vector(state: ModelState) -> Float32Vector:
            at = self._path(state.digest).stat().st_size - state.theta.nbytes
            return np.memmap(self._path(state.digest), "<f4", "r", at, state.theta.shape)

        resting = {
            id_: replace(state, theta=vector(state))
            for id_, state in states.held.items()
            if id_ not in used
            and state.theta.flags.owndata
            and state.theta.nbytes >= RESTING_FROM_BYTES
            and state.digest in on_disk
        }
        return states.with_states(resting.values())

    def certify(self, signed: Iterable[bytes], digests: Iterable[bytes]) -> None:
        """Keep the states of these digests, which the statements certify, until later ones are; the next `commit` stores that."""
        self._certificate = StateCertificate(tuple(signed))
        self._left_over |= self._certified
        self._certified = set(digests)

    def _take(self, chain: RunChain, round_: int, pending: dict[int, RoundKeys]) -> RunChain:
        """Add a round's keys to ``pending``; return the chain stepped past it. ``chain`` stays as it is."""
        if chain is self._chain:
            pending[round_], after = self._ahead(round_)
            return after
        after = chain.copy()
        _take_all(after, [round_], pending)
        return after

    def _write_index(
        self,
        chain: RunChain,
        pending: Mapping[int, RoundKeys],
        held: tuple[HeldState, ...],
        transcript: Transcript | None = None,
        *,
        sync_name: bool = True,
    ) -> None:
        transcript = transcript or self.transcript
        rounds = tuple(PendingRound(k.key_version, r, k.mask.reveal(), k.content) for r, k in sorted(pending.items()))
        index = encode(
            StateIndex(
                version=INDEX_VERSION,
                fleet=chain.fleet,
                run_id=chain.run_id,
                key_version=chain.key_version,
                next_round=chain.next_round,
                chain=chain.reveal(),
                pending=rounds,
                states=held,
                transcript_round=transcript.round,
                transcript=transcript.head,
                longest=self.longest,
                offers=transcript.offers,
            )
        )
        write_checked(self._folder / INDEX_FILE, index + encode(self._certificate), sync_name=sync_name)

    def _write_state(self, state: ModelState) -> None:
        head = encode(
            StateFile(
                run_id=self.run_id,
                model=state.id.model,
                round=state.id.round,
                length=len(state.theta),
                digest=state.digest,
                digest_key=state.digest_key,
            )
        )
        # No checksum: the digest in the index verifies the whole vector.
        body = np.ascontiguousarray(state.theta, "<f4").view(np.uint8).data  # no copy on little-endian machines
        write_atomic(self._path(state.digest), head, body, sync_name=False)

    def _read(self, held: HeldState) -> ModelState:
        path = self._path(held.digest)
        data = read_if_there(path)
        if data is None:
            raise IntegrityError(f"{path} is missing", hint=STATE_HINT)
        head, body = decoded(path, memoryview(data), StateFile, STATE_HINT)
        if (head.run_id, HeldState(head.model, head.round, head.digest)) != (self.run_id, held):
            raise IntegrityError(f"{path} holds another state than the index says", hint=STATE_HINT)
        if len(body) != 4 * head.length:
            raise IntegrityError(
                f"{path} is damaged: it holds {len(body)} bytes where {head.length} coordinates belong", hint=STATE_HINT
            )
        theta = np.frombuffer(body, "<f4").astype(np.float32)
        state = ModelState.of(held.state, theta, run_id=self.run_id, digest_key=head.digest_key)
        if state.digest != held.digest:
            raise IntegrityError(f"{path} is damaged", hint=STATE_HINT)
        return state

    def _path(self, digest: bytes) -> Path:
        return self._folder / STATE_FILES.replace("*", digest.hex())

    def _remove_left_over(self) -> None:
        """Delete files of states that are no longer held; retry next time for a file that can't be deleted."""
        over = self._left_over - {held.digest for held in self._held} - self._certified
        self._left_over = {digest for digest in over if not remove(self._path(digest))}

    def _clear_folder(self) -> None:
        """Remove state files that the index does not name, and temporary files of an earlier program."""
        remove_unfinished(self._folder)
        named = {self._path(digest) for digest in self._certified.union(held.digest for held in self._held)}
        for path in self._folder.glob(STATE_FILES):
            if path not in named:
                remove(path)


def _read_index(folder: Path) -> tuple[StateIndex, StateCertificate] | None:
    path = folder / INDEX_FILE
    found = read_checked(path, StateIndex, INDEX_HINT)
    if found is None:
        return None
    index, rest = found
    if index.version > INDEX_VERSION:
        raise IntegrityError(f"{path} is of version {index.version}, not {INDEX_VERSION}", hint=INDEX_HINT)
    return index, read_certificate(rest) if len(rest) else StateCertificate(())


def stored_certificate(folder: Path) -> StateCertificate:
    """Return the certificate in a device's folder of models; an empty one if there is none.

    Raises:
        IntegrityError: the index is damaged, or of a later version.
    """
    found = _read_index(folder)
    return StateCertificate(()) if found is None else found[1]


def _named_in(certificate: StateCertificate) -> set[bytes]:
    return {state.digest for claim in read_claims(certificate.statements) for state in claim.statement.states}


def certified_file(directory: Path) -> tuple[bytes, int]:
    """Return the newest certified states of a device with their certificate, for the owner's `run start --from`, and their round.

    That is the length of the certificate as CERTIFICATE_LENGTH_BYTES, little-endian, an encoded `StateCertificate`, and for each
    state a `StateFile` and theta.

    Raises:
        IntegrityError: the device holds none.
    """
    folder = directory / FOLDER
    certificate = stored_certificate(folder)
    paths = [folder / STATE_FILES.replace("*", digest.hex()) for digest in sorted(_named_in(certificate))]
    found = [data for path in paths if (data := read_if_there(path)) is not None]
    if not found:
        raise IntegrityError("this device holds no certified model of its newest run", hint=CERTIFIED_HINT)
    newest = max(decode_prefix(data, StateFile)[0].round for data in found)
    signed = encode(certificate)
    return b"".join([len(signed).to_bytes(CERTIFICATE_LENGTH_BYTES, "little"), signed, *found]), newest


def _take_all(chain: RunChain, rounds: Iterable[int], pending: dict[int, RoundKeys]) -> None:
    """Step the chain through ``rounds``, ascending, and add their keys to ``pending``."""
    for round_ in rounds:
        chain.skip_to(round_)
        pending[round_] = chain.take()
