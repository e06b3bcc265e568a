from __future__ import annotations

import base64
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from distribai.errors import Conflict, NotAllowed, UsageError
from distribai.orchestrator import certificates
from distribai.orchestrator.certificates import (
    CA_CERT,
    CA_DAYS,
    CA_KEY,
    CURVE,
    check_shown,
    ensure_authority,
    node_certificate,
    own_certificate,
    server_certificate,
    set_aside,
)
from distribai.tls import GRID_NAME, PUBLIC, fingerprint

NOW = datetime(2026, 5, 1, tzinfo=UTC)


def test_the_authority_is_made_once_and_its_key_is_the_owner_s_alone(tmp_path: Path) -> None:
    first = ensure_authority(tmp_path / "keys", NOW)
    second = ensure_authority(tmp_path / "keys", NOW + timedelta(days=400))
    assert first.cert_pem == second.cert_pem
    assert (tmp_path / "keys" / CA_KEY).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "keys").stat().st_mode & 0o077 == 0
    constraints = first.cert.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert (constraints.ca, constraints.path_length) == (True, 0)


def test_a_key_that_others_could_read_is_closed(tmp_path: Path) -> None:
    ensure_authority(tmp_path, NOW)
    (tmp_path / CA_KEY).chmod(0o644)
    ensure_authority(tmp_path, NOW)
    assert (tmp_path / CA_KEY).stat().st_mode & 0o777 == 0o600


def test_a_start_that_died_between_key_and_certificate_goes_on(tmp_path: Path) -> None:
    ensure_authority(tmp_path, NOW)
    key = (tmp_path / CA_KEY).read_bytes()
    (tmp_path / CA_CERT).unlink()
    ensure_authority(tmp_path, NOW)
    assert (tmp_path / CA_KEY).read_bytes() == key


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda d: (d / CA_KEY).unlink(), "missing"),
        (lambda d: (d / CA_KEY).write_text("no key"), "no private key"),
        (lambda d: (d / CA_CERT).write_text("nothing"), "no certificate"),
        (lambda d: (d / CA_CERT).write_bytes(b"\xff\xfe"), "no certificate"),
        (lambda d: other_certificate(d), "another key"),
    ],
)
def test_damaged_or_mixed_up_keys_are_named_and_not_replaced(
    tmp_path: Path, spoil: object, why: str
) -> None:
    ensure_authority(tmp_path, NOW)
    spoil(tmp_path)  # type: ignore[operator]
    with pytest.raises(Conflict) as caught:
        ensure_authority(tmp_path, NOW)
    assert caught.value.code == "grid.keys"
    assert why in caught.value.message


def other_certificate(directory: Path) -> None:
    other = ensure_authority(directory / "other", NOW)
    (directory / CA_CERT).write_text(other.cert_pem)


def test_an_authority_that_has_ended_is_said(tmp_path: Path) -> None:
    ensure_authority(tmp_path, NOW)
    with pytest.raises(Conflict) as caught:
        ensure_authority(tmp_path, NOW + timedelta(days=CA_DAYS + 1))
    assert "ended" in caught.value.message


def test_a_new_authority_is_made_only_after_the_old_one_was_set_aside(tmp_path: Path) -> None:
    first = ensure_authority(tmp_path, NOW)
    set_aside(tmp_path)
    assert ensure_authority(tmp_path, NOW).cert_pem != first.cert_pem
    assert (tmp_path / f"{CA_KEY}-old").exists()


def test_a_server_s_certificate_is_new_at_every_start_and_bears_the_grid_s_name(
    tmp_path: Path,
) -> None:
    authority = ensure_authority(tmp_path, NOW)
    one = server_certificate(authority, ["192.0.2.7", "grid.example", "::1"], NOW)
    two = server_certificate(authority, [], NOW)
    assert one.key_pem != two.key_pem
    assert one.ca == fingerprint(authority.cert_pem)
    leaf = x509.load_pem_x509_certificate(one.chain_pem)
    leaf.verify_directly_issued_by(authority.cert)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [GRID_NAME, "grid.example"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["192.0.2.7", "::1"]
    assert leaf.not_valid_before_utc < NOW < leaf.not_valid_after_utc
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_the_http_server_speaks_tls_1_3_and_its_key_file_is_closed(tmp_path: Path) -> None:
    tls = server_certificate(ensure_authority(tmp_path, NOW), [], NOW)
    context = certificates.http_context(tls, tmp_path)
    assert context.minimum_version is ssl.TLSVersion.TLSv1_3
    assert (tmp_path / certificates.SERVER_TLS).stat().st_mode & 0o777 == 0o600


def own_files(directory: Path, now: datetime) -> tuple[Path, Path]:
    tls = server_certificate(ensure_authority(directory / "own", now), ["grid.example"], now)
    cert, key = directory / "chain.pem", directory / "key.pem"
    cert.write_bytes(tls.chain_pem)
    key.write_bytes(tls.key_pem)
    return cert, key


def test_an_operator_s_own_certificate_is_taken_and_the_system_vouches_for_it(
    tmp_path: Path,
) -> None:
    found = own_certificate(*own_files(tmp_path, NOW), NOW)
    assert (found.ca, found.ca_pem) == (PUBLIC, "")


def test_an_operator_s_certificate_that_cannot_be_used_is_refused_at_the_start(
    tmp_path: Path,
) -> None:
    cert, key = own_files(tmp_path, NOW)
    with pytest.raises(UsageError, match="ended"):
        own_certificate(cert, key, NOW + timedelta(days=5000))
    (tmp_path / "b").mkdir()
    _, foreign = own_files(tmp_path / "b", NOW)
    for files in ((cert, foreign), (cert, tmp_path / "none"), (key, key)):
        with pytest.raises(UsageError) as caught:
            own_certificate(*files, NOW)
        assert caught.value.field == "orchestrator.tls_cert"


def of_version(number: int, der: bytes, mark: bytes, label: str) -> str:
    """The same in PEM, with another version behind ``mark``."""
    at = der.index(mark) + len(mark)
    spoilt = der[:at] + bytes([number]) + der[at + 1 :]
    body = base64.encodebytes(spoilt).decode()
    return f"-----BEGIN {label}-----\n{body}-----END {label}-----\n"


@pytest.mark.parametrize("number", [1, 3, 127])
def test_a_version_that_nobody_knows_is_refused(tmp_path: Path, number: int) -> None:
    authority = ensure_authority(tmp_path, NOW)
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([]))
        .sign(ec.generate_private_key(CURVE), hashes.SHA256())
    )
    pem = request.public_bytes(Encoding.PEM).decode()
    shown = node_certificate(authority, "node_a", pem, NOW, 60.0)
    check_shown(authority, shown.public_bytes(Encoding.PEM), "node_a", NOW)
    asked = of_version(
        number, request.public_bytes(Encoding.DER), b"\x02\x01", "CERTIFICATE REQUEST"
    )
    with pytest.raises(NotAllowed) as caught:
        node_certificate(authority, "node_a", asked, NOW, 60.0)
    assert caught.value.code == "node.certificate"
    spoilt = of_version(
        number, shown.public_bytes(Encoding.DER), b"\xa0\x03\x02\x01", "CERTIFICATE"
    )
    with pytest.raises(NotAllowed) as caught:
        check_shown(authority, spoilt.encode(), "node_a", NOW)
    assert caught.value.code == "node.certificate"
