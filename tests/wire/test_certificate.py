"""The certificate of a job's master, shown to real TLS clients."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from resile.api.kinds.elasticjob.kind import ELASTIC_JOB
from resile.api.kinds.elasticjob.names import MAX_JOB_NAME
from resile.common.certificates import LIFE, Pair
from resile.operator.jobs.master_objects import new_pair
from resile.wire.handshake import HandshakeRefused
from resile.wire.tls import client_context, server_context
from tests.wire.peers import Serve

JOB, NAMESPACE = "mnist", "red"


def written(directory: Path, pair: Pair) -> tuple[Path, Path]:
    directory.mkdir()
    certificate, key = directory / "tls.crt", directory / "tls.key"
    certificate.write_bytes(pair.certificate)
    key.write_bytes(pair.key)
    return certificate, key


async def test_a_node_that_trusts_the_certificate_reaches_the_master_by_its_name(
    serving: Serve, tmp_path: Path
) -> None:
    certificate, key = written(tmp_path / "own", new_pair(ELASTIC_JOB, JOB, NAMESPACE))
    place = await serving(tls=server_context(certificate, key))
    await place.check_still_serves(tls=client_context(certificate), server_name=ELASTIC_JOB.master_host(JOB, NAMESPACE))


async def test_the_master_of_another_job_is_not_trusted(serving: Serve, tmp_path: Path) -> None:
    theirs = written(tmp_path / "theirs", new_pair(ELASTIC_JOB, JOB, NAMESPACE))
    own, _ = written(tmp_path / "own", new_pair(ELASTIC_JOB, JOB, NAMESPACE))
    place = await serving(tls=server_context(*theirs))
    with pytest.raises(HandshakeRefused, match="showed a certificate that fails"):
        await place.call(tls=client_context(own), server_name=ELASTIC_JOB.master_host(JOB, NAMESPACE))


async def test_the_name_of_another_job_is_not_accepted(serving: Serve, tmp_path: Path) -> None:
    certificate, key = written(tmp_path / "own", new_pair(ELASTIC_JOB, JOB, NAMESPACE))
    place = await serving(tls=server_context(certificate, key))
    for host in (ELASTIC_JOB.master_host("other", NAMESPACE), ELASTIC_JOB.master_host(JOB, "blue")):
        with pytest.raises(HandshakeRefused, match="Hostname mismatch"):
            await place.call(tls=client_context(certificate), server_name=host)


def test_a_certificate_outlives_any_job_and_can_sign_no_other() -> None:
    longest = "j" * MAX_JOB_NAME
    certificate = x509.load_pem_x509_certificate(new_pair(ELASTIC_JOB, longest, "n" * 63).certificate)
    assert certificate.not_valid_after_utc - certificate.not_valid_before_utc > LIFE
    assert isinstance(certificate.public_key(), ec.EllipticCurvePublicKey)
    assert certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False


def test_a_key_does_not_show_where_somebody_prints_it() -> None:
    assert "PRIVATE" not in repr(new_pair(ELASTIC_JOB, JOB, NAMESPACE))
