"""Who may import whom: the table behind the layering test.

The tables follow the tree; `test_house_rules.py` applies them.
"""

ROOMS = ("configs", "kernels", "engine", "actors", "serve_app", "load_tests", "demo_model")

_TEXT = (
    "engine.errors",
    "engine.request",
    "engine.messages",
    "engine.scheduling.plan",
    "engine.token_bytes",
    "engine.detokenizing",
    "engine.stop_strings",
)

# Longest matching prefix wins. Value: project modules that prefix may import. A new module of
# `engine` has to be entered here.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "configs.schema": (),
    "configs": ("configs",),
    "kernels": ("kernels",),
    "demo_model": ("demo_model",),
    # -- engine: words
    "engine": (),
    "engine.errors": (),
    "engine.clock": (),
    "engine.request": ("engine.errors",),
    "engine.messages": ("engine.request", "engine.kv.layout", "engine.scheduling.plan"),
    # -- engine: text
    "engine.token_bytes": _TEXT,
    "engine.detokenizing": _TEXT,
    "engine.stop_strings": _TEXT,
    "engine.output_text": _TEXT,
    "engine.tokenizing": _TEXT,
    "engine.chat_template": _TEXT,
    # -- engine: blocks
    "engine.kv.layout": (),
    "engine.kv.block_hash": (),
    "engine.kv.block_pool": ("engine.errors",),
    "engine.kv.prefix_index": ("engine.errors", "engine.kv.block_pool"),
    "engine.kv.block_cache": ("engine.kv.block_pool", "engine.kv.prefix_index"),
    "engine.kv.request_hasher": ("engine.kv.block_hash", "engine.request"),
    "engine.kv.block_tables": ("engine.errors",),
    "engine.kv.kv_store": ("kernels", "engine.errors", "engine.kv.layout"),
    "engine.kv": (
        "engine.clock",
        "engine.errors",
        "engine.request",
        "engine.messages",
        "engine.kv.block_cache",
        "engine.kv.handoff_incoming",
        "engine.kv.handoff_outgoing",
    ),
    "engine.invariants": ("engine.kv.block_cache",),
    # -- engine: decisions
    "engine.scheduling.plan": ("engine.request",),
    "engine.scheduling.placement": ("engine.messages",),
    "engine.scheduling": (
        "configs.schema",
        "engine.errors",
        "engine.clock",
        "engine.request",
        "engine.messages",
        "engine.scheduling",
        "engine.kv.block_cache",
    ),
    "engine.core": ("engine.clock", "engine.scheduling"),
    # -- engine: tensors
    "engine.layers": ("kernels", "engine.errors", "engine.layers"),
    "engine.models": ("engine.errors", "engine.layers", "engine.models", "engine.kv.layout"),
    "engine.sampling": (
        "kernels",
        "engine.errors",
        "engine.request",
        "engine.sampling",
        "engine.scheduling.plan",
    ),
    "engine.execution": (
        "kernels",
        "engine.errors",
        "engine.request",
        "engine.kv.block_tables",
        "engine.kv.kv_store",
        "engine.kv.layout",
        "engine.layers",
        "engine.models",
        "engine.sampling",
        "engine.execution",
        "engine.scheduling.plan",
    ),
    "engine.build": ("configs.schema", "engine"),
    # -- processes
    "actors.handles": ("engine.errors", "engine.messages", "engine.request"),
    "actors.preflight": (
        "configs.schema",
        "engine.errors",
        "engine.models.spec",
        "engine.models.weight_files",
        "engine.tokenizing",
    ),
    "actors": (
        "configs.schema",
        "actors",
        "engine.build",
        "engine.chat_template",
        "engine.clock",
        "engine.core",
        "engine.errors",
        "engine.invariants",
        "engine.kv.handoff",
        "engine.kv.layout",
        "engine.messages",
        "engine.output_text",
        "engine.request",
        "engine.scheduling.contracts",
        "engine.scheduling.placement",
        "engine.scheduling.plan",
        "engine.stop_strings",
        "engine.tokenizing",
    ),
    "serve_app": ("configs", "actors"),
    # -- load
    "load_tests": ("load_tests",),
    "load_tests.bench_engine": ("load_tests", "configs", "engine"),
    "load_tests.simulate": ("load_tests", "configs", "engine"),
}

# Third-party name -> the only prefixes that may import it.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "ray": ("actors", "serve_app"),
    "fastapi": ("actors.ingress",),
    "starlette": ("actors.ingress",),
    "triton": ("kernels",),
    "flashinfer": ("kernels",),
    "torch": (
        "actors.handoff.channels",
        "demo_model",
        "kernels",
        "engine.build",
        "load_tests.bench_engine",
        "engine.kv.block_tables",
        "engine.kv.kv_store",
        "engine.layers",
        "engine.models",
        "engine.sampling",
        "engine.execution",
    ),
    "transformers": (
        "demo_model",
        "engine.chat_template",
        "engine.models",
        "load_tests.bench_engine",
    ),
    "tokenizers": ("demo_model", "engine.tokenizing"),
    "safetensors": ("engine.models",),
    "yaml": ("configs.load", "load_tests"),
    "locust": ("load_tests",),
}
