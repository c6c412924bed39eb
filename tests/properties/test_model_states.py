"""Devices that miss rounds at random hold the same bits as all others in step; thieves and liars get nowhere.

The fleet here is made of the device's library alone: stores, recipes, masks and checkpoints are real, the aggregator is a
few lines that average masked vectors and pass on what it is given.
"""

import functools
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from crypto.mask.derivation import derive
from crypto.mask.kdf import SECRET_BYTES, expand
from crypto.mask.masking import mask, unmask
from crypto.mask.secret import MaskSecret
from crypto.seal.identity import Identity
from edge_client.models.checkpoints import open_checkpoint, seal_checkpoint
from edge_client.models.recipes import catch_up
from edge_client.models.states import ModelState, ModelStates
from edge_client.models.store import FOLDER, StateStore
from shoal.errors import IntegrityError, ShoalError, UntrustedError
from shoal.membership.statements import sign_statement
from shoal.protocol.states import RETAINED_STEPS, StateCertificate, StateId, StateRecipe, Step, Term
from shoal.types import MaskedVector, Segment
from shoal.util.files import private_directory
from tests.conftest import MEMORY
from tests.helpers.model_states import FLEET, RUN_ID, chain, roster, take

LENGTH = 11
DEVICES = 8
HALF = DEVICES // 2
NEEDED = 2
CATCH_UP_PASSES = 2
IDENTITIES = tuple(Identity.generate(f"dev-{i}") for i in range(DEVICES + 1))
ROSTER = roster(IDENTITIES)
PHASES = [phase for phase in Phase if phase is not Phase.shrink]
"""An example takes a tenth of a second, so that shrinking one takes minutes; the drawn script is short enough to read."""
few = settings(
    deadline=None,
    max_examples=settings.default.max_examples // 20,
    suppress_health_check=list(HealthCheck),
    phases=PHASES,
)


@functools.lru_cache(maxsize=64)
def _derived(secret, context):
    return derive(MaskSecret.from_bytes(secret), context)


def mask_for(keys):
    """Return the mask of a round; all devices derive the same one."""
    return _derived(keys.mask.reveal(), keys.context(bytes(32), "rotation", (Segment("cluster", LENGTH),)))


class Device:
    """A device: its store, its states, and the models that it follows."""

    def __init__(self, number, directory, first_chain, origins):
        self.number, self.directory = number, private_directory(directory / f"device-{number}")
        self.identity = IDENTITIES[number]
        self.store = StateStore.begin(self.directory, first_chain)
        self.states = ModelStates(FLEET, RUN_ID, {})
        if origins:
            self.states = ModelStates.of_origins(origins, self.store.peek(1))
            self.store.commit(self.states, applied=0)
        self.missing = self.out_of_step = ()

    def restart(self):
        """Forget everything that is not on disk."""
        self.store = StateStore.open(self.directory)
        self.states, errors = self.store.load()
        assert not errors

    def compare(self, server):
        """Apply the steps that apply, and note the states that are missing."""
        steps = [step for step, _ in server.retained]
        open_states = steps[-1].open if steps else tuple(self.states.held)
        plan = catch_up(
            self.states.digests(),
            steps,
            wanted=[id_ for id_ in open_states if id_.model in server.follows(self.number)],
            has_keys=self.store.has_keys,
            certified=server.certified(),
        )
        for step in plan.steps:
            keys = self.store.peek(step.round)
            means = next(means for whole, means in server.retained if whole.round == step.round)
            wanted = {r.model for r in step.recipes if r.mean is not None}
            clear = {m: unmask(MaskedVector(means[m], mask_for(keys).key_id), mask_for(keys)) for m in wanted}
            self.states = self.states.apply(step, clear, keys)
        self.states = self.states.keep(plan.keep)
        self.missing, self.out_of_step = plan.missing, plan.out_of_step
        self.store.commit(self.states, applied=server.round - 1, waiting=plan.waiting)

    @property
    def in_step(self):
        return not self.missing and not self.out_of_step


class Server:
    """An aggregator that holds no model: retained steps with masked means, and signed statements."""

    def __init__(self, kind):
        self.kind, self.round = kind, 1
        self.retained = []
        self.statements = {}
        models = range(3) if kind == "ifca" else range(1)
        self.newest = {model: StateId(model, 0) for model in models}
        self.halves, self.parent, self.next_model = {}, None, 1

    def follows(self, device):
        """Return the models that a device follows."""
        if self.kind != "cfl" or not self.halves:
            return set(self.newest)
        both = set(self.halves.values())
        return both | {self.parent.model} if self.parent else {self.halves[device % DEVICES >= HALF]}

    def trains(self, device, rng):
        """Return the model that a device trains."""
        if self.halves:
            return self.halves[device % DEVICES >= HALF]
        return int(rng.choice(sorted(self.newest)))

    def hear(self, device, round_):
        signed = sign_statement(device.identity, device.states.statement(device.identity.name, round_))
        for state in device.states.held.values():
            self.statements.setdefault(state.id, {}).setdefault(state.digest, {})[device.number] = signed

    def certified(self):
        """Return the digest of each state that enough devices have signed."""
        found = {}
        for id_, by_digest in self.statements.items():
            digest, signers = max(by_digest.items(), key=lambda item: len(item[1]))
            if len(signers) >= NEEDED:
                found[id_] = digest
        return found

    def certificate(self, id_):
        digest = self.certified()[id_]
        return StateCertificate(tuple(self.statements[id_][digest].values()))

    def close(self, uploads, event):
        """Close the round: average the masked updates of each model, and write the recipes."""
        r = self.round

        def mean(numbers, model):
            rows = [row for number, trained, row in uploads if trained == model and number in numbers]
            return np.mean(rows, 0, dtype=np.float64).astype(np.float32) if rows else None

        everyone = set(range(DEVICES + 1))
        means = {model: mean(everyone, model) for model in self.newest}
        terms = {model: ((self.newest[model], 1.0),) for model in self.newest}
        weights = dict.fromkeys(self.newest, 1.0)
        also_open = set()
        if event == "restart" and self.kind == "ifca":
            terms[1], weights[1] = ((self.newest[0], 0.7), (self.newest[1], 0.3)), 0.5
        if self.kind == "cfl":
            if event == "fork" and not self.halves:
                (root,) = self.newest.values()
                self.halves = {False: self.next_model, True: self.next_model + 1}
                self.next_model += 2
                self.parent = root
                groups = {True: {n for n in everyone if n % DEVICES >= HALF}}
                groups[False] = everyone - groups[True]
                means = {model: mean(groups[side], root.model) for side, model in self.halves.items()}
                terms = dict.fromkeys(self.halves.values(), ((root, 1.0),))
                weights = dict.fromkeys(self.halves.values(), 1.0)
            elif event == "refuse" and self.parent:
                terms, means = {self.parent.model: ((self.parent, 1.0),)}, {}
                self.halves, self.parent = {}, None
            elif event == "accept" and self.parent:
                self.parent = None
            elif event == "merge" and self.halves and not self.parent:
                terms, means = {self.next_model: tuple((self.newest[m], 0.5) for m in sorted(self.newest))}, {}
                self.halves, self.next_model = {}, self.next_model + 1
            if self.parent:
                also_open.add(self.parent)
        changed = {m for m in terms if means.get(m) is not None or terms[m] != ((self.newest.get(m), 1.0),)}
        recipes = tuple(
            StateRecipe(
                m,
                r,
                tuple(Term(id_.model, id_.round, weight) for id_, weight in terms[m]),
                None if means.get(m) is None else weights[m],
            )
            for m in sorted(changed)
        )
        self.newest = {m: StateId(m, r) if m in changed else self.newest[m] for m in terms}
        step = Step(r, recipes, tuple(sorted({*self.newest.values(), *also_open})))
        self.retained = [*self.retained, (step, means)][-RETAINED_STEPS:]
        self.round += 1


class Fleet:
    """Devices and their aggregator, round by round."""

    def __init__(self, directory, kind, seed):
        self.rng = np.random.default_rng(seed)
        self.server = Server(kind)
        self.directory = directory
        origins = {m: self.update() for m in self.server.newest}
        self.devices = [Device(n, directory, chain(), dict(origins)) for n in range(DEVICES)]
        self.version, self.first_round = 1, 1
        self.checkpoints = []
        self.kinds_of_catching_up = set()

    def update(self):
        return self.rng.standard_normal(LENGTH).astype(np.float32)

    def admit(self):
        """Let a newcomer in: it gets the keys of a new version, and no older ones."""
        self.version, self.first_round = 2, self.server.round
        self.devices.append(Device(DEVICES, self.directory, chain(2, first_round=self.first_round), {}))

    def play(self, absent=(), event="train"):
        """Run one round without the devices in ``absent``."""
        r = self.server.round
        here = [d for d in self.devices if d.number not in absent]
        for device in here:
            if device.store.key_version < self.version:
                device.store.renew(chain(2, first_round=self.first_round))
            device.compare(self.server)
            take(device.store, r)
            self.server.hear(device, r)
        for _ in range(CATCH_UP_PASSES):
            for device in here:
                device.compare(self.server)
                self.server.hear(device, r)
                self.bring_checkpoints(device, here)
        uploads = []
        for device in here:
            if device.in_step:
                row = mask(self.update(), mask_for(device.store.peek(r))).values
                uploads.append((device.number, self.server.trains(device.number, self.rng), row))
        self.server.close(uploads, event)

    def bring_checkpoints(self, device, here):
        """Let devices that hold the missing states seal them, if the states are certified."""
        for id_ in device.missing:
            digest = self.server.certified().get(id_)
            givers = [d for d in here if id_ in d.states.held and d.states.held[id_].digest == digest]
            if digest is None or not givers:
                continue
            keys = device.store.peek(self.server.round)
            sealed = seal_checkpoint(givers[0].identity, givers[0].store.peek(keys.round), givers[0].states.held[id_])
            state = self.opened(sealed.payload, id_, keys)
            self.checkpoints.append((keys.round, id_))
            device.states = device.states.with_states([state])
        device.compare(self.server)

    def opened(self, payload, id_, keys):
        return open_checkpoint(
            payload,
            self.server.certificate(id_),
            wanted=id_,
            keys=keys,
            roster=ROSTER,
            length=LENGTH,
            signers=NEEDED,
        )[0]

    def all_equal(self):
        """Whether all devices that are in step hold the same bits of each state."""
        found = {}
        for device in self.devices:
            for id_, state in device.states.held.items() if device.in_step else ():
                found.setdefault(id_, set()).add((state.digest, state.theta.tobytes()))
        return all(len(versions) == 1 for versions in found.values())


@contextmanager
def fleet(kind, seed=0):
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as directory:
        yield Fleet(Path(directory), kind, seed)


EVENTS = {
    "fedavg": st.just("train"),
    "ifca": st.sampled_from(["train", "restart"]),
    "cfl": st.sampled_from(["train", "fork", "fork", "refuse", "accept", "merge"]),
}
KINDS = sorted(EVENTS)


def rounds(kind, absences):
    return st.lists(st.tuples(st.sets(absences), EVENTS[kind]), min_size=3, max_size=14)


@pytest.mark.parametrize("kind", KINDS)
@few
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_after_absences_all_end_in_step(kind, data, seed):
    """Two devices of each half are always there, the others come and go; one is admitted, one restarts, one has a flipped bit."""
    changing = [2, 3, HALF + 2, HALF + 3, DEVICES]
    script = data.draw(rounds(kind, st.sampled_from(changing)))
    admitted = data.draw(st.integers(2, 14))
    flipped, restarted = data.draw(st.integers(1, 14)), data.draw(st.integers(1, 14))
    with fleet(kind, seed) as all_:
        for absent, event in [*script, *[(set(), "train")] * 4]:
            if all_.server.round == admitted:
                all_.admit()
            if all_.server.round == flipped:
                victim = all_.devices[3]
                for state in list(victim.states.held.values()):
                    theta = state.theta.copy()
                    theta.view(np.uint32)[4] ^= 1
                    bad = ModelState.of(state.id, theta, run_id=RUN_ID, digest_key=state.digest_key)
                    victim.states = victim.states.with_states([bad])
            if all_.server.round == restarted:
                all_.devices[2].restart()
            all_.play(absent, event)
        for device in all_.devices:
            device.compare(all_.server)
        assert [d.number for d in all_.devices if not d.in_step] == []
        assert all_.all_equal()
        for device in all_.devices:
            assert {id_.model for id_ in device.states.held} == all_.server.follows(device.number)
            assert len(list((device.directory / FOLDER).iterdir())) == 1 + len(device.states.held)


@pytest.mark.parametrize("kind", KINDS)
@few
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_devices_in_step_hold_the_same_bits(kind, data, seed):
    """Devices in step hold the same bits after every round."""
    script = data.draw(rounds(kind, st.integers(0, DEVICES - 1)))
    with fleet(kind, seed) as all_:
        for absent, event in script:
            all_.play(absent, event)
            assert all_.all_equal()


def test_the_fleet_catches_up_in_every_way():
    """The tests above pass through retained steps and through checkpoints, for a merge as well."""
    with fleet("cfl") as all_:
        for absent, event in [
            ({2}, "train"),
            ((), "fork"),
            ({3}, "train"),
            ({3}, "accept"),
            ({3}, "train"),
            ((), "train"),
            ((), "merge"),
            ((), "train"),
        ]:
            all_.play(absent, event)
        taken = all_.checkpoints
        assert (6, StateId(1, 5)) in taken, "device 3 missed three rounds"
        assert not any(r == 2 for r, _ in taken), "device 2 missed one"
        merged = [id_ for r, id_ in taken if r == 8]
        assert set(merged[:2]) == {StateId(2, 6)}, "the merge names a model that the first two never held"
        assert StateId(3, 7) in merged[2:], "they certify the merged state for others"
        assert all(d.in_step for d in all_.devices)
        assert {id_ for d in all_.devices for id_ in d.states.held} == {StateId(3, 7)}


@few
@given(seed=st.integers(0, 2**32), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), liar=st.booleans())
def test_lying_sealer_and_damage_are_refused(seed, place, bit, liar):
    """A lying sealer and a damaged checkpoint are refused."""
    with fleet("fedavg", seed) as all_:
        for _ in range(3):
            all_.play()
        sealer, receiver = all_.devices[:2]
        for device in (sealer, receiver):
            device.compare(all_.server)
            all_.server.hear(device, 4)
        state = sealer.states.newest(0)
        keys = receiver.store.peek(4)
        honest = seal_checkpoint(sealer.identity, sealer.store.peek(4), state).payload
        assert all_.opened(honest, state.id, keys).held == state.held
        if liar:
            theta = state.theta.copy()
            raw = theta.view(np.uint8)
            raw[int(place * len(raw))] ^= 1 << bit
            lie = ModelState(state.id, theta, state.digest, state.digest_key)
            with pytest.raises((UntrustedError, IntegrityError)):  # a flipped exponent may make a NaN
                all_.opened(seal_checkpoint(sealer.identity, keys, lie).payload, state.id, keys)
        else:
            damaged = bytearray(honest)
            damaged[int(place * len(damaged))] ^= 1 << bit
            with pytest.raises(ShoalError):
                all_.opened(bytes(damaged), state.id, keys)


def secrets_in(directory, rounds_):
    """Return which of the secrets of past rounds follow from any 32 bytes in a directory: as they are, or as a chain's."""
    files = [path.read_bytes() for path in directory.rglob("*") if path.is_file()]
    windows = {data[i : i + SECRET_BYTES] for data in files for i in range(len(data) - SECRET_BYTES + 1)}
    found = set()
    for r, keys in rounds_.items():
        at = FLEET.encode(), RUN_ID, r.to_bytes(8, "big")
        derived = {expand(w, SECRET_BYTES, purpose, *at) for w in windows for purpose in (b"mask", b"content")}
        if {keys.mask.reveal(), keys.content} & (windows | derived):
            found.add(r)
    return found


@pytest.mark.parametrize("kind", ["fedavg", "cfl"])
def test_stolen_device_opens_nothing_earlier(kind):
    """Its whole directory is searched, as it is in round r before and after the round's keys are taken."""
    events = {"cfl": ["fork", "train", "accept", "train", "merge", "train"], "fedavg": ["train"] * 6}[kind]
    with fleet(kind, 3) as all_:
        every = {}
        whole = chain()
        for event in events:
            every[all_.server.round] = whole.take()
            all_.play((), event)
            r = all_.server.round
            for device in all_.devices:
                waits = all_.server.retained[-1][0].round
                assert secrets_in(device.directory, every) == {waits}, "the round whose mean it has not seen"
                device.compare(all_.server)
            if event != "merge":  # no device can apply a merge before it has the other half
                assert secrets_in(all_.devices[0].directory, every) == set()
            thief = StateStore.open(all_.devices[0].directory)
            with pytest.raises(IntegrityError, match="are erased"):
                thief.peek(r - 2 if event == "merge" else r - 1)


def test_stolen_absent_device_opens_no_past():
    """Until it returns, its chain gives the keys of the rounds that it misses."""
    with fleet("fedavg", 4) as all_:
        whole = chain()
        every = {r: whole.take() for r in range(1, 7)}
        away = all_.devices[5]
        for absent in [(), (5,), (5,), (5,), (5,)]:
            all_.play(absent)
        assert secrets_in(away.directory, every) == {1, 2}
        all_.play()
        assert away.in_step
        assert secrets_in(away.directory, every) == {6}
