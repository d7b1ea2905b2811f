"""Reads which layers see only a window of the keys before them, and how long it is.

A window is in tokens: a query sees itself and the window - 1 keys before it; None = all before it.
All functions raise ConfigError, naming the key and what is supported.
"""

from engine.models.config_file import ConfigFile


def alternating_windows(
    config: ConfigFile, num_layers: int, *, default: int, full_every: int
) -> tuple[int | None, ...]:
    """From `layer_types` if present; else every `full_every`-th layer has no window."""
    if config.has_key("sliding_window") and config.optional_integer("sliding_window") is None:
        raise config.error("sliding_window", "null is not supported for this architecture")
    window = config.integer("sliding_window", default)
    kinds = _layer_types(config, num_layers)
    if kinds is None:
        return tuple(None if (i + 1) % full_every == 0 else window for i in range(num_layers))
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def qwen_windows(config: ConfigFile, num_layers: int) -> tuple[int | None, ...]:
    """From `layer_types` if present; else layers from `max_window_layers` on have the window."""
    window = qwen_window(config)
    layer_types = _layer_types(config, num_layers)
    if layer_types is None:
        first = config.integer("max_window_layers", 28, minimum=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if window is None and "sliding_attention" in layer_types:
        raise config.error(
            "layer_types", "names sliding_attention, but use_sliding_window or its length is unset"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def qwen2_moe_windows(config: ConfigFile, num_layers: int) -> tuple[int | None, ...]:
    """As in Qwen2 where `layer_types` says it; else every other of the first layers has one."""
    if config.texts("layer_types") is not None:
        return qwen_windows(config, num_layers)
    window = qwen_window(config)
    end = config.integer("max_window_layers", 28, minimum=0)
    return tuple(window if i % 2 == 0 and i < end else None for i in range(num_layers))


def qwen_window(config: ConfigFile) -> int | None:
    """The window of those layers that have one; None = no layer has."""
    if not config.flag("use_sliding_window", False):
        return None  # files of such models may say a length of 0
    window = config.optional_integer("sliding_window")
    if window is None and not config.has_key("sliding_window"):
        window = 4096
    return window


def _layer_types(config: ConfigFile, num_layers: int) -> tuple[str, ...] | None:
    layer_types = config.texts("layer_types")
    if layer_types is None:
        return None
    if len(layer_types) != num_layers:
        raise config.error("layer_types", f"has {len(layer_types)} entries for {num_layers} layers")
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise config.error(
            "layer_types",
            f"{sorted(unknown)} not supported; supported: full_attention, sliding_attention",
        )
    return layer_types
