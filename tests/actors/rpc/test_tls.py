"""Calls are encrypted where Ray's are, and then only who has a certificate of the cluster calls."""

from collections.abc import Iterator
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from actors.rpc import tls
from actors.rpc.connection import connect
from actors.rpc.frames import HELLO, Answer, frame_of
from configs.errors import ConfigFileError
from configs.process_environment import FILES, USE, TlsFiles, ray_tls
from engine.errors import WorkerError
from tests.actors.rpc.call_world import DEADLINE_S, World, in_world, loops


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    """The environment of a process is read once."""
    forget()
    yield
    forget()


def forget() -> None:
    tls.server_tls.cache_clear()
    tls.client_tls.cache_clear()


def encrypt(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """From now on, with a certificate that is its own authority."""
    folder.mkdir()
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a cluster")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = serialization.PrivateFormat.PKCS8
    (folder / "certificate").write_bytes(certificate.public_bytes(pem))
    (folder / "key").write_bytes(key.private_bytes(pem, private, serialization.NoEncryption()))
    monkeypatch.setenv(USE, "1")
    for variable, file in zip(FILES, ("certificate", "key", "certificate"), strict=True):
        monkeypatch.setenv(variable, str(folder / file))
    forget()


@loops
def test_calls_and_streams_go_encrypted(
    new_loop: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    encrypt(monkeypatch, tmp_path / "ours")

    async def scenario(world: World) -> None:
        calls = await world.connect()
        data = bytes(range(256)) * 4000
        assert await calls.call("echo", data) == data
        async with aclosing(calls.stream("numbers", b"3")) as items:
            assert [item async for item in items] == [b"0", b"1", b"2"]
        await calls.close()

    in_world(scenario, new_loop)


def test_who_does_not_encrypt_or_is_of_another_cluster_is_not_heard(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    encrypt(monkeypatch, tmp_path / "ours")

    async def scenario(world: World) -> None:
        secret = (await world.address()).secret
        said = await world.say(secret)  # at most an alert of TLS
        assert frame_of(Answer(number=HELLO)) not in said
        encrypt(monkeypatch, tmp_path / "theirs")
        with pytest.raises(WorkerError, match="worker-0 is not reached"):
            await connect("worker-0", await world.server.address(), DEADLINE_S)
        monkeypatch.delenv(USE)
        forget()
        with pytest.raises(WorkerError, match="worker-0 is not reached"):
            await connect("worker-0", await world.server.address(), DEADLINE_S)
        assert not world.actor.heard

    in_world(scenario)


def test_the_files_are_those_of_ray() -> None:
    named = dict(zip(FILES, ("c", "k", "a"), strict=True))
    assert ray_tls({}) is ray_tls({USE: "0"} | named) is None
    assert ray_tls({USE: "True"} | named) == TlsFiles(certificate="c", key="k", authority="a")
    with pytest.raises(ConfigFileError, match=f"{FILES[1]} is not"):
        ray_tls({USE: "1"} | named | {FILES[1]: ""})
