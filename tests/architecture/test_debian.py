"""The builder of the Debian packages: the files of a package, its dependencies and its scripts, without a registry."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.helpers.debian import load_builder
from tests.helpers.trees import ROOT

BUILD = load_builder()
PACKAGES = {package.name: package for package in BUILD.PACKAGES}
SERVICES = [name for name, package in PACKAGES.items() if package.unit is not None]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return BUILD.build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory, wheel):
    """Return a function name -> root of a package, made once."""
    return functools.cache(lambda name: lay_out(name, wheel, tmp_path_factory.mktemp(name)))


def lay_out(name, wheel, folder):
    """Return the root of a package with our wheel and small files in place of the libraries."""
    package, site, root = PACKAGES[name], folder / "site", folder / "root"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for file in ("numpy/__init__.py", "numpy/tests/test_a.py", "numpy/__init__.pyi", "bin/f2py", "numpy/lib/x.h"):
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_text("x = 1\n")
    library = site / "onnxruntime/capi"
    library.mkdir(parents=True)
    for file in ("libonnxruntime.so.1.32.0", "onnxruntime_pybind11_state.so"):
        (library / file).write_bytes(b"\x7fELF")
    if package.dockerfile is not None:
        BUILD.keep_parts(site, wheel, BUILD.parts(package.dockerfile))
    BUILD.prune(site)
    BUILD.lay_out(package, site, root)
    BUILD.write_control(package, "amd64", root)
    BUILD.set_modes(root, BUILD.SECOND_1980)
    return root


def site_of(name, root):
    return root / PACKAGES[name].home / "lib" / f"python{BUILD.PYTHON}" / "site-packages"


def control(root):
    lines = (root / "DEBIAN/control").read_text().splitlines()
    return dict(line.split(": ", 1) for line in lines if not line.startswith(" "))


@pytest.mark.parametrize("name", PACKAGES)
def test_program_starts_with_systems_python(laid_out, name):
    """A package starts its program with the python of the system."""
    root = laid_out(name)
    home, program = root / PACKAGES[name].home, PACKAGES[name].program
    assert str((home / "bin/python3").readlink()) == "/usr/bin/python3"
    assert (home / "bin" / program).read_text().startswith(f"#!/opt/{program}/bin/python3\n")
    assert (home / "bin" / program).stat().st_mode & 0o777 == 0o755
    assert str((root / "usr/bin" / program).readlink()) == f"/opt/{program}/bin/{program}"
    assert "home = /usr/bin\n" in (home / "pyvenv.cfg").read_text()


def test_package_depends_on_one_python(laid_out):
    """A package depends on the one python that its libraries fit."""
    minor = sys.version_info.minor
    fields = control(laid_out("shoal-edge"))
    needs = fields["Depends"].split(", ")
    assert f"python3 (>= 3.{minor}~)" in needs
    assert f"python3 (<< 3.{minor + 1}~)" in needs
    assert "libc6 (>= 2.28)" in needs
    assert fields["Conflicts"] == fields["Replaces"] == "shoal-edge-lite"
    assert int(fields["Installed-Size"]) > 1000


@pytest.mark.parametrize(
    ("name", "there", "not_there"),
    [
        ("shoal-edge", ["edge_client", "crypto/mask", "shoal/task"], ["aggregator", "shoal/owner", "shoal/simulation"]),
        (
            "shoal-aggregator",
            ["aggregator", "crypto/seal"],
            ["crypto/mask", "edge_client", "shoal/owner", "shoal/task"],
        ),
        ("shoal-fleet", ["shoal/owner", "crypto/mask"], []),
    ],
)
def test_package_has_code_of_its_party_alone(laid_out, name, there, not_there):
    site = site_of(name, laid_out(name))
    assert [part for part in there if not (site / part).is_dir()] == []
    assert [part for part in not_there if (site / part).exists()] == []


def test_what_no_program_needs_is_left_out(laid_out):
    site = site_of("shoal-edge", laid_out("shoal-edge"))
    for file in ("numpy/tests", "numpy/__init__.pyi", "numpy/lib", "bin", "onnxruntime/capi/libonnxruntime.so.1.32.0"):
        assert not (site / file).exists(), file
    assert (site / "onnxruntime/capi/onnxruntime_pybind11_state.so").exists()
    assert list((site / "edge_client/__pycache__").glob("cli.*.pyc"))


@pytest.mark.parametrize("name", SERVICES)
def test_service_has_the_packages_paths(laid_out, name):
    """A service is that of the repository with the packages paths."""
    root, package = laid_out(name), PACKAGES[name]
    text = (root / "lib/systemd/system" / package.unit.name).read_text()
    ours = package.unit.read_text()
    assert f"ExecStart=/opt/{package.program}/bin/{package.program} " in text
    assert "/opt/shoal/" not in text
    assert len(text.splitlines()) == len(ours[ours.index("[Unit]") :].splitlines())
    settings = root / "etc/shoal" / f"{package.party}.env"
    assert settings.stat().st_mode & 0o777 == 0o600
    assert f"/etc/shoal/{package.party}.env" in text
    assert (root / "DEBIAN/conffiles").read_text() == f"/etc/shoal/{package.party}.env\n"


@pytest.mark.parametrize("name", SERVICES)
def test_scripts_are_shell_and_name_the_user(laid_out, name):
    """The scripts of a service are shell and name its user."""
    root = laid_out(name)
    for script in BUILD.SCRIPTS:
        file = root / "DEBIAN" / script
        assert subprocess.run(["sh", "-n", str(file)], check=False).returncode == 0
        assert file.stat().st_mode & 0o777 == 0o755
        assert "@" not in file.read_text()
    assert PACKAGES[name].program in (root / "DEBIAN/postinst").read_text()


def test_the_owners_package_has_no_service(laid_out):
    root = laid_out("shoal-fleet")
    assert sorted(path.name for path in (root / "DEBIAN").iterdir()) == ["control"]
    assert not (root / "etc").exists()


def test_wheels_fit_the_packages_glibc():
    """Wheels fit the glibc that the packages ask for."""
    names = BUILD.platforms("aarch64")
    assert names[0] == "manylinux_2_28_aarch64"
    assert names[-1] == "manylinux2014_aarch64"


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb is not installed")
def test_equal_inputs_give_equal_packages(laid_out, wheel, tmp_path):
    first, second = tmp_path / "1.deb", tmp_path / "2.deb"
    BUILD.pack(laid_out("shoal-edge"), first)
    BUILD.pack(lay_out("shoal-edge", wheel, tmp_path / "again"), second)
    assert first.read_bytes() == second.read_bytes()


def test_repository_has_what_package_copies():
    for package in PACKAGES.values():
        assert package.program in BUILD.PROJECT["scripts"]
        assert package.extra in BUILD.PROJECT["optional-dependencies"]
        assert package.dockerfile is None or (ROOT / "deploy/docker" / package.dockerfile).exists()
