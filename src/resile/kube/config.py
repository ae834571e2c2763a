"""Where the cluster is: kubeconfig files, or the ServiceAccount of the pod that this process runs in.

Finding out whether a cluster is configured costs a look at the file system; lightkube is imported only to read it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from lightkube.config.kubeconfig import KubeConfig, SingleConfig

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
USUAL_CONFIG = Path("~/.kube/config")


class NoCluster(Exception):
    """Nothing says where a cluster is, or what says so cannot be used; the text is one sentence."""


class NoSuchContext(NoCluster):
    """The kubeconfig files have no context of this name."""

    def __init__(self, context: str, path: Path, known: Sequence[str]) -> None:
        super().__init__(f"there is no context {context!r} in {path}")
        self.known = known


def config_files(kubeconfig: str = "") -> list[Path]:
    """The files that say where the cluster is: the one given, else those of KUBECONFIG, else kubectl's usual one."""
    if kubeconfig:
        return [Path(kubeconfig).expanduser()]
    named = [Path(name).expanduser() for name in os.environ.get("KUBECONFIG", "").split(os.pathsep) if name]
    return named or [USUAL_CONFIG.expanduser()]


def in_a_pod() -> bool:
    """Whether this process runs in a pod that may speak to its cluster."""
    return "KUBERNETES_SERVICE_HOST" in os.environ and (SERVICE_ACCOUNT / "token").is_file()


def from_environment() -> SingleConfig:
    """The cluster of this pod, else that of the kubeconfig files.

    Raises:
        NoCluster: there is neither, or it cannot be used.
    """
    return from_pod() if in_a_pod() else from_files(config_files())


def from_pod() -> SingleConfig:
    """The cluster of this pod.

    Raises:
        NoCluster: its ServiceAccount cannot be read.
    """
    from lightkube.config.kubeconfig import KubeConfig
    from lightkube.core.exceptions import ConfigError

    try:
        return cast("SingleConfig", KubeConfig.from_service_account(SERVICE_ACCOUNT).get())
    except (ConfigError, OSError, KeyError) as error:
        raise NoCluster(f"the pod's ServiceAccount cannot be used: {error}") from error


def from_files(paths: Sequence[Path], context: str = "") -> SingleConfig:
    """The cluster of a context in kubeconfig files, the current one unless it is named.

    Raises:
        NoCluster: no such file or context is there, or it cannot be used.
    """
    from lightkube.core.exceptions import ConfigError

    there = [path for path in paths if path.is_file()]
    if not there:
        raise NoCluster(f"{', '.join(map(str, paths))} does not exist")
    merged = _merged(there)
    if context and context not in merged.contexts:
        raise NoSuchContext(context, there[0], sorted(merged.contexts))
    try:
        return cast("SingleConfig", merged.get(context or None))
    except (ConfigError, KeyError) as error:
        words = " ".join(str(error).split())
        raise NoCluster(f"the cluster's configuration cannot be used: {words}") from error


def _merged(paths: Sequence[Path]) -> KubeConfig:
    """Several files as one; the first that names a thing counts, as for kubectl."""
    merged = _read(paths[0])
    for path in paths[1:]:
        other = _read(path)
        merged.clusters = {**other.clusters, **merged.clusters}
        merged.contexts = {**other.contexts, **merged.contexts}
        merged.users = {**other.users, **merged.users}
        merged.current_context = merged.current_context or other.current_context
    return merged


def _read(path: Path) -> KubeConfig:
    import yaml
    from lightkube.config.kubeconfig import KubeConfig
    from lightkube.core.exceptions import ConfigError

    try:
        return KubeConfig.from_file(path)
    except (KeyError, TypeError, AttributeError) as error:  # lightkube reads the file as if it were well formed
        raise NoCluster(f"{path} is no kubeconfig file: its clusters, contexts or users are malformed") from error
    except (ConfigError, OSError, ValueError, yaml.YAMLError) as error:
        words = " ".join(str(error).split()) or type(error).__name__
        raise NoCluster(f"the cluster's configuration cannot be used: {words}") from error
