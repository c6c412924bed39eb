"""Jobs for assignments: samples are read once a task, and a final round measures every model of the task."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from crypto.seal.identity import Identity
from edge_client.learning import data as device_data
from edge_client.learning.data import Dataset, load, split, watch_of
from edge_client.learning.model import Score
from edge_client.learning.standardisation import local_scale, standardised
from edge_client.learning.statistics import scale_from, statistics_of
from edge_client.learning.update import Finished
from edge_client.models.round_context import Run
from edge_client.models.states import ModelState
from edge_client.run import jobs
from edge_client.run.jobs import JobFactory
from edge_client.storage.finished_models import UNMEASURED, FinishedModels, Validation
from edge_client.storage.scales import Scale, Scales
from edge_client.storage.state import OwnModel
from shoal.errors import DataError, IntegrityError, UntrustedError
from shoal.protocol.documents import SegmentSpec
from shoal.protocol.messages import STATISTICS_MODEL, Phase, statistics_model
from shoal.protocol.states import StateId
from shoal.task.data_declaration import DataDeclaration
from shoal.task.manifest import TensorSpec
from shoal.util.files import private_directory
from tests.helpers.announced import TRAINING, announcement
from tests.helpers.plans import run_plan
from tests.helpers.tasks import samples

AGGREGATOR, DEVICE = Identity.generate("aggregator").member, Identity.generate("dev-1")
FINAL_ID = b"r" * 16


class Models:
    """Models that make the context of a job."""

    def context(self, announced, assignment):
        """Return a context that names its job."""
        return announced.nonce, assignment


class Backend:
    """Scores a model: its first coordinate is the loss, and half of the samples are right."""

    def score(self, theta, x, _y):
        """Return the score on some samples."""
        return Score(float(theta[0]), len(x) // 2, len(x))


class Place:
    """A factory with a directory; ``loads`` counts reads of the samples, ``backends`` those made."""

    def __init__(self, directory, bundle):
        self.bundle, self.loads, self.backends = bundle, 0, []
        self.data = Dataset(*samples(40))
        roster = SimpleNamespace(aggregator=AGGREGATOR)
        self.member = SimpleNamespace(directory=directory, fleet="reef", name="dev-1", identity=DEVICE, roster=roster)
        self.factory = JobFactory(self.member, self.load, threads=3, backend=self.make_backend)

    def load(self, manifest):
        assert manifest is self.bundle.manifest
        self.loads += 1
        return self.data

    def make_backend(self, bundle, threads):
        self.backends.append((bundle, threads))
        return Backend()

    def run(self, **changes):
        digest = changes.pop("task_digest", self.bundle.digest)
        segments = (SegmentSpec("cluster", self.bundle.length),)
        plan = run_plan(task_digest=digest, segments=segments, **changes)
        return Run(plan=plan, bundle=self.bundle)


@pytest.fixture
def place(tmp_path, logistic):
    return Place(private_directory(tmp_path / "d"), logistic(4, 3))


def test_samples_are_read_once_a_task(place):
    """A restart must not move test samples into the training share; a new run gets sessions of its own."""
    assert place.factory.follow(place.run()) == 24
    np.testing.assert_array_equal(shares(place).test.x, split(place.data, b"reef/dev-1").test.x)
    first = place.factory._context_of
    assert place.backends == [(place.bundle, 3)]
    place.data = Dataset(*samples(10))
    assert place.factory.follow(place.run(run=2)) == 24
    assert (place.loads, len(place.backends)) == (1, 2)
    assert place.factory._context_of.keywords["backend"] is not first.keywords["backend"]
    assert place.factory.follow(place.run(task_digest=b"o" * 32)) == 6
    assert place.loads == 2


def test_unfit_samples_leave_the_earlier_run(place):
    """Samples that do not fit leave the run before in force."""
    place.factory.follow(place.run())
    before = place.factory._context_of

    def fail(manifest):
        raise DataError("bad.csv, line 3")

    place.factory._load_data = fail
    with pytest.raises(DataError):
        place.factory.follow(place.run(run=2, task_digest=b"o" * 32))
    assert place.factory._context_of is before


def test_finished_model_must_beat_majority(place, finish):
    """A finished model is compared with the most common label."""
    assert not place.factory.doubts_model(None)
    place.factory.follow(place.run())
    task, labels = place.bundle.digest, place.factory._shares[1].validation.y
    common = int(np.unique(labels, return_counts=True)[1].max())
    for right, task_of, doubted in ((common, task, True), (common + 1, task, False), (common, b"another", False)):
        model = SimpleNamespace(task=task_of, validation=Validation(0.5, right, len(labels), len(labels)))
        assert place.factory.doubts_model(model) == doubted
    assert not place.factory.doubts_model(SimpleNamespace(task=task, validation=UNMEASURED)), "as for regression"


# ----------------------------------------------------------------------------------------------------- final round


def theta(place, loss):
    return np.full(place.bundle.length, loss, np.float32)


def add(place, run, bundle=None):
    """Store a finished model of an earlier run whose loss is its run's number."""
    bundle = bundle or place.bundle
    own = OwnModel(run, bytes([run]) * 16, 9, 0, np.full(bundle.length, float(run), np.float32))
    figures = {own.run_id: Validation(9.0, 0, 1, 1)}
    store = FinishedModels(place.member.directory)
    store.add(own, [], bundle, algorithm="fedavg", at_s=run, figures=figures)
    return own.run_id


@pytest.fixture
def finish(place, monkeypatch):
    """Return a function that does a final round in which model 3 of loss 0.5 was chosen."""

    def carry_out(context, announced, assignment, models, cancelled):
        return Finished(pieces=(), model=3, loss=0.5, correct=1, tested=2)

    monkeypatch.setattr(jobs, "carry_out", carry_out)

    def run(**changes):
        place.factory.follow(place.run(**changes))
        job = place.factory.job(
            announcement(finished=True), TRAINING, {3: theta(place, 0.5), 4: theta(place, 7.0)}, Models()
        )
        return job(lambda: False)

    return run


def test_earlier_models_are_measured_again(place, finish, logistic):
    """A final round measures the chosen model and earlier ones of the task on the same samples of the validation share."""
    earlier = add(place, 2)
    add(place, 3, logistic(4, 2))
    done = finish()
    assert (done.model, done.tested) == (3, 2)
    assert done.validation == {FINAL_ID: Validation(0.5, 4, 8, 8), earlier: Validation(2.0, 4, 8, 8)}


def test_unreadable_model_is_unmeasured(place, finish, caplog):
    """An earlier model or a list that can't be read stops no final round."""
    earlier = add(place, 2)
    for path in (place.member.directory / "finished").glob("model-*"):
        path.write_bytes(b"junk")
    assert finish().validation == {FINAL_ID: Validation(0.5, 4, 8, 8), earlier: UNMEASURED}
    assert "a finished model can't be used" in caplog.text
    (place.member.directory / "finished" / "list.bin").write_bytes(b"junk")
    assert set(finish().validation) == {FINAL_ID}


def test_model_of_run_is_measured_once(place, finish):
    """The final round may be done again after a restart."""
    own = OwnModel(1, FINAL_ID, 9, 3, theta(place, 9.0))
    store = FinishedModels(place.member.directory)
    store.add(own, [], place.bundle, algorithm="fedavg", at_s=1, figures={FINAL_ID: Validation(9.0, 0, 1, 1)})
    assert finish().validation == {FINAL_ID: Validation(0.5, 4, 8, 8)}


def test_other_rounds_measure_nothing(place, finish):
    add(place, 2)
    place.factory.follow(place.run())
    job = place.factory.job(announcement(), TRAINING, {3: theta(place, 0.5)}, Models())
    assert job(lambda: False).validation == {}


def test_job_belongs_to_its_run_and_round(place, monkeypatch):
    """The next run may begin while it waits for the worker. Data that are not watched are read once."""
    seen = []
    monkeypatch.setattr(jobs, "carry_out", lambda context, *_: seen.append(context))
    place.factory.follow(place.run())
    job = place.factory.job(announcement(nonce=b"a" * 16), TRAINING, {}, Models())
    place.factory.follow(place.run(run=2))
    other = place.factory.job(announcement(nonce=b"b" * 16), TRAINING, {}, Models())
    for each in (job, other):
        each(lambda: False)
    assert [context.plan.run for context in seen] == [1, 2]
    assert [context.round for context in seen] == [(b"a" * 16, TRAINING), (b"b" * 16, TRAINING)]
    assert seen[0].shares is seen[1].shares
    assert place.loads == 1


def test_regression_has_a_loss_and_no_count(place, finish):
    label = TensorSpec((), "float32")
    regression = dataclasses.replace(place.bundle.manifest, kind="regression", label=label)
    place.bundle = dataclasses.replace(place.bundle, manifest=regression)
    assert finish().validation == {FINAL_ID: Validation(0.5, 0, 0, 8)}


def test_private_values_are_stored_by_round(tmp_path):
    """Private values are stored by round and join the models."""
    from tests.helpers.tasks import logistic_bundle

    place = Place(private_directory(tmp_path / "d"), logistic_bundle(private=[1.0, 2.0, 3.0]))
    place.factory.follow(place.run())
    thetas = {2: np.zeros(12, np.float32)}
    done = SimpleNamespace(private=np.full(3, 7.0, np.float32))
    assert place.factory.keep_private(SimpleNamespace(round=4), done, thetas)[2].tolist() == [0.0] * 12 + [7.0] * 3
    # An assignment without training leaves them, and so does a restart.
    place.factory.follow(place.run())
    untrained = SimpleNamespace(private=None)
    assert place.factory.keep_private(SimpleNamespace(round=5), untrained, thetas)[2].tolist()[12:] == [7.0] * 3


# ------------------------------------------------------------------------------------------------- standardisation


@pytest.fixture
def scaled(tmp_path, logistic):
    """A place whose task standardises, with features of very different size."""
    bundle = logistic(4, 3)
    declared = dataclasses.replace(bundle.manifest, data=DataDeclaration(standardise="local", missing="mean"))
    place = Place(private_directory(tmp_path / "d"), dataclasses.replace(bundle, manifest=declared))
    x, y = samples(40)
    x = x * np.array([1, 1000, 0, 1], np.float32) + np.float32(5)
    x[3, 3] = np.nan
    place.data = Dataset(x, y)
    return place


def restarted(place, factor=1):
    """Return the place after a restart in which the samples are so many times larger."""
    again = Place(place.member.directory, place.bundle)
    again.data = Dataset(place.data.x * np.float32(factor), place.data.y)
    again.factory.follow(again.run())
    return again


def shares(place):
    return place.factory._context_of.keywords["shares"]


def test_samples_take_training_shares_scale(scaled):
    """A task that standardises trains on samples in the scale with which the run began, that of the training share."""
    scaled.factory.follow(scaled.run())
    raw = split(scaled.data, b"reef/dev-1")
    scale = Scales(scaled.member.directory).load(FINAL_ID)
    assert scale == local_scale(raw.train.x, FINAL_ID)
    np.testing.assert_array_equal(shares(scaled).test.x, standardised(raw.test.x, scale))
    assert np.isfinite(shares(scaled).train.x).all()
    same = "value 2 has the same value in every sample"
    assert [doubt.partition(":")[0] for doubt in scaled.factory.doubts] == [same]
    again = restarted(scaled, factor=2)
    assert Scales(scaled.member.directory).load(FINAL_ID) == scale
    np.testing.assert_array_equal(shares(again).train.x, standardised(split(again.data, b"reef/dev-1").train.x, scale))


def test_a_damaged_scale_is_made_again(scaled, caplog):
    scaled.factory.follow(scaled.run())
    (path,) = (scaled.member.directory / "scales").iterdir()
    path.write_bytes(b"junk")
    restarted(scaled)
    assert "a run's scale is lost" in caplog.text
    assert Scales(scaled.member.directory).load(FINAL_ID) is not None


def test_each_run_has_its_scale(scaled):
    """Each run has a scale as long as its model may answer."""
    scaled.factory.follow(scaled.run())
    earlier = add(scaled, 2)
    Scales(scaled.member.directory).save(Scale(earlier, (0.0,) * 4, (1.0,) * 4))
    scaled.factory.follow(scaled.run(run=3, run_id=b"n" * 16))
    found = Scales(scaled.member.directory)
    assert [found.load(run_id) is None for run_id in (FINAL_ID, earlier, b"n" * 16)] == [True, False, False]
    assert scaled.loads == 1


def test_earlier_model_has_its_own_scale(scaled, monkeypatch):
    """An earlier model is measured in its own scale."""
    seen = []
    monkeypatch.setattr(Backend, "score", lambda *given: seen.append(given[2]) or Score(1.0, 0, 1))
    earlier = add(scaled, 2)
    other = Scale(earlier, (1.0, 2.0, 3.0, 4.0), (2.0, 2.0, 2.0, 2.0))
    Scales(scaled.member.directory).save(other)
    monkeypatch.setattr(jobs, "carry_out", lambda *_: Finished(pieces=(), model=3, loss=0.5, correct=0, tested=0))
    scaled.factory.follow(scaled.run())
    job = scaled.factory.job(announcement(finished=True), TRAINING, {3: theta(scaled, 0.5)}, Models())
    done = job(lambda: False)
    raw = split(scaled.data, b"reef/dev-1").validation.x
    np.testing.assert_allclose(seen[1], standardised(raw, other), rtol=1e-3, atol=1e-3)
    assert "most common label" in done.doubts[0]


# --------------------------------------------------------------------------------------------- federated statistics


BOUNDS = DataDeclaration(features=tuple("abcd"), low=(-9.0,) * 4, high=(9e3,) * 4, standardise="federated")
ASKED = dataclasses.replace(TRAINING, phase=Phase.STATISTICS, candidates=(STATISTICS_MODEL,))


class Offering(Models):
    """Models of a round that offers the fleet's mean of statistics, or does not, and perhaps those of single models."""

    def __init__(self, mean=None, own=None):
        means = {STATISTICS_MODEL: mean} | {statistics_model(model): value for model, value in (own or {}).items()}

        def statistics(_announced, model):
            of = statistics_model(model) if statistics_model(model) in means else STATISTICS_MODEL
            if means[of] is None:
                return None
            return ModelState.of(StateId(of, 1), means[of].copy(), run_id=FINAL_ID, digest_key=bytes(32))

        self.statistics = statistics


@pytest.fixture
def bounded(scaled):
    """A place whose task standardises with the fleet's figures."""
    declared = dataclasses.replace(scaled.bundle.manifest, data=BOUNDS)
    scaled.bundle = dataclasses.replace(scaled.bundle, manifest=declared)
    scaled.data = Dataset(np.nan_to_num(scaled.data.x), scaled.data.y)
    return scaled


def raw_share(place):
    return split(place.data, b"reef/dev-1").train.x


def test_statistics_are_of_training_share(bounded, monkeypatch):
    """Statistics are those of the training share."""
    monkeypatch.setattr(jobs, "report_statistics", lambda *given: given[3])
    bounded.factory.follow(bounded.run())
    before = {STATISTICS_MODEL: np.full(15, 0.25, np.float32)}
    vector = bounded.factory.job(announcement(), ASKED, before, Offering())(lambda: False)
    np.testing.assert_array_equal(vector, statistics_of(raw_share(bounded), BOUNDS, 15) - 0.25)
    assert bounded.factory.shares_of(bounded.bundle.digest) is None


def test_fleets_mean_becomes_the_runs_scale(bounded, monkeypatch):
    """The fleets mean becomes the scale of the run, and each run has statistics of its own."""
    mean = statistics_of(raw_share(bounded), BOUNDS, 15)
    bounded.factory.follow(bounded.run())
    bounded.factory.job(announcement(round=2), TRAINING, {}, Offering(mean))
    scale = Scales(bounded.member.directory).load(FINAL_ID)
    assert scale == scale_from(mean, BOUNDS, FINAL_ID)
    np.testing.assert_array_equal(shares(bounded).train.x, standardised(raw_share(bounded), scale))
    bounded.factory.job(announcement(round=3), TRAINING, {}, Offering())
    again = restarted(bounded)
    again.factory.job(announcement(round=3), TRAINING, {}, Offering())
    np.testing.assert_array_equal(shares(again).train.x, shares(bounded).train.x)
    # The round is repeated if its model is lost: the samples in their own units are read again.
    monkeypatch.setattr(jobs, "report_statistics", lambda *given: given[3])
    zero = {STATISTICS_MODEL: np.zeros(15, np.float32)}
    np.testing.assert_array_equal(again.factory.job(announcement(), ASKED, zero, Offering())(lambda: False), mean)
    bounded.factory.follow(bounded.run(run=2, run_id=b"n" * 16))
    np.testing.assert_array_equal(shares(bounded).train.x, raw_share(bounded))
    assert bounded.loads == 2


def test_each_model_has_its_own_scale(bounded, monkeypatch):
    fleet = statistics_of(raw_share(bounded), BOUNDS, 15)
    cluster = fleet.copy()
    cluster[:4] -= np.float32(0.001)
    offered = Offering(fleet, {5: cluster})
    seen = []
    monkeypatch.setattr(jobs, "carry_out", lambda context, *_: seen.append(context))
    order = dataclasses.replace(TRAINING, candidates=(0, 5))
    bounded.factory.follow(bounded.run())
    bounded.factory.job(announcement(round=2), order, {}, offered)(lambda: False)
    for model, mean in ((0, fleet), (5, cluster)):
        scale = scale_from(mean, BOUNDS, FINAL_ID, of_cluster=model == 5)
        np.testing.assert_array_equal(seen[0].samples_for(model).train.x, standardised(raw_share(bounded), scale))
    # A device that moves to another cluster takes that one's scale.
    bounded.factory.job(announcement(round=3), dataclasses.replace(order, candidates=(5,)), {}, offered)
    assert Scales(bounded.member.directory).load(FINAL_ID) == scale
    np.testing.assert_array_equal(shares(bounded).train.x, standardised(raw_share(bounded), scale))


def test_no_training_before_statistics(bounded):
    """Nothing is trained before the statistics are there."""
    bounded.factory.follow(bounded.run())
    with pytest.raises(IntegrityError, match="are not in this round"):
        bounded.factory.job(announcement(), TRAINING, {}, Offering())


def test_a_task_without_them_gives_none(place):
    place.factory.follow(place.run())
    with pytest.raises(UntrustedError, match="which the task does not need"):
        place.factory.job(announcement(), ASKED, {}, Offering())


# ---------------------------------------------------------------------------------------------------------- watch


@pytest.fixture
def watched(scaled, tmp_path, monkeypatch):
    """A place whose data are a table that may grow, and the shares that each of its jobs sees."""
    path = tmp_path / "d.csv"
    path.write_text("\n".join(rows(40)))
    scaled.path, scaled.seen = path, []
    scaled.factory = JobFactory(
        scaled.member, lambda task: load(path, task), threads=1, backend=scaled.make_backend, watch=watch_of(path)
    )
    monkeypatch.setattr(jobs, "carry_out", lambda context, *_: scaled.seen.append(context.shares))
    return scaled


def rows(n, seed=0):
    x, y = samples(n, seed=seed)
    return [",".join(map(str, (*row, label))) for row, label in zip((x * 100).tolist(), y.tolist(), strict=True)]


def do_job(place, round_=1):
    place.factory.job(announcement(round=round_), TRAINING, {}, Models())(lambda: False)
    return place.seen[-1]


@pytest.fixture
def first(watched):
    """The shares of the first job of the place that is watched."""
    watched.factory.follow(watched.run())
    return do_job(watched)


def test_files_that_have_grown(watched):
    """By their bytes since the samples were read; files that are gone have not grown."""
    assert not watched.factory.has_grown(1), "nothing is read yet"
    watched.factory.follow(watched.run())
    assert not watched.factory.has_grown(1)
    watched.path.write_text("\n".join([*rows(40), *rows(10, seed=1)]))
    assert watched.factory.has_grown(20)
    assert not watched.factory.has_grown(40)
    watched.path.unlink()
    assert not watched.factory.has_grown(20)


def test_appended_rows_count_next_round(watched, first):
    """Rows that were appended count in the next round."""
    scale = Scales(watched.member.directory).load(FINAL_ID)
    watched.path.write_text("\n".join([*rows(40), *rows(10, seed=1)]))
    second = do_job(watched, 2)
    assert (len(first.train), len(second.train)) == (24, 30)
    np.testing.assert_array_equal(second.train.x[:24], first.train.x)
    assert Scales(watched.member.directory).load(FINAL_ID) == scale
    third = do_job(watched, 3)
    assert third is second, "nothing has changed since"
    assert shares(watched) is second


def reasons(caplog):
    """Return the reasons of the warnings."""
    return [str(record.kv["reason"]) for record in caplog.records if record.levelname == "WARNING"]


def test_damaged_row_is_left_out_until_whole(watched, first):
    """A damaged row is left out until it is whole."""
    watched.path.write_text("\n".join([*rows(40), "1,2"]))
    again = do_job(watched, 2)
    assert again.train.x.tolist() == first.train.x.tolist()
    watched.factory._adopt()
    assert (watched.factory.left_out.count, watched.factory.left_out.samples) == (1, 41)
    assert "line 41: 2 columns instead of 5" in watched.factory.left_out.first
    watched.path.write_text("\n".join([*rows(40), *rows(5, seed=2)]))
    assert len(do_job(watched, 3).train) == 27
    watched.factory._adopt()
    assert watched.factory.left_out.count == 0


def test_many_damaged_rows_change_nothing(watched, first, caplog):
    """Too many damaged rows leave the samples as they are."""
    watched.path.write_text("\n".join([*rows(40), *["1,2"] * 4]))
    assert do_job(watched, 2) is first
    assert "line 41: 2 columns instead of 5" in reasons(caplog)[-1]
    assert do_job(watched, 3) is first
    assert len(reasons(caplog)) == 1
    watched.path.write_text("\n".join([*rows(40), *rows(5, seed=2)]))
    assert len(do_job(watched, 4).train) == 27


def test_vanished_data_change_nothing(watched, first, caplog, monkeypatch):
    """Data that have gone or grown too large leave the samples as they are."""
    monkeypatch.setattr(device_data, "MAX_WATCHED_BYTES", 10)
    watched.path.write_text("\n".join(rows(80)))
    assert do_job(watched, 2) is first
    assert "more than the 10 that are read again" in reasons(caplog)[-1]
    watched.path.unlink()
    assert do_job(watched, 3) is first
    assert "the data can't be watched" in caplog.text


def test_next_run_takes_a_scale_of_its_data(watched, first):
    """The next run of a task takes a scale of the data as they are then."""
    watched.path.write_text("\n".join([*rows(40), *("9e4,9e4,9e4,9e4,1",) * 10]))
    watched.factory.follow(watched.run(run=2, run_id=b"n" * 16))
    assert Scales(watched.member.directory).load(b"n" * 16).means[0] > 1e4
    assert (len(first.train), len(do_job(watched).train)) == (24, 30)
