"""What can be known of a bad start before anything starts, in well under a second.

A worker finds the same when it loads, and more; but then a cluster is up, Serve has tried three
times, and the reason is far up in the log. Opens no weights and imports neither torch nor Ray.
"""

from collections import deque
from pathlib import Path

from configs.schema import AppConfig
from engine.errors import ConfigError
from engine.models.spec import load_spec
from engine.models.weight_files import weight_files
from engine.tokenizing import load_tokenizer


def check_startable(config: AppConfig) -> None:
    """Raises ConfigError, naming file or key: what the workers would refuse to start with."""
    folder = Path(config.model.path)
    spec = load_spec(folder)
    asked = config.model.max_model_len
    if asked is not None and asked > spec.max_model_len:
        raise ConfigError(
            f"model.max_model_len is {asked}, but {folder} allows {spec.max_model_len} tokens"
        )
    if config.model.weights == "safetensors":
        deque(weight_files(folder), maxlen=0)  # to its end: every shard is looked for
    load_tokenizer(folder)
