"""`make release`: the same bytes from the same commit, notes and checksums, and a reason where nothing is built."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

from deploy.release import make
from deploy.release.make import ReleaseError, notes_of, release, version_of
from shoal.version import VERSION
from tests.helpers.documents import blocks
from tests.helpers.trees import ROOT

CHANGELOG = """# Changelog

## [1.2.3] - 2026-11-23

### Added

- A thing.

## [1.2.2] - 2026-10-01

- Older.
"""
PYPROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "shoal"
dynamic = ["version"]
requires-python = ">=3.11"
license = "Apache-2.0"
dependencies = ["all-have"]

[project.optional-dependencies]
edge = ["device-has"]
aggregator = ["aggregator-has"]
fleet = ["device-has"]
bench = ["not-to-be-had"]

[tool.hatch.version]
path = "shoal/version.py"
pattern = 'VERSION: Final = "(?P<version>[^"]+)"'

[tool.hatch.build.targets.wheel]
packages = ["shoal"]
"""
LAB = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "shoal-lab"
version = "1.2.3"
requires-python = ">=3.11"

[tool.hatch.build.targets.wheel]
packages = ["shoal_lab"]
"""


IN_THE_LOCK = ("all-have", "device-has", "it-needs")


def git(root, *arguments):
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *author, *arguments], cwd=root, check=True, capture_output=True)


def commit(root):
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "all")


def write_version(root, version):
    (root / "shoal/version.py").write_text(f'VERSION: Final = "{version}"\n')


def wheel(folder, name, *requires):
    """Write a wheel of no modules, which pip can install."""
    info = f"{name.replace('-', '_')}-1.0"
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{info}-py3-none-any.whl", "w") as archive:
        head = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nLicense-Expression: MIT\n"
        archive.writestr(f"{info}.dist-info/METADATA", head + "".join(f"Requires-Dist: {one}\n" for one in requires))
        archive.writestr(f"{info}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}.dist-info/RECORD", "")


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Return a repository with a package of one module, ready to be released as 1.2.3; pip finds what it requires."""
    for name, *requires in (("all-have",), ("device-has", "it-needs"), ("it-needs",), ("aggregator-has",)):
        wheel(tmp_path / "wheels", name, *requires)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    made = tmp_path / "repository"
    for module in ("shoal", "lab/shoal_lab"):
        (made / module).mkdir(parents=True)
        (made / module / "__init__.py").touch()
    (made / "pyproject.toml").write_text(PYPROJECT)
    (made / "lab/pyproject.toml").write_text(LAB)
    (made / "deploy/locks").mkdir(parents=True)
    wheels = {name: digest(tmp_path / f"wheels/{name.replace('-', '_')}-1.0-py3-none-any.whl") for name in IN_THE_LOCK}
    pins = [f"{name}==1.0 --hash=sha256:{one}\n" for name, one in wheels.items()]
    (made / "deploy/locks/edge.txt").write_text("".join(pins))
    monkeypatch.setattr(make, "PARTIES", ("edge",))  # seconds each
    monkeypatch.setattr(make, "ARCHITECTURES", ())  # tests/architecture/test_debian.py looks into packages
    (made / "CHANGELOG.md").write_text(CHANGELOG)
    (made / ".gitignore").write_text("*.secret\n")
    write_version(made, "1.2.3")
    git(made, "init", "--quiet")
    commit(made)
    return made


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.slow
def test_release_has_all_parts(root, tmp_path):
    """A release has archives notes dependencies and checksums."""
    pytest.importorskip("cyclonedx_py")
    (root / "shoal/keys.secret").write_text("ignored by git, and so in no archive")
    files = {path.name: path for path in release(root, tmp_path / "dist")}
    names = [f"shoal-1.2.3{end}" for end in ("-py3-none-any.whl", ".md", ".tar.gz")]
    names += ["shoal-edge-1.2.3.cdx.json", "shoal_lab-1.2.3-py3-none-any.whl"]
    assert sorted(files) == ["SHA256SUMS", *names]
    assert files["SHA256SUMS"].read_text() == "".join(f"{digest(files[name])}  {name}\n" for name in names)
    assert files["shoal-1.2.3.md"].read_text() == "# Shoal 1.2.3\n\n### Added\n\n- A thing.\n"
    found = json.loads(files["shoal-edge-1.2.3.cdx.json"].read_bytes())
    assert {one["name"] for one in found["components"]} == {"all-have", "device-has", "it-needs"}
    (one,) = [one for one in found["components"] if one["name"] == "it-needs"]
    assert (one["version"], one["purl"]) == ("1.0", "pkg:pypi/it-needs@1.0")
    assert one["licenses"][0]["license"]["id"] == "MIT"
    arrows = {one["ref"]: one.get("dependsOn", []) for one in found["dependencies"]}
    assert arrows["device-has==1.0"] == ["it-needs==1.0"]
    product = found["metadata"]["component"]
    assert (product["name"], product["version"]) == ("shoal", "1.2.3")
    assert arrows[product["bom-ref"]] == ["all-have==1.0", "device-has==1.0"]
    assert "file://" not in json.dumps(found), "a folder of this machine"
    with pytest.raises(ReleaseError, match=r"1\.2\.3 exists: move it away"):
        release(root, tmp_path / "dist")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_builds_of_this_tree_are_equal(tmp_path, monkeypatch):
    """In folders of other names, under another umask and another clock zone; pip fetches what a device is installed with."""
    pytest.importorskip("cyclonedx_py")
    monkeypatch.setattr(make, "PARTIES", ("edge",))
    monkeypatch.setattr(make, "ARCHITECTURES", ())
    here = tmp_path / "repository"
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout.split(b"\0")
    for name in filter(None, map(os.fsdecode, names)):
        if (ROOT / name).exists() and not name.startswith("results/"):
            (here / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, here / name)
    for name in ("shoal/version.py", "lab/pyproject.toml"):
        (here / name).write_text((here / name).read_text().replace(VERSION, "99.0.0"))
    (here / "CHANGELOG.md").write_text("## [99.0.0] - 2026-11-23\n\n- All.\n")
    git(here, "init", "--quiet")
    commit(here)
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    there = tmp_path / "another" / "clone"
    git(tmp_path, "clone", "--quiet", str(here), str(there))
    first = {path.name: digest(path) for path in release(here, tmp_path / "first")}
    before = os.umask(0o077)
    try:
        second = {path.name: digest(path) for path in release(there, tmp_path / "second")}
    finally:
        os.umask(before)
    assert first == second
    assert len(first) == 6


def test_a_changed_tree_is_not_released(root, tmp_path):
    (root / "shoal/new.py").touch()
    with pytest.raises(ReleaseError, match=r"changes that are in no commit: shoal/new\.py; commit or remove them"):
        release(root, tmp_path)


def test_released_version_is_not_built_again(root, tmp_path):
    git(root, "tag", "v1.2.3")
    with pytest.raises(ReleaseError, match=r"1\.2\.3 is released: there is a tag v1\.2\.3"):
        release(root, tmp_path)


@pytest.mark.parametrize("version", ["1.2.4.dev0", "1.2", "1.2.4rc1"])
def test_development_version_is_not_released(root, version):
    write_version(root, version)
    with pytest.raises(ReleaseError, match=r"is no release: write X\.Y\.Z there"):
        version_of(root)


def test_no_version_no_release(root):
    """A tree without a version is not released."""
    (root / "shoal/version.py").write_text("")
    with pytest.raises(ReleaseError, match="has no line VERSION"):
        version_of(root)


def test_the_notes_are_the_versions_section():
    assert notes_of(CHANGELOG, "1.2.2") == "- Older.\n"


@pytest.mark.parametrize(
    ("changelog", "reason"),
    [
        ("", "has no section for 1.2.3"),
        ("## [1.2.30] - 2026-01-01\n\n- x\n", "has no section for 1.2.3"),
        ("## [1.2.3] - unreleased\n\n- x\n", "a release has its date"),
        ("## [1.2.3] - 2026-01-01\n\n## [1.2.2] - 2026-01-01\n", "says nothing of 1.2.3"),
    ],
)
def test_undated_notes_no_release(changelog, reason):
    """A version without dated notes is not released."""
    with pytest.raises(ReleaseError, match=reason):
        notes_of(changelog, "1.2.3")


@pytest.mark.slow
def test_what_can_not_be_built_says_why(root, tmp_path):
    (root / "pyproject.toml").write_text(PYPROJECT.replace('name = "shoal"', 'name = "not a name"'))
    commit(root)
    with pytest.raises(ReleaseError, match="hatchling can't build the sdist: "):
        release(root, tmp_path)


@pytest.mark.slow
def test_uninstallable_extra_no_release(root, tmp_path):
    """What a party can't install is not released."""
    (root / "pyproject.toml").write_text(PYPROJECT.replace("edge = [", 'edge = ["not-to-be-had", '))
    commit(root)
    with pytest.raises(ReleaseError, match=r"(?s)pip can't install shoal\[edge\]: .*not-to-be-had"):
        release(root, tmp_path / "dist")
    assert not (tmp_path / "dist").exists()


@pytest.mark.slow
def test_the_lab_has_the_same_version(root, tmp_path):
    (root / "lab/pyproject.toml").write_text(LAB.replace("1.2.3", "1.2.2"))
    commit(root)
    with pytest.raises(ReleaseError, match=r"lab/pyproject\.toml has another version"):
        release(root, tmp_path / "dist")


@pytest.mark.slow
def test_other_packages_no_release(root, tmp_path):
    """A package with other bytes than those that the lock names is not released."""
    lock = root / "deploy/locks/edge.txt"
    lock.write_text(re.sub(r"sha256:\w+", f"sha256:{'0' * 64}", lock.read_text(), count=1))
    commit(root)
    with pytest.raises(ReleaseError, match=r"pip can't install shoal\[edge\]"):
        release(root, tmp_path / "dist")


def test_the_page_signs_and_checks_a_release(tmp_path):
    """The commands of docs/releasing.md and docs/packages.md, with a key of the test; a changed file is found."""
    if shutil.which("ssh-keygen") is None:
        pytest.skip("ssh-keygen is not installed")
    folder, keys = tmp_path / "dist/1.2.3", tmp_path / ".ssh"
    for made in (folder, keys, tmp_path / "deploy/release"):
        made.mkdir(parents=True)
    shutil.copy(ROOT / "deploy/release/allowed_signers", tmp_path / "deploy/release")
    (folder / "shoal.whl").write_bytes(b"a wheel")
    (folder / "SHA256SUMS").write_text(f"{digest(folder / 'shoal.whl')}  shoal.whl\n")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / "id_ed25519")], check=True)
    sign = shell_of("docs/releasing.md", "-Y sign").replace("0.2.0", "1.2.3")
    assert run_shell(sign, tmp_path) == 0
    for name in ("SHA256SUMS", "SHA256SUMS.sig", "shoal.whl"):
        shutil.copy(folder / name, tmp_path)
    shutil.copy(tmp_path / "deploy/release/allowed_signers", tmp_path)
    check = shell_of("docs/packages.md", "-Y verify")
    assert run_shell(check, tmp_path) == 0
    (tmp_path / "shoal.whl").write_bytes(b"another")
    assert run_shell(check, tmp_path) != 0
    (tmp_path / "SHA256SUMS").write_text(f"{digest(tmp_path / 'shoal.whl')}  shoal.whl\n")
    assert run_shell(check, tmp_path) != 0


def shell_of(page, words):
    """Return the lines of the block of commands that has these words."""
    return "\n".join(next(block.lines for block in blocks(page, "sh") if words in "".join(block.lines)))


def run_shell(script, home):
    """Run a script with ``home`` as its directory and home; return its exit status."""
    where = {**os.environ, "HOME": str(home)}
    command = ["sh", "-euc", script]
    return subprocess.run(command, cwd=home, env=where, capture_output=True, timeout=60, check=False).returncode


def test_nothing_is_built_without_repository(root, tmp_path):
    """Outside of a repository nothing is built."""
    shutil.rmtree(root / ".git")
    with pytest.raises(ReleaseError, match="git status failed"):
        release(root, tmp_path)


def test_the_command_ends_with_the_reason(tmp_path):
    """This tree may be changed, in development or released already; if it is not, the folder is there."""
    (tmp_path / "dist" / VERSION).mkdir(parents=True)
    command = [sys.executable, "-m", "deploy.release.make", "--out", str(tmp_path / "dist")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("no release: ")
