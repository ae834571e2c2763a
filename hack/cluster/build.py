"""The binaries: Debian's packages, and Kubernetes compiled from Debian's source package.

Debian 12 ships etcd, containerd and runc, but of Kubernetes only the source. Building it once costs minutes; what the
cache then holds is five programs. The result of each step is moved into place whole, so that an interrupted build goes
on where it stopped and a half-made file is never used.

The machine's apt configuration is not touched (sources are fetched through a private copy of it), and no daemon that
comes with a package is started.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from console import ClusterError, run, say, step
from settings import BIN, BINARIES, CACHE, KUBERNETES, RECIPE

# A package is installed only when its program is missing, so that a machine's own containerd or kubectl is left alone.
PACKAGES_TO_RUN = {
    "etcd-server": "etcd",
    "containerd": "containerd",
    "runc": "runc",
    "containernetworking-plugins": "/usr/lib/cni/bridge",
    "iproute2": "ip",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "socat": "socat",
    "busybox-static": "busybox",
    "dnsmasq-base": "dnsmasq",
    "openssl": "openssl",
    "kubernetes-client": "kubectl",
}
GO_ROOT = Path("/usr/lib/go-1.19")
REFLECT2 = Path("/usr/share/gocode/src/github.com/modern-go/reflect2")
PACKAGES_TO_BUILD = {
    "golang-1.19-go": str(GO_ROOT / "bin/go"),
    "golang-github-modern-go-reflect2-dev": str(REFLECT2 / "reflect2.go"),
    "dpkg-dev": "dpkg-source",
}

APT_DEADLINE = 1800.0
COMPILE_DEADLINE = 7200.0

WORK = CACHE / RECIPE / "work"
APT = CACHE / "apt"
GOPATH = WORK / "go"
SOURCE = GOPATH / "src/k8s.io/kubernetes"
OPENAPI = "pkg/generated/openapi/zz_generated.openapi.go"
# Programs print the version of the first, and the API server tells clients that of the second.
VERSION_PACKAGES = (
    "k8s.io/kubernetes/vendor/k8s.io/component-base/version",
    "k8s.io/kubernetes/vendor/k8s.io/client-go/pkg/version",
)
# Without Docker's and the clouds' code: less to compile, and no kubelet waits 5 s at its start for a Docker to answer.
TAGS = "dockerless,providerless"
NOT_IN_OPENAPI = ("code-generator", "sample-apiserver", "kube-openapi", "gengo")


def missing_binaries() -> list[str]:
    """Return the Kubernetes programs the cache does not hold yet."""
    return [name for name in BINARIES if not (BIN / name).exists()]


def missing_packages(packages: dict[str, str]) -> list[str]:
    """Return the packages whose program is not on this machine."""
    return [package for package, program in packages.items() if shutil.which(program) is None and not _is_file(program)]


def build(jobs: int, keep_work: bool = False) -> None:
    """Make everything `up` needs: install the missing packages and compile the missing programs.

    Does nothing when nothing is missing. Safe to interrupt and to repeat.

    Args:
        jobs: how many packages the Go compiler handles at a time.
        keep_work: keep sources and compiler cache (about 3 GB) for another build.
    """
    programs = missing_binaries()
    packages = missing_packages(PACKAGES_TO_RUN | (PACKAGES_TO_BUILD if programs else {}))
    if packages:
        with step(f"installing {len(packages)} Debian packages ({', '.join(packages)})"):
            _install(packages)
    if not programs:
        say(f"  Kubernetes {KUBERNETES} is built: {BIN}")
        return
    with step("getting Debian's source package of Kubernetes"):
        archive = _fetch()
    with step("unpacking the sources"):
        _unpack(archive)
    with step("generating the OpenAPI definitions"):
        _generate_openapi(jobs)
    for number, name in enumerate(programs, 1):
        with step(f"compiling {name} ({number} of {len(programs)})"):
            _compile(f"./cmd/{name}", BIN / name, jobs)
    if not keep_work:
        shutil.rmtree(WORK)
    say(f"  Kubernetes {KUBERNETES} is built: {BIN}")


def _is_file(program: str) -> bool:
    return program.startswith("/") and Path(program).is_file()


def _gently(*command: str | Path) -> list[str | Path]:
    """Give a command the lowest priority: it takes minutes, and whoever else works here should not feel it."""
    return ["nice", "-n", "19", "ionice", "-c3", *command]


def _apt_env() -> dict[str, str]:
    return {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}


@contextmanager
def _no_daemons() -> Iterator[None]:
    """Keep packages from starting the daemons they bring; a policy the machine already has is left as it is."""
    policy = Path("/usr/sbin/policy-rc.d")
    if policy.exists():
        yield
        return
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink(missing_ok=True)


def _install(packages: list[str]) -> None:
    lock = ("-o", "DPkg::Lock::Timeout=300")
    run(_gently("apt-get", *lock, "update", "-qq"), deadline=APT_DEADLINE, env=_apt_env())
    with _no_daemons():
        run(
            _gently("apt-get", *lock, "install", "-y", "-qq", "--no-install-recommends", *packages),
            deadline=APT_DEADLINE,
            env=_apt_env(),
        )


def _source_lists() -> str:
    """Return the machine's own Debian archives as `deb-src` entries in the one-line style."""
    codename = _codename()
    lines: set[str] = set()
    for path in [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*.list")]:
        if path.is_file():
            for line in path.read_text().splitlines():
                found = re.match(r"deb\s+(\[.*?\]\s+)?(\S+)\s+(\S+)\s+(.+)", line)
                if found and found[3].startswith(codename):
                    lines.add(f"deb-src {found[1] or ''}{found[2]} {found[3]} {found[4]}")
    for path in Path("/etc/apt/sources.list.d").glob("*.sources"):
        for stanza in re.split(r"\n\s*\n", path.read_text()):
            fields = dict(re.findall(r"(?m)^([A-Za-z-]+):\s*(.+)$", stanza))
            if fields.get("Enabled", "yes") == "no" or "URIs" not in fields:
                continue
            signed = f"[signed-by={fields['Signed-By']}] " if fields.get("Signed-By", "").startswith("/") else ""
            for uri in fields["URIs"].split():
                for suite in fields.get("Suites", "").split():
                    if suite.startswith(codename):
                        lines.add(f"deb-src {signed}{uri} {suite} {fields.get('Components', 'main')}")
    if not lines:
        raise ClusterError(f"apt knows no archive of Debian {codename}, so the sources of Kubernetes cannot be fetched")
    return "\n".join(sorted(lines)) + "\n"


def _codename() -> str:
    fields = dict(re.findall(r'(?m)^(\w+)="?([^"\n]*)"?$', Path("/etc/os-release").read_text()))
    return str(fields.get("VERSION_CODENAME", ""))


def _fetch() -> Path:
    """Download the upstream archive; apt checks its signature and checksum and resumes a broken download."""
    downloads = APT / "downloads"
    done = APT / "complete"
    found = sorted(downloads.glob("kubernetes_*.orig.tar.*z"))
    if done.exists() and found:
        return found[0]
    (APT / "lists/partial").mkdir(parents=True, exist_ok=True)
    (APT / "empty.d").mkdir(exist_ok=True)
    downloads.mkdir(exist_ok=True)
    (APT / "sources.list").write_text(_source_lists())
    options: list[str | Path] = []
    for option in (
        f"Dir::Etc::SourceList={APT / 'sources.list'}",
        f"Dir::Etc::SourceParts={APT / 'empty.d'}",
        f"Dir::State::Lists={APT / 'lists'}",
        "APT::Sandbox::User=root",
    ):
        options += ["-o", option]
    run(_gently("apt-get", *options, "update", "-qq"), deadline=APT_DEADLINE, env=_apt_env())
    run(
        _gently("apt-get", *options, "source", "--download-only", "-qq", "kubernetes"),
        deadline=APT_DEADLINE,
        cwd=downloads,
        env=_apt_env(),
    )
    found = sorted(downloads.glob("kubernetes_*.orig.tar.*z"))
    if not found:
        raise ClusterError("apt brought no upstream archive of Kubernetes")
    done.touch()
    return found[0]


def _unpack(archive: Path) -> None:
    if SOURCE.exists():
        return
    scratch = WORK / "unpacking"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    run(_gently("tar", "-xf", archive, "-C", scratch, "--strip-components=1"), deadline=APT_DEADLINE)
    # The vendored reflect2 is too old for Go 1.19: the API server would die on the first custom resource.
    vendored = scratch / "vendor/github.com/modern-go/reflect2"
    shutil.rmtree(vendored)
    shutil.copytree(REFLECT2, vendored)
    _collect_sandboxes_often(scratch / "pkg/kubelet/kubelet.go")
    SOURCE.parent.mkdir(parents=True, exist_ok=True)
    scratch.rename(SOURCE)


def _collect_sandboxes_often(kubelet: Path) -> None:
    """Let the kubelet remove the sandboxes of ended pods every 5 s.

    A sandbox that is still ready when the last container of its pod is removed stays until the next collection, and so
    does the deleted pod. Collections are a minute apart, and tests wait for the end of many pods.
    """
    before, text = "ContainerGCPeriod = time.Minute", kubelet.read_text()
    if before not in text:
        raise ClusterError(f"{kubelet.name} has no line '{before}'")
    kubelet.write_text(text.replace(before, "ContainerGCPeriod = 5 * time.Second"))


def _packages_with_openapi() -> list[str]:
    """Return the import paths of all packages that ask for OpenAPI definitions."""
    found: set[str] = set()
    for top in ("pkg", "cmd", "plugin", "vendor/k8s.io"):
        for folder, folders, files in os.walk(SOURCE / top, followlinks=True):
            folders[:] = [name for name in folders if name not in NOT_IN_OPENAPI]
            if any(
                name.endswith(".go") and b"+k8s:openapi-gen=" in (Path(folder) / name).read_bytes() for name in files
            ):
                found.add(f"k8s.io/kubernetes/{Path(folder).relative_to(SOURCE)}")
    return sorted(found)


def _generate_openapi(jobs: int) -> None:
    if (SOURCE / OPENAPI).exists():
        return
    tool = WORK / "openapi-gen"
    _compile("./vendor/k8s.io/kube-openapi/cmd/openapi-gen", tool, jobs)
    output = WORK / "openapi"
    package = "k8s.io/kubernetes/pkg/generated/openapi"
    command: list[str | Path] = [tool, "-i", ",".join(_packages_with_openapi()), "-p", package]
    command += ["-O", "zz_generated.openapi", "-h", SOURCE / "hack/boilerplate/boilerplate.generatego.txt"]
    command += ["-r", WORK / "violations", "--output-base", output]
    run(_gently(*command), deadline=COMPILE_DEADLINE, cwd=SOURCE, env=_go_env())
    (output / package / Path(OPENAPI).name).rename(SOURCE / OPENAPI)


def _go_env() -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{GO_ROOT / 'bin'}:{os.environ.get('PATH', '')}",
        "GOPATH": str(GOPATH),
        "GOCACHE": str(WORK / "gocache"),
        "GO111MODULE": "off",
        "CGO_ENABLED": "0",
        "GOFLAGS": "",
    }


def _compile(target: str, output: Path, jobs: int) -> None:
    """Compile one program; it appears under its name only when it is whole."""
    if output.exists():
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    major, minor, _ = KUBERNETES.split(".")
    stamps = {"gitVersion": f"v{KUBERNETES}", "gitMajor": major, "gitMinor": minor}
    settings = [f"-X {package}.{name}={value}" for package in VERSION_PACKAGES for name, value in stamps.items()]
    flags = " ".join(["-s", "-w", *settings])
    scratch = output.with_name(f"{output.name}.part")
    command: list[str | Path] = ["build", "-p", str(jobs), "-tags", TAGS, "-ldflags", flags, "-o", scratch, target]
    run(_gently(GO_ROOT / "bin/go", *command), deadline=COMPILE_DEADLINE, cwd=SOURCE, env=_go_env())
    scratch.rename(output)
