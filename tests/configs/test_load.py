"""Configuration files and the environment: what is accepted, and what the errors name."""

from pathlib import Path

import msgspec
import pytest
import yaml

from configs.errors import ConfigFileError
from configs.load import PROJECT_ROOT, config_from_environment, load_config
from configs.schema import AppConfig

DP = "enable_dp_attention: true, expert_parallel: true, tensor_parallel_size: 2"


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def test_no_file_and_no_overrides_give_the_defaults() -> None:
    assert load_config(None, {}) == AppConfig()


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "# nothing\n"), {}) == AppConfig()


@pytest.mark.parametrize("path", sorted((PROJECT_ROOT / "configs").glob("*.yaml")), ids=str)
def test_every_shipped_file_loads_and_says_what_it_holds(path: Path) -> None:
    config = load_config(path, {})
    plain = msgspec.to_builtins(config)
    for section, values in yaml.safe_load(path.read_text()).items():
        if isinstance(values, dict):
            for key, value in values.items():
                assert plain[section][key] == value
        else:
            assert plain[section] == values


@pytest.mark.parametrize("path", sorted((PROJECT_ROOT / "configs").glob("*.yaml")), ids=str)
def test_a_shipped_file_repeats_no_default_but_where_and_by_whom_it_computes(path: Path) -> None:
    defaults = msgspec.to_builtins(AppConfig())
    repeated = {
        f"{section}.{key}"
        for section, values in yaml.safe_load(path.read_text()).items()
        for key, value in values.items()
        if defaults[section][key] == value
    }
    assert repeated <= {"model.device", "workers.unified", "workers.prefill", "workers.decode"}


def test_overrides_win_over_the_file_and_the_rest_stays(tmp_path: Path) -> None:
    path = write(tmp_path, "cache: {num_blocks: 77, block_size: 8}\nname: one\n")
    config = load_config(path, {"cache.num_blocks": 5, "edge.max_n": 3})
    assert (config.cache.num_blocks, config.cache.block_size) == (5, 8)
    assert (config.edge.max_n, config.name) == (3, "one")


# Settings that are valid as far as they go; a test adds what is not.
QUEUE = "laps: {queue: laps, window: adaptive"
CUDA = "{model: {device: cuda}, laps: {enable_batch_prefill_cuda_graph: true}"
GRID = "{model: {device: cuda}, laps: {batch_prefill_form: grid"
POOLS = "{workers: {unified: 4}, laps: {enable_laps_alloc: true"


@pytest.mark.parametrize(
    "text",
    [
        f"{QUEUE}}}",
        f"{CUDA}}}",
        f"{GRID}}}}}",
        f"{GRID}, batch_prefill_batch_sizes: [3, 64], batch_prefill_seq_lengths: [7]}}}}",
        "laps: {enable_batch_prefill_cuda_graph: false}",
        f"{POOLS}}}}}",
    ],
)
def test_the_features_of_laps_can_be_switched_on(tmp_path: Path, text: str) -> None:
    assert load_config(write(tmp_path, text), {}).laps != AppConfig().laps


def test_the_defaults_of_laps_are_the_published_ones() -> None:
    laps = AppConfig().laps
    assert (laps.laps_length_threshold, laps.laps_alloc_threshold) == (256, 256)
    assert (laps.laps_rebalance_interval_s, laps.laps_rebalance_ratio) == (5.0, 2.0)
    assert laps.batch_prefill_batch_sizes == (1, 2, 4, 8)
    assert laps.batch_prefill_seq_lengths == (16, 32, 64, 128, 256)
    assert laps.batch_prefill_max_seq_len == 256
    assert laps.queue == "priority"
    assert not laps.enable_laps_alloc
    # By the device: ragged graphs wherever attention can be captured.
    assert (laps.enable_batch_prefill_cuda_graph, laps.batch_prefill_form) == (None, "ragged")


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("cahce: {}", ["cahce: unknown key; is cache meant?; allowed: ", "scheduler"]),
        ("zebra: {}", ["zebra: unknown key; allowed: "]),
        ("cache: {blocks: 3}", ["cache.blocks", "unknown key", "num_blocks"]),
        ("cache: {num_blocks: many}", ["cache.num_blocks", "`int", "`str`", ">= 2"]),
        ("cache: {num_blocks: 1}", ["cache.num_blocks", ">= 2"]),
        ("model: {deterministic: true}", ["model.deterministic", "cuda"]),
        (
            "model: {deterministic: true, device: cuda}\nexecution: {round_expert_inputs_from: 65}",
            ["execution.round_expert_inputs_from", "model.deterministic", "one of the two"],
        ),
        ("execution: {cuda_graphs: true}", ["execution.cuda_graphs", "cuda"]),
        ("model: {attention: {decode: magic}}", ["model.attention.decode", "triton", "flashinfer"]),
        ("cache: {num_blocks: true}", ["cache.num_blocks", "`bool`"]),
        ("cache: {protected_share: 1.5}", ["cache.protected_share", "<= 1"]),
        ("cache: {protected_share: .nan}", ["cache.protected_share"]),
        ("edge: {request_timeout_s: .inf}", ["edge.request_timeout_s", "finite"]),
        ("cache: 3", ["cache", "a section with", "num_blocks"]),
        ("model: {device: tpu}", ["model.device", "cpu", "cuda"]),
        ("model: {max_model_len: 0}", ["model.max_model_len", ">= 1"]),
        ("[1, 2]", ["sections", "list"]),
        ("cache: {num_blocks: 3, num_blocks: 4}", ["num_blocks", "twice"]),
        ("1: 2", ["not a string"]),
        ("name: a\nlaps: [", ["not valid YAML: line 2, column 8: expected the node content"]),
        ("a: !!python/object:os.system {}", ["not valid YAML"]),
        ("workers: {prefill: 1, unified: 0}", ["workers", "decode 0", "both"]),
        ("workers: {decode: 1, unified: 0}", ["workers", "prefill 0", "both"]),
        ("workers: {unified: 0}", ["workers", "nothing can serve"]),
        ("workers: {prefill: 1, decode: 1}", ["unified 1", "not supported yet", "to 0"]),
        ("workers: {num_gpus: 1}", ["num_gpus", "device cpu"]),
        ("workers: {tensor_parallel_size: 3}", ["workers.tensor_parallel_size", "1, 2, 4, 8"]),
        (
            "workers: {decode_tensor_parallel_size: 2}",
            ["workers.decode_tensor_parallel_size", "no such workers", "set tensor_parallel_size"],
        ),
        ("cache: {disk_path: kv}", ["cache.disk_path: kv", "set cache.host_gib"]),
        ("cache: {host_gib: -1}", ["cache.host_gib", ">= 0"]),
        ("cache: {host_answers: true}", ["cache.host_answers", "set cache.host_gib"]),
        (
            "cache: {host_answers: true, host_gib: 1}",
            ["cache.host_answers", "no decode workers", "set workers.decode"],
        ),
        (
            "cache: {host_answers: true, host_gib: 1}\n"
            "workers: {unified: 0, prefill: 1, decode: 1, prefill_tensor_parallel_size: 2}",
            ["cache.host_answers", "workers of 1 and of 2 ranks", "to one number"],
        ),
        (
            "cache: {host_gib: 1, enable_prefix_caching: false}",
            ["cache.host_gib: 1", "enable_prefix_caching false", "set it to 0"],
        ),
        (
            "speculation: {ngrams_on_device: true}",
            ["speculation.ngrams_on_device", "drafter none", "set drafter to ngram"],
        ),
        (
            "handoff: {pull_by_ranks: true}\nworkers: {tensor_parallel_size: 2}",
            ["handoff.pull_by_ranks", "no prefill or decode worker", "or this to false"],
        ),
        (
            "workers: {tensor_parallel_size: 2, num_gpus: 2}\nmodel: {device: cuda}",
            ["workers.num_gpus: 2", "tensor_parallel_size 2", "set it to 1"],
        ),
        (
            "workers: {expert_parallel: true}",
            ["workers.expert_parallel", "one rank", "tensor_parallel_size above 1"],
        ),
        (
            "workers: {expert_exchange_min_tokens: 64, tensor_parallel_size: 2}",
            ["workers.expert_exchange_min_tokens", "whole experts only", "expert_parallel to true"],
        ),
        (
            "workers: {expert_exchange_min_tokens: 64, tensor_parallel_size: 2,"
            " expert_parallel: true, num_gpus: 1}\nmodel: {device: cuda, deterministic: true}",
            ["workers.expert_exchange_min_tokens", "model.deterministic", "leave it out"],
        ),
        (
            "workers: {sequence_parallel_min_tokens: 64}",
            ["workers.sequence_parallel_min_tokens", "one rank", "tensor_parallel_size above 1"],
        ),
        (
            "workers: {sequence_parallel_min_tokens: 64, tensor_parallel_size: 2,"
            " expert_parallel: true}",
            ["workers.sequence_parallel_min_tokens", "without experts", "expert_exchange_min"],
        ),
        (
            "workers: {enable_dp_attention: true, tensor_parallel_size: 2}",
            ["workers.enable_dp_attention", "whole experts", "expert_parallel to true"],
        ),
        (
            f"workers: {{{DP}, expert_exchange_min_tokens: 64}}",
            ["workers.enable_dp_attention", "every step", "leave out expert_exchange_min_tokens"],
        ),
        (
            f"workers: {{{DP}, unified: 0, prefill: 1, decode: 1}}\n"
            "handoff: {pull_by_ranks: true}",
            ["workers.enable_dp_attention", "pull_by_ranks", "one of the two"],
        ),
        (
            f"workers: {{{DP}}}\nlaps: {{batch_prefill_form: grid}}",
            ["workers.enable_dp_attention", "batch_prefill_form grid", "leave the latter out"],
        ),
        (
            "execution: {tbo_min_decode_rows: 16}",
            ["execution.tbo_min_decode_rows", "enable_two_batch_overlap"],
        ),
        (
            "execution: {enable_two_batch_overlap: true}",
            ["one rank", "workers.tensor_parallel_size"],
        ),
        (
            "execution: {enable_two_batch_overlap: true}\nworkers: {tensor_parallel_size: 2}",
            ["execution.tbo_min_prompt_tokens", "number of tokens"],
        ),
        (
            "execution: {tbo_token_distribution_threshold: 0.6}",
            ["execution.tbo_token_distribution_threshold", "<= 0.5"],
        ),
        ("laps: {laps_length_threshold: 0}", ["laps.laps_length_threshold", ">= 1"]),
        ("laps: {laps_alloc_threshold: -5}", ["laps.laps_alloc_threshold", ">= 1"]),
        ("laps: {laps_rebalance_ratio: 1.0}", ["laps.laps_rebalance_ratio", "> 1"]),
        ("laps: {laps_rebalance_interval_s: 0}", ["laps.laps_rebalance_interval_s", "> 0"]),
        ("laps: {min_workers_to_split: 1}", ["laps.min_workers_to_split", ">= 2"]),
        ("laps: {batch_prefill_batch_sizes: [0]}", ["laps.batch_prefill_batch_sizes", ">= 1"]),
        ("laps: {queue: sjf}", ["laps.queue", "fcfs", "priority"]),
        ("laps: {enable_laps_scheduler: true}", ["laps.enable_laps_scheduler", "queue: laps"]),
        ("cache: {gpu_memory_share: 0.5}", ["cache.gpu_memory_share", "gpu_memory_utilization"]),
        ("cache: {enable_prefix_cache: 0}", ["enable_prefix_cache has", "enable_prefix_caching"]),
        ("scheduler: {max_num_seqs: many}", ["scheduler.max_num_seqs", "integer >= 1", "auto"]),
        ("laps: {max_step_ms: 0}", ["laps.max_step_ms", "> 0", "auto"]),
        ("laps: {laps_length_threshold: auto}", ["laps.laps_length_threshold", "`str`"]),
        (f"{GRID}}}, scheduler: {{max_num_seqs: auto}}}}", ["grid needs", "max_num_seqs as a"]),
        ("scheduler: {max_rows: 4}", ["scheduler.max_num_seqs", "max_num_seqs"]),
        ("scheduler: {max_step_tokens: 4}", ["max_step_tokens", "max_num_batched_tokens"]),
        ("laps: {window: fixed}", ["laps.window", "queue laps"]),
        (f"{QUEUE}, min_window_s: 0.1}}", ["laps.min_window_s", "max_window_s 0.008"]),
        (f"{GRID}, batch_prefill_batch_sizes: []}}}}", ["batch_sizes", "at least one"]),
        (f"{GRID}, batch_prefill_batch_sizes: [2, 1]}}}}", ["batch_sizes", "ascending"]),
        (f"{GRID}, batch_prefill_seq_lengths: [16, 16]}}}}", ["seq_lengths", "once"]),
        (f"{GRID}, batch_prefill_max_seq_len: 128}}}}", ["seq_lengths: 256", "seq_len 128"]),
        (f"{GRID}, batch_prefill_max_rows: 256}}}}", ["max_rows", "batch_prefill_form ragged"]),
        (
            f"{GRID}, batch_prefill_max_seq_len: 600}}}}",
            ["seq_len: 600", "max_num_batched_tokens 512"],
        ),
        (f"{GRID}, batch_prefill_batch_sizes: [65]}}}}", ["batch_sizes: 65", "max_num_seqs 64"]),
        (f"{GRID}, enable_batch_prefill_cuda_graph: false}}}}", ["grid", "captures nothing"]),
        (f"{GRID}}}, execution: {{cuda_graphs: false}}}}", ["grid", "needs execution.cuda_graphs"]),
        ("laps: {batch_prefill_form: grid}", ["batch_prefill_form: grid", "needs model.device"]),
        ("laps: {batch_prefill_form: dense}", ["laps.batch_prefill_form", "ragged", "grid"]),
        ("laps: {batch_prefill_max_seq_len: 128}", ["laps.batch_prefill_max_seq_len", "form grid"]),
        ("laps: {batch_prefill_batch_sizes: [1]}", ["laps.batch_prefill_batch_sizes", "leave"]),
        ("laps: {enable_batch_prefill_cuda_graph: true}", ["cuda_graph: needs model.device cuda"]),
        (f"{CUDA}, execution: {{cuda_graphs: false}}}}", ["needs execution.cuda_graphs"]),
        ("laps: {enable_laps_alloc: true}", ["laps.enable_laps_alloc: 1 workers", "to_split 3"]),
        (f"{POOLS}, min_workers_per_pool: 3}}}}", ["laps.min_workers_per_pool", "4 workers"]),
        (f"{POOLS}, rebalance_cool_down_s: 1}}}}", ["laps.rebalance_cool_down_s", "set it to 0"]),
        ("lifetimes: {supervisor_heartbeat_s: 15}", ["supervisor_heartbeat_s", "15"]),
        ("lifetimes: {acknowledge_every_s: 11}", ["acknowledge_every_s", "10"]),
    ],
)
def test_a_bad_file_is_an_error_naming_file_key_and_choices(
    tmp_path: Path, text: str, fragments: list[str]
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigFileError) as caught:
        load_config(path, {})
    for fragment in [str(path), *fragments]:
        assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_utf8_or_not_there_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"name: caf\xe9")
    with pytest.raises(ConfigFileError, match="not valid YAML"):
        load_config(path, {})
    with pytest.raises(ConfigFileError, match="cannot be read"):
        load_config(tmp_path / "absent.yaml", {})


def test_an_override_through_something_that_is_no_section_is_an_error() -> None:
    with pytest.raises(ConfigFileError, match=r"name\.deep: name is not a section"):
        load_config(None, {"name": "x", "name.deep": 1})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    return folder


def test_arguments_win_over_the_environment_which_wins_over_the_file(
    tmp_path: Path, model: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    by_file = tmp_path / "file.yaml"
    by_file.write_text(f"name: by-file\nmodel: {{path: {other}}}\n")
    by_env = tmp_path / "env.yaml"
    by_env.write_text("name: by-env\n")

    environ = {"LAPS_CONFIG": str(by_env), "LAPS_MODEL": str(model)}
    config = config_from_environment({}, environ)
    assert (config.name, config.model.path) == ("by-env", str(model))

    config = config_from_environment({"config": str(by_file)}, environ)
    assert (config.name, config.model.path) == ("by-file", str(model))

    config = config_from_environment({"config": str(by_file), "model": str(other)}, environ)
    assert config.model.path == str(other)

    config = config_from_environment(
        {"config": str(by_file)}, {"LAPS_CONFIG": "", "LAPS_MODEL": ""}
    )
    assert config.model.path == str(other)


def test_the_default_is_the_dev_file_of_the_project_from_any_folder(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = config_from_environment({"model": "models/tiny"}, {})
    expected = load_config(PROJECT_ROOT / "configs" / "dev_cpu.yaml", {"model.path": str(model)})
    assert config == expected
    named = config_from_environment({"config": "configs/unified_cpu.yaml", "model": str(model)}, {})
    assert named.workers.unified == 1


def test_the_folder_of_what_drafts_is_found_as_the_models_is(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "speculation: {drafter: draft_model, model_path: %s}"
    for named, found in (
        ("models/tiny", model),
        ("demo_model/laps-demo", PROJECT_ROOT / "demo_model" / "laps-demo"),
    ):
        path = write(tmp_path, text % named)
        config = config_from_environment({"config": str(path), "model": str(model)}, {})
        assert config.speculation.model_path == str(found)


def test_the_process_environment_is_the_default_one(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAPS_MODEL", str(model))
    monkeypatch.delenv("LAPS_CONFIG", raising=False)
    assert config_from_environment({}).model.path == str(model)


def test_a_missing_model_folder_says_what_to_set(tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    file.write_bytes(b"")
    for absent in (str(tmp_path / "nowhere"), str(file)):
        with pytest.raises(ConfigFileError) as caught:
            config_from_environment({"model": absent}, {})
        for fragment in (absent, "LAPS_MODEL", "model="):
            assert fragment in str(caught.value)


def test_a_missing_file_and_an_unknown_argument_say_what_is_allowed(model: Path) -> None:
    with pytest.raises(ConfigFileError, match=r"nowhere\.yaml.*LAPS_CONFIG"):
        config_from_environment({"config": "nowhere.yaml", "model": str(model)}, {})
    with pytest.raises(ConfigFileError, match="unknown argument modle; allowed: config, model"):
        config_from_environment({"modle": str(model)}, {})
