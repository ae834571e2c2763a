"""The control plane: etcd, the API server, the controller manager and the scheduler, on this host's own network.

The API server listens on the host's cable to the nodes only, everything else on loopback; all speak TLS with
certificates of the cluster's own authority. Authorization is Node and RBAC, admission the default set (ServiceAccount
included) and NodeRestriction: rights are real. etcd does not wait for the disk: its state need not outlive a power cut.
"""

from __future__ import annotations

from client import api_healthy, healthy, listens
from identities import (
    ACCOUNTS_KEY,
    API_SERVER,
    AUTHORITY,
    AUTHORITY_KEY,
    CONTROLLER_MANAGER,
    ETCD,
    FRONT_PROXY,
    SCHEDULER,
    Identity,
)
from processes import Program
from settings import (
    API_PORT,
    BIN,
    CONTROLLER_MANAGER_PORT,
    ETCD_PEER_PORT,
    ETCD_PORT,
    HOST_ADDRESS,
    NODE_GRACE,
    POD_NETWORK,
    SCHEDULER_PORT,
    SERVICE_NETWORK,
    STATE,
)

LOOPBACK = "127.0.0.1"


def etcd() -> Program:
    """Return the store."""
    url = f"https://{LOOPBACK}:{ETCD_PORT}"
    peer = f"http://{LOOPBACK}:{ETCD_PEER_PORT}"
    command = (
        "etcd",
        "--name=resile",
        f"--data-dir={STATE / 'etcd'}",
        "--unsafe-no-fsync",
        f"--listen-client-urls={url}",
        f"--advertise-client-urls={url}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=resile={peer}",
        f"--cert-file={ETCD.certificate}",
        f"--key-file={ETCD.key}",
        f"--trusted-ca-file={AUTHORITY}",
        "--client-cert-auth",
        "--log-level=warn",
        "--logger=zap",
    )
    return Program("etcd", command, lambda: listens(LOOPBACK, ETCD_PORT))


def api_server() -> Program:
    """Return the API server."""
    command = (
        str(BIN / "kube-apiserver"),
        f"--etcd-servers=https://{LOOPBACK}:{ETCD_PORT}",
        f"--etcd-cafile={AUTHORITY}",
        f"--etcd-certfile={API_SERVER.certificate}",
        f"--etcd-keyfile={API_SERVER.key}",
        f"--bind-address={HOST_ADDRESS}",
        f"--advertise-address={HOST_ADDRESS}",
        f"--secure-port={API_PORT}",
        f"--tls-cert-file={API_SERVER.certificate}",
        f"--tls-private-key-file={API_SERVER.key}",
        f"--client-ca-file={AUTHORITY}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={ACCOUNTS_KEY}",
        f"--service-account-signing-key-file={ACCOUNTS_KEY}",
        f"--service-cluster-ip-range={SERVICE_NETWORK}",
        "--kubelet-preferred-address-types=InternalIP",
        f"--kubelet-certificate-authority={AUTHORITY}",
        f"--kubelet-client-certificate={API_SERVER.certificate}",
        f"--kubelet-client-key={API_SERVER.key}",
        f"--requestheader-client-ca-file={AUTHORITY}",
        f"--requestheader-allowed-names={FRONT_PROXY.name}",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={FRONT_PROXY.certificate}",
        f"--proxy-client-key-file={FRONT_PROXY.key}",
        "--allow-privileged=true",
    )
    return Program("kube-apiserver", command, api_healthy, (API_SERVER.certificate,))


def controller_manager() -> Program:
    """Return the controller manager, which also issues ServiceAccount tokens."""
    command = (
        str(BIN / "kube-controller-manager"),
        *_client(CONTROLLER_MANAGER, CONTROLLER_MANAGER_PORT),
        "--use-service-account-credentials",
        f"--service-account-private-key-file={ACCOUNTS_KEY}",
        f"--root-ca-file={AUTHORITY}",
        f"--cluster-signing-cert-file={AUTHORITY}",
        f"--cluster-signing-key-file={AUTHORITY_KEY}",
        f"--cluster-cidr={POD_NETWORK}",
        f"--service-cluster-ip-range={SERVICE_NETWORK}",
        f"--node-monitor-grace-period={NODE_GRACE}s",
    )
    return Program(
        "kube-controller-manager",
        command,
        lambda: healthy(f"https://{LOOPBACK}:{CONTROLLER_MANAGER_PORT}/healthz"),
        (CONTROLLER_MANAGER.kubeconfig,),
    )


def scheduler() -> Program:
    """Return the scheduler."""
    command = (str(BIN / "kube-scheduler"), *_client(SCHEDULER, SCHEDULER_PORT))
    return Program(
        "kube-scheduler",
        command,
        lambda: healthy(f"https://{LOOPBACK}:{SCHEDULER_PORT}/healthz"),
        (SCHEDULER.kubeconfig,),
    )


def _client(identity: Identity, port: int) -> tuple[str, ...]:
    """Return the flags the two clients of the API server share. There is one of each, so none elects a leader."""
    return (
        f"--kubeconfig={identity.kubeconfig}",
        f"--authentication-kubeconfig={identity.kubeconfig}",
        f"--authorization-kubeconfig={identity.kubeconfig}",
        f"--tls-cert-file={identity.certificate}",
        f"--tls-private-key-file={identity.key}",
        f"--bind-address={LOOPBACK}",
        f"--secure-port={port}",
        "--port=0",
        "--leader-elect=false",
        "--kube-api-qps=200",
        "--kube-api-burst=400",
    )
