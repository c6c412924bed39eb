"""The key schedule: from the secret of a key version to the keys of each run and of each round.

    owner draws a key version ──run──▶ chain of run 1 ──take──▶ keys of round 0
            │ next run                      │ next round
            ▼                               ▼
       the same version, for run 2       the chain, one round later ──take──▶ keys of round 1 ...

- The owner draws a *key version* at init, at every rotation, revocation and admission. A newcomer gets the newest version
  only, so it holds nothing of the rounds before.
- Every arrow is HKDF-SHA256 and can't be reversed. A step replaces the secret that it started from: a device that is stolen
  after a round gives away no key of that round or of an earlier one.
- Fleet and run id are part of every derivation. A restored backup may use a key version a second time, but never a mask.
- A key version is stepped by run number. A party skips the runs that it missed and those before the version was drawn.
- A run of a fleet begins at round 0 under every version. Round 0 of the version in the plan seals the run package.
- A chain hands out each round once, and no round before it: see `RunChain.take`.

The aggregator holds none of these secrets and can't import this package.

Example: two devices derive the same keys, one of them after it was away for rounds 0 to 2.

    >>> from crypto.mask.schedule import VersionKey
    >>> device, other = (VersionKey("reef", 7, bytes(32)) for _ in range(2))
    >>> chain, late = (key.begin_run(b"run-1") for key in (device, other))
    >>> rounds = [chain.take() for _ in range(4)]
    >>> late.skip_to(3)
    >>> late.take().content == rounds[3].content, late.next_round
    (True, 4)
    >>> device.next_run
    2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from crypto.mask.derivation import MAX_RUN_ID_BYTES, MaskContext
from crypto.mask.kdf import SECRET_BYTES, expand
from crypto.mask.secret import MaskSecret
from shoal import limits
from shoal.digests import hmac_sha256
from shoal.errors import IntegrityError, UsageError
from shoal.types import Float32Vector, Segment, check_name

if TYPE_CHECKING:
    from shoal.protocol.documents import RunPlan


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RoundKeys:
    """The keys of one round. A device erases them when it has applied the round's means.

    Attributes:
        fleet, run_id, key_version, round: the round that they belong to.
        mask: the secret of the round's mask.
        content: 32 bytes, the key that devices and the owner share in this round.
    """

    fleet: str
    run_id: bytes
    key_version: int
    round: int
    mask: MaskSecret
    content: bytes

    def context(self, task_digest: bytes, mode: str, segments: tuple[Segment, ...]) -> MaskContext:
        """Return the context from which `crypto.mask.derivation.derive` makes the round's mask with the secret ``mask``.

        Args:
            task_digest: 32 bytes.
            mode: the mask mode.
            segments: layout of the vectors.
        """
        return MaskContext(
            fleet=self.fleet,
            run_id=self.run_id,
            task_digest=task_digest,
            mode=mode,
            segments=segments,
            key_version=self.key_version,
            round=self.round,
        )

    def context_of(self, plan: RunPlan) -> MaskContext:
        """Return the context of the round's mask in a plan's run."""
        return self.context(plan.task_digest, plan.recipe.mode, plan.mask_segments)

    @property
    def digest_key(self) -> bytes:
        """The 32 bytes that key the digests of this round's states; neither mask nor content key follows from them."""
        return expand(self.content, SECRET_BYTES, b"digest")

    def state_digest(self, model: int, theta: Float32Vector) -> bytes:
        """Return the digest of a model's state after this round; see `state_digest`."""
        return state_digest(self.digest_key, self.run_id, model, self.round, theta)

    def __repr__(self) -> str:
        return f"RoundKeys({self.fleet!r}, version {self.key_version}, round {self.round}, <redacted>)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("keys can't be pickled")


def state_digest(key: bytes, run_id: bytes, model: int, round_: int, theta: Float32Vector) -> bytes:
    """Return the digest of a state: HMAC-SHA-256 over run, model, round and vector.

    It is keyed. From a plain hash the aggregator could tell whether a guess of the model is right.

    Args:
        key: 32 bytes, the `RoundKeys.digest_key` of the state's round. For a given digest not even a party that chooses the
            key can find another vector.
        run_id: the run's id.
        model: id within the run.
        round_: the state's round; 0 for an origin.
        theta: (d,), float32, C-contiguous, in clear. Equal vectors with other bits (-0.0 and 0.0) have other digests.

    Returns:
        32 bytes.
    """
    head = len(run_id).to_bytes(4, "big") + run_id + _number(model) + _number(round_)
    return hmac_sha256(key, head, theta.astype("<f4", copy=False).data.cast("B"))  # no copy on little-endian machines


class RunChain:
    """The chain of one run under one key version. It holds one secret: that of its next round.

    Attributes:
        fleet, run_id, key_version: the run, and the version that its keys come from.
        next_round: the round whose keys `take` returns.
    """

    __slots__ = ("_secret", "fleet", "key_version", "next_round", "run_id")

    def __init__(self, fleet: str, run_id: bytes, key_version: int, next_round: int, secret: bytes) -> None:
        """Restore a chain from storage; `VersionKey.begin_run` makes a new one.

        Raises:
            IntegrityError: the secret is not 32 bytes long.
        """
        self.fleet, self.run_id, self.key_version = fleet, run_id, key_version
        self.next_round = next_round
        self._secret = MaskSecret.from_bytes(secret)

    def take(self) -> RoundKeys:
        """Return the keys of ``next_round``, and step on to the round after it.

        The chain has moved on when this returns, so no second call gives the same round. Store the chain and the keys
        durably before anything that is masked with them leaves the device.
        """
        secret, at = self._secret.reveal(), (self.fleet.encode(), self.run_id, _number(self.next_round))
        keys = RoundKeys(
            fleet=self.fleet,
            run_id=self.run_id,
            key_version=self.key_version,
            round=self.next_round,
            mask=MaskSecret.from_bytes(expand(secret, SECRET_BYTES, b"mask", *at)),
            content=expand(secret, SECRET_BYTES, b"content", *at),
        )
        self._step()
        return keys

    def copy(self) -> RunChain:
        """Return a chain at the same round, to step on without losing this one."""
        return RunChain(self.fleet, self.run_id, self.key_version, self.next_round, self.reveal())

    def peek(self, round_: int) -> RoundKeys:
        """Return the keys of ``round_`` without a step of this chain; nothing masked with them may leave the device yet.

        Raises:
            IntegrityError: as `skip_to`.
        """
        ahead = self.copy()
        ahead.skip_to(round_)
        return ahead.take()

    def skip_to(self, round_: int) -> None:
        """Step on to ``round_`` without using the rounds in between.

        Raises:
            IntegrityError: the round is before ``next_round``, or more than MAX_SKIPPED_ROUNDS after it.
        """
        if not 0 <= round_ - self.next_round <= limits.MAX_SKIPPED_ROUNDS:
            raise IntegrityError(
                f"the keys of round {round_} can't be derived from those of round {self.next_round}",
                hint="keys are derived forwards only: have the owner admit this device again",
            )
        while self.next_round < round_:
            self._step()

    def _step(self) -> None:
        self._secret = MaskSecret.from_bytes(expand(self._secret.reveal(), SECRET_BYTES, b"next-round"))
        self.next_round += 1

    def reveal(self) -> bytes:
        """Return the chain's secret, for a file of mode 0600."""
        return self._secret.reveal()

    def __repr__(self) -> str:
        return f"RunChain({self.fleet!r}, version {self.key_version}, next round {self.next_round}, <redacted>)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("keys can't be pickled")


class VersionKey:
    """The secret of a key version, as one party holds it for the runs that it has not begun.

    Attributes:
        fleet: the fleet's name.
        number: the key version: sequence of the roster with which the owner drew it.
        next_run: number of the run whose chain `begin_run` returns. The secret is that of this run; at the draw it is that
            of run 1, at whatever run the fleet is.
    """

    __slots__ = ("_secret", "fleet", "next_run", "number")

    def __init__(self, fleet: str, number: int, secret: bytes, next_run: int = 1) -> None:
        """Create the key from the 32 bytes that the owner drew, or restore it from storage.

        Raises:
            IntegrityError: the secret is not 32 bytes long.
        """
        self.fleet, self.number, self.next_run = check_name(fleet, "fleet"), number, next_run
        self._secret = MaskSecret.from_bytes(secret)

    @classmethod
    def draw(cls, fleet: str, number: int) -> VersionKey:
        """Return a new key version from the operating system's random source."""
        return cls(fleet, number, MaskSecret.generate().reveal())

    def begin_run(self, run_id: bytes, first_round: int = 0) -> RunChain:
        """Return the chain of run ``next_run``, and step on: the secret that the chain comes from is erased.

        Args:
            run_id: 1 to 64 bytes, random for each run.
            first_round: number of the chain's first round: 0 in a fleet, 1 where there is no run package to seal.
        """
        if not 1 <= len(run_id) <= MAX_RUN_ID_BYTES:
            raise UsageError(f"the run id has {len(run_id)} bytes, not 1 to {MAX_RUN_ID_BYTES}")
        secret = self._secret.reveal()
        run = expand(secret, SECRET_BYTES, b"run", self.fleet.encode(), run_id)
        self._step()
        first = expand(run, SECRET_BYTES, b"first-round", _number(first_round))
        return RunChain(self.fleet, run_id, self.number, first_round, first)

    def begin_run_of(self, plan: RunPlan) -> RunChain:
        """Return the chain of a plan's run from round 0 on, and step past that run.

        Raises:
            IntegrityError: as `skip_to_run`.
        """
        self.skip_to_run(plan.run)
        return self.begin_run(plan.run_id)

    def peek_run(self, run: int, run_id: bytes) -> RoundKeys:
        """Return the keys of round 0 of a run without a step of this key.

        Raises:
            IntegrityError: as `skip_to_run`.
        """
        ahead = VersionKey(self.fleet, self.number, self.reveal(), self.next_run)
        ahead.skip_to_run(run)
        return ahead.begin_run(run_id).take()

    def skip_to_run(self, run: int) -> None:
        """Step on to run number ``run`` without beginning the runs in between.

        Raises:
            IntegrityError: the run is before ``next_run``, or more than MAX_SKIPPED_ROUNDS after it.
        """
        if not 0 <= run - self.next_run <= limits.MAX_SKIPPED_ROUNDS:
            raise IntegrityError(
                f"the keys of run {run} of key version {self.number} can't be derived from those of run {self.next_run}",
                hint="keys are derived forwards only: have the owner admit this device again",
            )
        while self.next_run < run:
            self._step()

    def _step(self) -> None:
        self._secret = MaskSecret.from_bytes(expand(self._secret.reveal(), SECRET_BYTES, b"next-run"))
        self.next_run += 1

    def reveal(self) -> bytes:
        """Return the secret, for sealing to a device or for a file of mode 0600."""
        return self._secret.reveal()

    def __repr__(self) -> str:
        return f"VersionKey({self.fleet!r}, version {self.number}, next run {self.next_run}, <redacted>)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("keys can't be pickled")


def _number(value: int) -> bytes:
    return value.to_bytes(8, "big")
