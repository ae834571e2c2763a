"""The Dockerfile, without a daemon to build it: what it copies is there, and what it runs would run."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from fnmatch import fnmatch

import yaml

from resile.deploy import installation
from tests.support.paths import ROOT

Instruction = tuple[str, list[str]]


def instructions() -> list[Instruction]:
    """Every instruction with its words; lines that end in a backslash go on."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split()[0], shlex.split(line)[1:]) for line in lines]


def stages() -> list[list[Instruction]]:
    found: list[list[Instruction]] = []
    for one in instructions():
        if one[0] == "FROM":
            found.append([])
        if found:
            found[-1].append(one)
    return found


def copied() -> list[str]:
    """What is copied from the checkout."""
    return [
        source
        for name, words in instructions()
        if name == "COPY" and not words[0].startswith("--from")
        for source in words[:-1]
    ]


def test_everything_that_is_copied_is_there_and_not_kept_outside() -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for source in copied():
        assert (ROOT / source).exists(), source
        assert any(fnmatch(source, pattern) for pattern in kept), f".dockerignore keeps {source} outside"


def test_what_the_package_is_built_from_is_copied_before() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {"pyproject.toml", project["project"]["readme"], project["project"]["license"]["file"], "src"}
    assert needed <= set(copied())
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["src/resile"]


def test_the_line_that_lists_the_dependencies_lists_them() -> None:
    (line,) = [words for name, words in instructions() if name == "RUN" and "tomllib" in " ".join(words)]
    program = line[line.index("-c") + 1]
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = done.stdout.splitlines()
    assert listed == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    pinned = {entry.partition("==")[0].lower() for entry in (ROOT / "constraints.txt").read_text().splitlines()}
    assert {re.split("[>=<]", entry)[0].lower() for entry in listed} <= pinned


def test_the_image_runs_as_nobody_and_without_what_built_it() -> None:
    *_, last = stages()
    (user,) = [words for name, words in last if name == "USER"]
    assert user == [f"{installation.USER}:{installation.USER}"]
    assert not any("pip" in " ".join(words) for name, words in last if name == "RUN")
    assert ("ENTRYPOINT", ["[resile]"]) in last


def test_the_image_has_a_python_that_the_package_takes() -> None:
    (version,) = [words[0].partition("=")[2] for name, words in instructions() if name == "ARG"]
    least = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    assert tuple(map(int, version.split("."))) >= tuple(map(int, least.split(".")))
    assert sys.version_info >= tuple(map(int, least.split(".")))


def test_the_samples_commands_name_files_that_are_in_the_image() -> None:
    job = yaml.safe_load((ROOT / "config/samples/elasticjob.yaml").read_text())
    (container,) = job["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["containers"]
    files = re.findall(r"\S+\.py", container["command"][-1])
    assert files
    for file in files:
        assert (ROOT / file).exists()
        assert any(file.startswith(f"{source}/") for source in copied())


def test_the_local_cluster_has_the_images_of_the_samples_and_of_the_examples_that_run_there() -> None:
    settings = runpy.run_path(str(ROOT / "hack/cluster/settings.py"))
    there = {settings["RESILE_IMAGE"], *settings["EXAMPLE_IMAGES"]}
    named = re.compile(r"image: *(\S+)")
    samples = {name for path in (ROOT / "config/samples").glob("*.yaml") for name in named.findall(path.read_text())}
    examples = {name for path in (ROOT / "examples").rglob("*.yaml") for name in named.findall(path.read_text())}
    assert samples <= there
    assert examples - there == {"resile/deepctr:0.1.0"}, "parameter servers are to come"
