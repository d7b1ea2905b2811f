"""What identifies a deployment: its config, its model's fingerprint, and a hash of both.

Computed once where the application is built and passed to every actor. The hash ends up in actor
names; it leaves out what workers do not depend on, so that changing a limit at the edge does not
reload a model.
"""

import hashlib
import secrets
from pathlib import Path

import msgspec

from configs.schema import AppConfig

VERSION = "0.1.0"
HASH_DIGITS = 8
BLOCK_KEY_BYTES = 32
EDGE_ONLY = ("name", "edge", "api", "tracing")


class DeploymentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an actor is told at its creation."""

    config: AppConfig
    model: str  # fingerprint of the model folder
    hash: str
    # Secret of the block hashes, the same in all workers, so that what they report can be compared.
    # Not part of the hash: workers of a deployment that goes on keep theirs.
    block_key: bytes
    namespace: str = ""  # Ray namespace of all actors; known once the application runs

    def in_application(self, app_name: str) -> "DeploymentSpec":
        """The same, running as the Serve application `app_name`: two of them never share actors."""
        return msgspec.structs.replace(self, namespace=self.config.name or app_name)


def describe_deployment(config: AppConfig) -> DeploymentSpec:
    """Read the model folder's identity (not its weights) and hash it with the config."""
    model = _model_fingerprint(Path(config.model.path))
    sections = msgspec.to_builtins(config)
    for section in EDGE_ONLY:
        del sections[section]
    digest = hashlib.blake2b(msgspec.json.encode([VERSION, model, sections]), digest_size=16)
    return DeploymentSpec(
        config=config,
        model=model,
        hash=digest.hexdigest()[:HASH_DIGITS],
        block_key=secrets.token_bytes(BLOCK_KEY_BYTES),
    )


def _model_fingerprint(folder: Path) -> str:
    """Names, sizes and times of the folder's files, and the content of config.json."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(p for p in folder.iterdir() if p.is_file()):
        status = path.stat()
        digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    digest.update((folder / "config.json").read_bytes())
    return digest.hexdigest()
