"""Finds the cluster: in kubeconfig files, or by the ServiceAccount of the pod that this process runs in.

Whether a cluster is configured is seen in the file system; lightkube is imported only to read the configuration.
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
    """Raised if no cluster is configured, or if its configuration cannot be used; the text is one sentence."""


class NoSuchContext(NoCluster):
    def __init__(self, context: str, path: Path, known: Sequence[str]) -> None:
        super().__init__(f"there is no context {context!r} in {path}")
        self.known = known


def config_files(kubeconfig: str = "") -> list[Path]:
    """The kubeconfig files: `kubeconfig` if given, else those of KUBECONFIG, else ~/.kube/config."""
    if kubeconfig:
        return [Path(kubeconfig).expanduser()]
    named = [Path(name).expanduser() for name in os.environ.get("KUBECONFIG", "").split(os.pathsep) if name]
    return named or [USUAL_CONFIG.expanduser()]


def in_a_pod() -> bool:
    return "KUBERNETES_SERVICE_HOST" in os.environ and (SERVICE_ACCOUNT / "token").is_file()


def from_environment() -> SingleConfig:
    """The configuration of this pod's cluster, else of the kubeconfig files; raises `NoCluster` if there is neither."""
    return from_pod() if in_a_pod() else from_files(config_files())


def from_pod() -> SingleConfig:
    """The configuration of this pod's cluster; raises `NoCluster` if the pod's ServiceAccount cannot be read."""
    from lightkube.config.kubeconfig import KubeConfig
    from lightkube.core.exceptions import ConfigError

    try:
        return cast("SingleConfig", KubeConfig.from_service_account(SERVICE_ACCOUNT).get())
    except (ConfigError, OSError, KeyError) as error:
        raise NoCluster(f"the pod's ServiceAccount cannot be used: {error}") from error


def from_files(paths: Sequence[Path], context: str = "") -> SingleConfig:
    """The configuration of `context`, or of the current context; raises `NoCluster` if it is missing or unusable."""
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
        raise unusable_config(error) from error


def unusable_config(error: Exception) -> NoCluster:
    words = " ".join(str(error).split()) or type(error).__name__
    return NoCluster(f"the cluster's configuration cannot be used: {words}")


def _merged(paths: Sequence[Path]) -> KubeConfig:
    """Merge kubeconfig files as kubectl does: of entries with the same name, the one in the first file wins."""
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
        raise unusable_config(error) from error
