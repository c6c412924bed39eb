"""Another distribution in our packages: each case installs one as pip does, with its files and its metadata, and unwarned."""

import os
import shutil
import subprocess
import sys

import pytest

from shoal.errors import ConfigError
from shoal.membership.doctor import local_checks
from shoal.util.own_packages import MARK, NAMES, check_packages, rivals
from tests.helpers.trees import ROOT


def install(site, name, files):
    """Put a distribution beside ours, over the files that are there."""
    info = site / f"{name}-1.4.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.4\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in [*files, f"{info.name}/METADATA", "../../bin/x"]))
    for file, text in files.items():
        (site / file).parent.mkdir(exist_ok=True)
        (site / file).write_text(text)


@pytest.fixture
def site(tmp_path):
    """Return a folder with the first files of our packages, and our metadata."""
    install(tmp_path, "shoal", {f"{name}/__init__.py": (ROOT / name / "__init__.py").read_text() for name in NAMES})
    return tmp_path


def test_each_package_has_the_mark():
    assert [name for name in NAMES if MARK not in (ROOT / name / "__init__.py").read_bytes()] == []
    check_packages()
    assert rivals() == {}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", ["", "import none\n"], ids=["empty", "of another"])
def test_overwritten_package_is_named(site, name, text):
    """An overwritten package is named with its owner."""
    check_packages(site)
    install(site, "its-name", {f"{name}/__init__.py": text, f"{name}/app.py": ""})
    with pytest.raises(
        ConfigError, match=rf"{name}/__init__\.py is not Shoal's: its-name has overwritten it"
    ) as caught:
        check_packages(site)
    assert caught.value.hint.startswith("pip uninstall its-name, then pip install --force-reinstall --no-deps shoal")


def test_pycryptodome_where_case_is_ignored(site):
    """A link stands for such a disk: both names lead to one folder."""
    (site / "Crypto").symlink_to("crypto")
    install(site, "pycryptodome", {"Crypto/__init__.py": "__all__ = []\n"})
    with pytest.raises(ConfigError, match="pycryptodome has overwritten it"):
        check_packages(site)


def test_another_partys_may_be_missing(site):
    """A package of another party may be missing. Where case counts pycryptodome is no rival."""
    shutil.rmtree(site / "aggregator")
    install(site, "other", {"something/__init__.py": ""})
    install(site, "pycryptodome", {"Crypto/__init__.py": "__all__ = []\n"})
    check_packages(site)
    assert rivals(site) == {}
    (site / "crypto/__init__.py").write_text("")
    with pytest.raises(ConfigError, match="another distribution has overwritten it"):
        check_packages(site)


def test_doctor_warns_of_overwritten_ones(site, monkeypatch):
    """It still works, but pip would remove files of ours with the other."""
    install(site, "crypto", {"crypto/app.py": ""})
    check_packages(site)
    monkeypatch.setattr("shoal.membership.doctor.rivals", lambda: rivals(site))
    found = local_checks(site)[-1]
    assert (found.name, found.result, found.detail) == (
        "packages",
        "warning",
        "crypto has files in Shoal's package crypto",
    )
    assert found.advice.startswith("pip uninstall crypto, then")


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("module", ["edge_client.program", "aggregator.cli", "shoal.owner.cli.main", "shoal.cli"])
def test_each_program_ends_with_the_error(tmp_path, module):
    for name in ("shoal", *NAMES):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    install(tmp_path, "crypto", {"crypto/__init__.py": ""})
    done = subprocess.run(
        [sys.executable, "-c", f"from {module} import main; main()", "--version"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (ConfigError.exit_code, "")
    assert "crypto has overwritten it\nhint: pip uninstall crypto, then" in done.stderr
    assert "Traceback" not in done.stderr
