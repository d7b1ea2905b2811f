"""What placement knows of tiers that several workers share."""

from engine.messages import BlockChanges, TierReport
from engine.routing.tier_hits import StoredHit, TierHits

BLOCK_SIZE = 16
CHAIN = [bytes([i] * 16) for i in range(4)]


def _report(added: list[bytes] | None, incarnation: str) -> TierReport:
    """Of the arena of the one machine; None = it was not asked for its blocks."""
    blocks = None
    if added is not None:
        blocks = BlockChanges(
            incarnation=incarnation, sequence=0, is_resync=True, added=added, removed=[]
        )
    return TierReport(place="arena", block_s=1e-3, floor_s=0.5, blocks=blocks)


def test_one_worker_tells_for_all_and_another_after_its_end() -> None:
    hits = TierHits(BLOCK_SIZE)
    for worker in ("a", "b"):
        assert hits.apply(worker, [_report(None, worker)])
        assert hits.after(worker) == ({"arena": None} if worker == "a" else {})
    assert hits.apply("a", [_report(CHAIN[:3], "a")])
    found = StoredHit(3 * BLOCK_SIZE, 0.5 + 3e-3)
    assert hits.hits(CHAIN, {}) == {"a": found, "b": found}
    late = _report(CHAIN[:1], "b")  # which it was asked for while it told
    assert hits.apply("b", [late])
    assert hits.hits(CHAIN, {}) == {"a": found, "b": found}
    assert hits.hits(CHAIN, {"a": 2 * BLOCK_SIZE})["a"].num_tokens == BLOCK_SIZE
    hits.forget("a")
    assert hits.hits(CHAIN, {}) == {"b": found}, "what it told is true until another tells"
    assert set(hits.after("b")) == {"arena"}
    assert hits.apply("b", [late])
    assert hits.hits(CHAIN, {})["b"].num_tokens == BLOCK_SIZE
