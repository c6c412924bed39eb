"""ifca-rotated-mnist and ifca-rotated-cifar on tiny files in the true formats."""

import gzip

import numpy as np
import pytest
from shoal_lab.experiments.common.experiment import Options, Quiet
from shoal_lab.experiments.data.datasets import MissingDataError
from shoal_lab.experiments.ifca import images as ifca_images

from shoal.errors import ConfigError, UsageError

SETTINGS = {"hidden": "24", "lr": "0.03"}


def strokes(count, seed):
    """Return images (count, 28, 28), uint8, that no quarter turn leaves alone, and their labels.

    Label c is a bright row at height 2 + 2c beside a bright left edge, plus noise.
    """
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, count).astype(np.uint8)
    images = rng.integers(0, 40, (count, 28, 28))
    images[:, :, :3] += 200
    for image, label in zip(images, labels, strict=True):
        image[2 + 2 * label : 4 + 2 * label, 4:20] += 200
    return np.clip(images, 0, 255).astype(np.uint8), labels


def write_idx(path, values):
    header = bytes([0, 0, 8, values.ndim]) + b"".join(int(s).to_bytes(4, "big") for s in values.shape)
    path.write_bytes(gzip.compress(header + values.tobytes()))


@pytest.fixture(scope="module")
def mnist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mnist")
    for name, count, seed in (("train", 480, 1), ("t10k", 80, 2)):
        images, labels = strokes(count, seed)
        write_idx(folder / f"{name}-images-idx3-ubyte.gz", images)
        write_idx(folder / f"{name}-labels-idx1-ubyte.gz", labels)
    return folder


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cifar10")
    rng = np.random.default_rng(3)
    for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
        labels = rng.integers(0, 10, (12, 1), np.uint8)
        images = rng.integers(0, 256, (12, 3 * 32 * 32), np.uint8)
        (folder / name).write_bytes(np.concatenate([labels, images], 1).tobytes())
    return folder


def mnist_run(folder, algorithm="ifca", *, seed=0, mask="none", rounds=14, settings=None):
    options = Options(
        algorithm=algorithm,
        devices=12,
        samples=40,
        rounds=rounds,
        seed=seed,
        mask=mask,
        data_dir=folder,
        settings={**SETTINGS, **(settings or {})},
    )
    return ifca_images.rotated_mnist(options, Quiet()).data()


@pytest.fixture(scope="module")
def both(mnist):
    """The same run in the clear and masked."""
    return {mask: mnist_run(mnist, mask=mask) for mask in ("none", "permutation")}


@pytest.mark.slow
def test_rotations_are_found_and_the_kept_starts_rounds_are_the_history(both):
    data = both["permutation"]
    assert data["purity"] == 1
    assert [h["round"] for h in data["history"]] == list(range(1, 15))
    assert len(data["starts"]) == 6
    losses = [s["loss"] for s in data["starts"]]
    assert data["start_kept"] == losses.index(min(losses))
    assert data["restart_rounds"] == 50
    assert data["identity_test"]["purity"] == 1
    assert 1 <= data["pure_from_round"] <= 12
    assert data["accuracy"] > 90


def test_masked_and_clear_runs_agree(both):
    clear, masked = both["none"], both["permutation"]
    assert abs(clear["accuracy"] - masked["accuracy"]) <= 0.1
    assert clear["start_kept"] == masked["start_kept"]
    assert [h["sizes"] for h in clear["history"]] == [h["sizes"] for h in masked["history"]]


def test_one_model_for_all_does_worse_than_clusters(mnist, both):
    data = mnist_run(mnist, "global")
    assert data["clusters"] == 1
    assert data["accuracy"] < both["none"]["accuracy"] - 5
    assert data["parameters"]["weighting"] == "uniform"


def test_a_short_run_has_fewer_rounds_a_start(mnist):
    data = mnist_run(mnist, rounds=3)
    assert data["parameters"]["settings"]["restart_rounds"] == "2"
    assert len(data["history"]) == 3
    single = mnist_run(mnist, rounds=1)
    assert "starts" not in single
    assert len(single["history"]) == 1


def test_local_devices_are_tested_on_their_own_rotation(mnist):
    """A device's accuracy is that of its own model on all test images of its angle, and of no other."""
    data = mnist_run(mnist, "local", rounds=5)
    assert data["clusters"] == 12
    assert data["accuracy"] > 30
    assert data["parameters"]["mask"] == "nothing leaves a device"
    assert data["published"] == ifca_images.MNIST_PUBLISHED["local"]


@pytest.mark.parametrize("algorithm", ["ifca", "global", "local"])
def test_the_same_seed_gives_the_same_result(mnist, algorithm):
    runs = [mnist_run(mnist, algorithm, rounds=4, settings={"hidden": "6"}) for _ in range(2)]
    assert runs[0]["accuracy"] == runs[1]["accuracy"]
    assert [h["loss"] for h in runs[0]["history"]] == [h["loss"] for h in runs[1]["history"]]


def test_the_papers_sizes_are_the_defaults():
    assert ifca_images.sizes(Options(), 240_000, 1200) == (1200, 200)
    assert ifca_images.sizes(Options(devices=4800), 240_000, 1200) == (4800, 50)
    assert ifca_images.sizes(Options(samples=100), 240_000, 1200) == (2400, 100)
    assert ifca_images.sizes(Options(devices=120, samples=200), 240_000, 1200) == (120, 200)
    with pytest.raises(UsageError, match="7 does not divide"):
        ifca_images.sizes(Options(devices=7), 240_000, 1200)


def test_unknown_settings_are_refused(mnist):
    with pytest.raises(UsageError, match="colour"):
        mnist_run(mnist, "global", settings={"colour": "red"})
    with pytest.raises(ConfigError, match="colour"):
        mnist_run(mnist, settings={"colour": "red"})


@pytest.mark.parametrize("run", [ifca_images.rotated_mnist, ifca_images.rotated_cifar])
def test_absent_data_exits_with_8_and_a_hint(run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SHOAL_DATA_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingDataError, match="is missing") as caught:
        run(Options(data_dir=tmp_path), Quiet())
    assert caught.value.exit_code == 8
    assert caught.value.hint


@pytest.mark.parametrize("algorithm", ["ifca", "global", "local"])
def test_cifar_runs_on_files_of_the_true_format(cifar, algorithm):
    settings = {"filters": "2", "dense": "4", "evaluate_every": "1", "lr": "0.05"}
    options = Options(
        algorithm=algorithm,
        devices=20,
        samples=6,
        rounds=2,
        seed=0,
        mask="permutation",
        data_dir=cifar,
        settings=settings,
    )
    data = ifca_images.rotated_cifar(options, Quiet()).data()
    assert data["published"] == ifca_images.CIFAR_PUBLISHED[algorithm]
    assert 0 <= data["accuracy"] <= 100
    assert data["parameters"]["participation"] == 0.1
    assert data["parameters"]["lr_decay"] == 0.99
    assert (data["parameters"]["epochs"], data["parameters"]["batch_size"]) == (5, 50)


def test_the_papers_cifar_network_has_its_size(cifar):
    """Two convolutions of 64 filters, then 384 and 192 units: 64 maps of 8 x 8 reach the first dense layer."""
    options = Options(
        algorithm="global", devices=20, samples=6, rounds=1, seed=0, mask="none", data_dir=cifar, settings={}
    )
    data = ifca_images.rotated_cifar(options, Quiet()).data()
    convolutions = 64 * 3 * 25 + 64 + 64 * 64 * 25 + 64
    dense = 64 * 8 * 8 * 384 + 384 + 384 * 192 + 192 + 192 * 10 + 10
    assert data["parameters"]["coordinates"] == convolutions + dense


@pytest.mark.parametrize("text", ["", "a", "3,", "0"])
def test_a_list_of_sizes_is_one(text):
    with pytest.raises(UsageError, match="no list"):
        ifca_images.counts(text)
