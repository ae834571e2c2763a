"""A node: containerd, kubelet and kube-proxy in a network and a mount namespace of their own.

Containers run on the host's files: containerd's base spec binds the host's programs, its Python, the virtual
environment and the checkout read-only into every container. So an image is only a name, nothing is built or copied
after a change of the code, and a pod imports what the checkout holds at that moment.
"""

from __future__ import annotations

import json
from pathlib import Path

from client import healthy, kubelet_healthy
from console import ClusterError, run
from host import ensure_cgroup, ensure_mount_namespace
from identities import AUTHORITY, PROXY, kubelet
from processes import Program
from settings import (
    BIN,
    CHECKOUT,
    CLUSTER_DOMAIN,
    HOST_ADDRESS,
    KUBELET_HEALTH_PORT,
    KUBELET_PORT,
    MEMORY_SHARE_FOR_NODES,
    NODE_GRACE,
    NODES,
    PAUSE_IMAGE,
    POD_NETWORK,
    PODS_PER_NODE,
    PROXY_HEALTH_PORT,
    RESOLV_CONF,
    STATE,
    VENV,
    Node,
)

BASE_SPEC = STATE / "base-runtime-spec.json"
HOST_FILES = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/opt", "/etc/ssl", "/etc/alternatives", "/etc/ld.so.cache")


def prepare_nodes() -> None:
    """Write every file the nodes' programs read, and make the nodes' mount namespaces and cgroups."""
    _write(RESOLV_CONF, f"nameserver {HOST_ADDRESS}\n")
    _write(BASE_SPEC, _base_spec())
    for node in NODES:
        _write(node.home / "containerd.toml", _containerd_config(node))
        _write(node.home / "cni/10-resile.conflist", _cni_config(node))
        _write(node.home / "kubelet.json", _kubelet_config(node))
        ensure_mount_namespace(node)
        ensure_cgroup(node)


def containerd(node: Node) -> Program:
    """Return the node's container runtime. A restart of it leaves the containers running."""
    config = node.home / "containerd.toml"
    command = (*_inside(node), "containerd", f"--config={config}")
    return Program(f"containerd-{node.number}", command, lambda: _runtime_healthy(node), (config, BASE_SPEC))


def kubelet_program(node: Node) -> Program:
    """Return the node's kubelet."""
    config = node.home / "kubelet.json"
    identity = kubelet(node)
    command = (
        *_inside(node),
        str(BIN / "kubelet"),
        f"--config={config}",
        f"--kubeconfig={identity.kubeconfig}",
        "--container-runtime=remote",
        f"--container-runtime-endpoint=unix://{node.containerd_socket}",
        f"--hostname-override={node.name}",
        f"--node-ip={node.address}",
    )
    return Program(f"kubelet-{node.number}", command, lambda: kubelet_healthy(node), (config, identity.kubeconfig))


def kube_proxy(node: Node) -> Program:
    """Return the node's kube-proxy, which makes Services reachable; its rules live in the node's network namespace."""
    command = (
        *_inside(node),
        str(BIN / "kube-proxy"),
        f"--kubeconfig={PROXY.kubeconfig}",
        "--proxy-mode=iptables",
        f"--cluster-cidr={POD_NETWORK}",
        "--masquerade-all",
        f"--hostname-override={node.name}",
        f"--bind-address={node.address}",
        f"--healthz-bind-address={node.address}:{PROXY_HEALTH_PORT}",
        # A change of endpoints is written at once, not after the default second.
        "--iptables-min-sync-period=100ms",
        # Connection tracking of a namespace is bounded by the host's; these would try to change the host's.
        "--conntrack-max-per-core=0",
        "--conntrack-min=0",
        "--conntrack-tcp-timeout-established=0",
        "--conntrack-tcp-timeout-close-wait=0",
    )
    url = f"http://{node.address}:{PROXY_HEALTH_PORT}/healthz"
    return Program(f"kube-proxy-{node.number}", command, lambda: healthy(url), (PROXY.kubeconfig,))


def _inside(node: Node) -> tuple[str, ...]:
    return ("nsenter", f"--net={node.network_namespace}", f"--mount={node.mount_namespace}")


def _runtime_healthy(node: Node) -> bool:
    try:
        run(["ctr", "-a", node.containerd_socket, "--connect-timeout=2s", "version"], deadline=5)
    except ClusterError:
        return False
    return True


def host_folders() -> list[Path]:
    """Return what containers see of the host: each folder once, none inside another, links left to the image."""
    wanted = [Path(name) for name in HOST_FILES if not Path(name).is_symlink()]
    config = VENV / "pyvenv.cfg"
    if config.exists():
        fields = dict(line.split(" = ", 1) for line in config.read_text().splitlines() if " = " in line)
        home = Path(fields["home"]).parent
        wanted += [VENV, home, home.resolve()]
    wanted.append(CHECKOUT)
    chosen: list[Path] = []
    for folder in sorted({path for path in wanted if path.exists()}):
        if not any(folder.is_relative_to(other) for other in chosen):
            chosen.append(folder)
    return chosen


def _base_spec() -> str:
    spec = json.loads(run(["ctr", "oci", "spec"]))
    for folder in host_folders():
        options = ["rbind", "rprivate", "ro"]
        spec["mounts"].append(
            {"destination": str(folder), "source": str(folder), "type": "bind", "options": options},
        )
    return json.dumps(spec, indent=1)


def _containerd_config(node: Node) -> str:
    return f"""version = 2
root = "{node.home}/containerd"
state = "/run/containerd"
[debug]
  level = "warn"
[grpc]
  address = "{node.containerd_socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  disable_apparmor = true
  netns_mounts_under_state_dir = true
  # Without the right to lower it, runc would die on a container that asks for a lower OOM score.
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{node.home}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    base_runtime_spec = "{BASE_SPEC}"
"""


def _cni_config(node: Node) -> str:
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "hairpinMode": True,  # or a pod could not reach its own Service
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": node.pods}]],
            "routes": [{"dst": "0.0.0.0/0"}],
            "dataDir": str(node.home / "ipam"),
        },
    }
    # Without portmap: it starts iptables a dozen times for each pod, and pods here have no ports on their machine.
    return json.dumps({"cniVersion": "0.4.0", "name": node.name, "plugins": [bridge]}, indent=1)


def _kubelet_config(node: Node) -> str:
    identity = kubelet(node)
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    offered = int(total * MEMORY_SHARE_FOR_NODES / len(NODES))
    config = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": node.address,
        "port": KUBELET_PORT,
        "healthzPort": KUBELET_HEALTH_PORT,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(AUTHORITY)},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(identity.certificate),
        "tlsPrivateKeyFile": str(identity.key),
        "clusterDNS": [HOST_ADDRESS],
        "clusterDomain": CLUSTER_DOMAIN,
        "resolvConf": str(RESOLV_CONF),
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{node.name}",
        "failSwapOn": False,
        "oomScoreAdj": 0,
        "maxPods": PODS_PER_NODE,
        "nodeLeaseDurationSeconds": NODE_GRACE,
        "volumePluginDir": str(node.home / "volume-plugins"),
        "systemReserved": {"memory": str(total - offered)},
        # The disk is the host's: a node must not evict pods or delete images because the host is well filled.
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "1%",
            "nodefs.inodesFree": "1%",
            "imagefs.available": "1%",
        },
        "imageGCHighThresholdPercent": 100,
        "serializeImagePulls": False,
        # A watch per Secret may need more than the second a mount waits for it, when many pods start together.
        "configMapAndSecretChangeDetectionStrategy": "Get",
        "kubeAPIQPS": 100,
        "kubeAPIBurst": 200,
    }
    return json.dumps(config, indent=1)


def _write(path: Path, text: str) -> None:
    """Write a file in one move, and only if it changes."""
    if path.exists() and path.read_text() == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.part")
    scratch.write_text(text)
    scratch.rename(path)
