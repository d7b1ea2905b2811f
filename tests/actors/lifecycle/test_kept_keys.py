"""The key of block hashes is drawn at each start, unless a disk tier keeps blocks for the next."""

from pathlib import Path

from actors.lifecycle.deployment import describe_deployment
from configs.load import load_config


def _key(keys: dict[str, object]) -> bytes:
    return describe_deployment(load_config(None, keys)).block_key


def test_blocks_of_a_disk_tier_are_found_by_the_same_model_and_cache_alone(tmp_path: Path) -> None:
    assert _key({}) != _key({})
    kept: dict[str, object] = {"cache.host_gib": 1, "cache.disk_path": str(tmp_path / "kv")}
    assert _key(kept) == _key({**kept, "scheduler.max_num_seqs": 8})
    assert _key(kept) != _key({**kept, "model.max_model_len": 64})
    experts: dict[str, object] = {
        "workers.tensor_parallel_size": 2,
        "workers.expert_parallel": True,
    }
    own_requests = {**experts, "workers.enable_dp_attention": True}
    layouts = [{}, {"speculation.drafter": "mtp"}, experts, own_requests]
    keys = {_key({**kept, **layout}) for layout in layouts}
    assert len(keys) == len(layouts), "both deployments run for a while"
    (tmp_path / "kv" / "key").unlink()
    assert len({_key(kept), _key(kept)}) == 1
    other: dict[str, object] = {**kept, "cache.disk_path": str(tmp_path / "other")}
    assert _key(kept) != _key(other)
