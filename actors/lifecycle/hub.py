"""Fetches a model of the Hugging Face Hub into its cache, once, before anything starts.

huggingface_hub does the work and reads its own settings: HF_HOME, HF_TOKEN or a cached login,
HF_HUB_OFFLINE, HF_ENDPOINT. A model that is in the cache is used from there when the Hub cannot be
reached. Every actor opens the folder by its path, so each node needs it under the same one.
"""

from pathlib import Path

import msgspec

from configs.schema import AppConfig
from engine.errors import ConfigError
from engine.models.weight_files import check_format

TEXTS = ("*.json", "*.jinja")  # in subfolders too: a pattern's * matches a slash
WEIGHTS = "*.safetensors"
# Weights a second time, in another layout; and checkpoints of training.
UNREAD = ("consolidated*", "*/*.safetensors")


def fetch_model(config: AppConfig) -> AppConfig:
    """`config` with the folder of its model, which is downloaded if the Hub has a newer one.

    A `model.path` that is absolute is a folder already, as `config_from_environment` tells it.
    Raises ConfigError, in one line that says what to do.
    """
    model = config.model
    if Path(model.path).is_absolute():
        return config
    folder = _download(config)
    if model.weights == "safetensors" and not any(folder.glob(WEIGHTS)):
        check_format(_describe(config), _file_names(config))
    name = model.served_name
    if name is None and not config.api.served_model_names:
        name = model.path
    found = msgspec.structs.replace(model, path=str(folder), served_name=name)
    return msgspec.structs.replace(config, model=found)


def _download(config: AppConfig) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    patterns = [*TEXTS, *([WEIGHTS] if config.model.weights == "safetensors" else [])]
    try:
        folder = snapshot_download(
            config.model.path,
            revision=config.model.revision,
            allow_patterns=patterns,
            ignore_patterns=list(UNREAD),
        )
    except (OSError, HFValidationError) as error:  # the Hub's own errors are OSErrors
        raise ConfigError(f"{_describe(config)}: {_reason(config, error)}") from error
    return Path(folder).resolve()


def _file_names(config: AppConfig) -> list[str]:
    """The model's files on the Hub; none if it cannot be asked now."""
    from huggingface_hub import list_repo_files

    try:
        return list_repo_files(config.model.path, revision=config.model.revision)
    except OSError:
        return []


def _describe(config: AppConfig) -> str:
    model = config.model
    return model.path if model.revision is None else f"{model.path}@{model.revision}"


def _reason(config: AppConfig, error: Exception) -> str:
    """What went wrong and what to do about it, in one line."""
    from huggingface_hub import is_offline_mode
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name, told = config.model.path, str(error).strip().partition("\n")[0][:300]
    match error:
        case GatedRepoError():
            return (
                f"its owner wants its terms accepted; do so at https://huggingface.co/{name}, then"
                " run `hf auth login` or set HF_TOKEN"
            )
        case RepositoryNotFoundError():
            return (
                "there is no such folder here and no such model on the Hugging Face Hub, or it is"
                " private; check the name, or run `hf auth login` or set HF_TOKEN"
            )
        case RevisionNotFoundError():
            return "the model has no such revision; name a branch, a tag or a commit of it"
        case LocalEntryNotFoundError():
            why = "HF_HUB_OFFLINE is set" if is_offline_mode() else told
            return (
                "there is no such folder here, it is not in the cache, and the Hugging Face Hub"
                f" cannot be asked ({why}); connect to it, or run `hf download {name} --local-dir"
                " DIR` where that works, and set model= to a copy of DIR"
            )
    return f"the download from the Hugging Face Hub failed ({told}); try again"
