"""Finds the reasons of a bad start before anything starts, in well under a second.

A worker finds the same when it loads, and more; but then a cluster is up, Serve has tried three
times, and the reason is far up in the log. Reads only the headers of the weights, and imports
neither torch nor Ray.
"""

import logging
import socket
from ipaddress import ip_address
from pathlib import Path

from configs.schema import AppConfig
from engine.errors import ConfigError, RequestError
from engine.models.quantization.published_tensors import check_shares
from engine.models.spec import load_spec
from engine.models.weight_files import check_format, check_weights
from engine.ranks.rank import Rank
from engine.text.chat_template import check_templates, read_template_text
from engine.text.tokenizing import TOKENIZER_FILE, Tokenizing, load_tokenizer

logger = logging.getLogger(__name__)


def check_startable(config: AppConfig) -> None:
    """Raises ConfigError, naming file or key: what the workers would refuse to start with."""
    _check_address(config.handoff.address)
    folder = Path(config.model.path)
    if config.model.weights == "safetensors":
        check_format(str(folder), (path.name for path in folder.glob("*")))
    for size in set(config.workers.num_ranks.values()):
        spec = load_spec(
            folder,
            quantization=config.model.quantization,
            sharing=config.workers.expert_sharing_of(size),
        )
        for rank in (Rank(index, size) for index in range(size)):
            spec.of_rank(rank)
            check_shares(spec, rank, is_on_gpu=config.model.device == "cuda")
    asked = config.model.max_model_len
    if asked is not None and asked > spec.max_model_len:
        raise ConfigError(
            f"model.max_model_len is {asked}, but {folder} allows {spec.max_model_len} tokens"
        )
    if config.model.weights == "safetensors":
        check_weights(folder, spec)
    check_templates(folder)
    tokenizing = load_tokenizer(folder, spec.vocab_size)
    _check_ids(folder, tokenizing, spec.vocab_size)


def _check_address(address: str | None) -> None:
    """Refuses an address that no actor could listen on: the start would wait for it for ever.

    And one that stands for all of a machine's: others are told to call it, and cannot.
    """
    if address is None:
        return
    try:
        found = socket.getaddrinfo(address, None)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"handoff.address: {address!r} is no address that this machine knows ({error}); set"
            " 127.0.0.1 where all runs on one machine, or leave it out"
        ) from error
    if any(ip_address(place[0]).is_unspecified for *_, place in found):
        raise ConfigError(
            f"handoff.address: {address!r} stands for all addresses of a machine, and other actors"
            " must call one of them; set 127.0.0.1 where all runs on one machine, or leave it out:"
            " then it is the node's"
        )


def _check_ids(folder: Path, tokenizing: Tokenizing, num_embeddings: int) -> None:
    """Logs or refuses a tokenizer that has tokens without an embedding in the model.

    Models with a padding token of that kind are common and work without it. A prompt with such a
    token gets a 400; where every prompt has one, nothing could be served.
    """
    beyond = tokenizing.beyond_model
    tokens, embeddings = folder / TOKENIZER_FILE, folder / "config.json"
    (ids,) = tokenizing.encode_batch(["a"], add_special_tokens=True)
    if isinstance(ids, RequestError):
        raise ConfigError(
            f"{tokens}: every prompt is refused, for vocab_size of {embeddings} gives the model"
            f" only {num_embeddings} embeddings ({ids.message}); use the tokenizer that the weights"
            " were trained with"
        )
    if not beyond:
        return
    template = read_template_text(folder) or ""
    in_template = [token for token in beyond.values() if token in template]
    written = f"; the chat template writes {', '.join(in_template)}" if in_template else ""
    logger.warning(
        "%s has tokens up to id %d, but vocab_size of %s gives the model only %d embeddings:"
        " prompts that hold one of the %d others get a 400 (%s%s)",
        tokens,
        max(beyond),
        embeddings,
        num_embeddings,
        len(beyond),
        ", ".join(list(beyond.values())[:5]),
        written,
    )
