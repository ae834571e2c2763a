"""Who is who in the cluster: a certificate authority, a certificate per component, and the kubeconfigs that hold them.

Every component has the name Kubernetes' own RBAC roles expect (a kubelet is `system:node:NAME` and can touch only what
its node needs), so that what is proven here about rights holds elsewhere. Keys never leave the state folder; files that
hold one are readable by root alone.
"""

from __future__ import annotations

import base64
import json
import os
from dataclasses import dataclass
from pathlib import Path

from console import run
from settings import API_SERVICE_ADDRESS, CLUSTER_DOMAIN, HOST_ADDRESS, KUBECONFIG, NODES, SERVER, STATE, Node

PKI = STATE / "pki"
AUTHORITY = PKI / "ca.crt"
AUTHORITY_KEY = PKI / "ca.key"
ACCOUNTS_KEY = PKI / "service-accounts.key"
DAYS = 3650


@dataclass(frozen=True)
class Identity:
    """A name the API server believes, proven by a certificate.

    Attributes:
        file: the stem of its files.
        name: the user's name (CN).
        group: the group it belongs to (O), if any.
        hosts: addresses and names it may serve under.
    """

    file: str
    name: str
    group: str = ""
    hosts: tuple[str, ...] = ()

    @property
    def certificate(self) -> Path:
        """The certificate's file."""
        return PKI / f"{self.file}.crt"

    @property
    def key(self) -> Path:
        """The private key's file."""
        return PKI / f"{self.file}.key"

    @property
    def kubeconfig(self) -> Path:
        """The kubeconfig that speaks as this identity."""
        return KUBECONFIG if self == ADMIN else STATE / "kubeconfigs" / f"{self.file}.kubeconfig"


def kubelet(node: Node) -> Identity:
    """Return the identity of a node's kubelet, which it also serves logs and exec under."""
    return Identity(node.name, f"system:node:{node.name}", "system:nodes", (f"IP:{node.address}", f"DNS:{node.name}"))


ADMIN = Identity("admin", "resile-cluster-admin", "system:masters")
API_SERVER = Identity(
    "kube-apiserver",
    "kube-apiserver",
    "system:masters",
    (
        f"IP:{HOST_ADDRESS}",
        f"IP:{API_SERVICE_ADDRESS}",
        "DNS:kubernetes",
        "DNS:kubernetes.default",
        "DNS:kubernetes.default.svc",
        f"DNS:kubernetes.default.svc.{CLUSTER_DOMAIN}",
    ),
)
ETCD = Identity("etcd", "etcd", hosts=("IP:127.0.0.1",))
CONTROLLER_MANAGER = Identity("kube-controller-manager", "system:kube-controller-manager", hosts=("IP:127.0.0.1",))
SCHEDULER = Identity("kube-scheduler", "system:kube-scheduler", hosts=("IP:127.0.0.1",))
# As whom the API server speaks to servers that extend it, on behalf of a user.
FRONT_PROXY = Identity("front-proxy", "front-proxy")
PROXY = Identity("kube-proxy", "system:kube-proxy")
# The built-in role `system:kube-dns` may list and watch Services and Endpoints, and nothing else.
DNS = Identity("dns", "resile-cluster-dns")

IDENTITIES = (
    ADMIN,
    API_SERVER,
    ETCD,
    CONTROLLER_MANAGER,
    SCHEDULER,
    FRONT_PROXY,
    PROXY,
    DNS,
    *(kubelet(node) for node in NODES),
)


def ensure_identities() -> bool:
    """Make the keys, certificates and kubeconfigs that are missing; return whether any was."""
    PKI.mkdir(mode=0o700, parents=True, exist_ok=True)
    (STATE / "kubeconfigs").mkdir(mode=0o700, exist_ok=True)
    made = False
    if not AUTHORITY.exists():
        made = True
        _key(AUTHORITY_KEY)
        scratch = AUTHORITY.with_suffix(".part")
        request: list[str | Path] = [
            "openssl",
            "req",
            "-x509",
            "-new",
            "-key",
            AUTHORITY_KEY,
            "-sha256",
            "-days",
            str(DAYS),
        ]
        run([*request, "-subj", "/CN=resile-cluster", "-out", scratch])
        scratch.rename(AUTHORITY)
    if not ACCOUNTS_KEY.exists():
        made = True
        _key(ACCOUNTS_KEY, "RSA", "rsa_keygen_bits:2048")
    for identity in IDENTITIES:
        if not identity.certificate.exists():
            made = True
            _certify(identity)
        if not identity.kubeconfig.exists():
            made = True
            _write_secret(identity.kubeconfig, _kubeconfig(identity))
    return made


def _key(path: Path, algorithm: str = "EC", option: str = "ec_paramgen_curve:prime256v1") -> None:
    _write_secret(path, run(["openssl", "genpkey", "-algorithm", algorithm, "-pkeyopt", option]))


def _certify(identity: Identity) -> None:
    _key(identity.key)
    subject = f"/O={identity.group}/CN={identity.name}" if identity.group else f"/CN={identity.name}"
    request = run(["openssl", "req", "-new", "-key", identity.key, "-subj", subject])
    extensions = PKI / f"{identity.file}.ext"
    uses = ["keyUsage=critical,digitalSignature", "extendedKeyUsage=clientAuth,serverAuth"]
    names = [f"subjectAltName={','.join(identity.hosts)}"] if identity.hosts else []
    extensions.write_text("\n".join([*uses, *names]) + "\n")
    command: list[str | Path] = ["openssl", "x509", "-req", "-sha256", "-days", str(DAYS)]
    command += ["-CA", AUTHORITY, "-CAkey", AUTHORITY_KEY]
    scratch = identity.certificate.with_suffix(".part")
    command += ["-set_serial", f"0x{os.urandom(15).hex()}", "-extfile", extensions, "-out", scratch]
    run(command, stdin=request.encode())
    extensions.unlink()
    scratch.rename(identity.certificate)


def _kubeconfig(identity: Identity) -> str:
    """Return a kubeconfig with everything inside, so that the one file can be copied and used."""
    user = {"client-certificate-data": _inline(identity.certificate), "client-key-data": _inline(identity.key)}
    cluster = {"server": SERVER, "certificate-authority-data": _inline(AUTHORITY)}
    name = "resile-cluster"
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": cluster}],
        "users": [{"name": identity.name, "user": user}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": identity.name}}],
        "current-context": name,
    }
    return json.dumps(document, indent=2) + "\n"


def _inline(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def _write_secret(path: Path, text: str) -> None:
    """Write a file only root can read, in one move."""
    scratch = path.with_name(f"{path.name}.part")
    scratch.unlink(missing_ok=True)
    with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    scratch.rename(path)
