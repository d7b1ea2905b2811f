"""Schedules: drawn ahead from a seed, the same requests at every rate, shared prefixes."""

import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest

from load_tests.http_load.dialogue import (
    ChatDialogue,
    Content,
    IdDialogue,
    TextDialogue,
)
from load_tests.http_load.scenario import Changes, Scenario, ScenarioError, change, read_scenario
from load_tests.http_load.schedule import Piece, Session, draw_sessions, num_requests
from tests.harness.seeds import seed_of

SEED = seed_of(__name__)
CONTENT = Content(salt=SEED, vocab_size=1000)


def scenario(name: str, **changes: float) -> Scenario:
    return change(read_scenario(name), Changes(**({"seed": SEED} | changes)))  # type: ignore[arg-type]


def without_times(session: Session) -> Session:
    return replace(session, start_s=0.0)


@pytest.mark.parametrize("name", ["mixed", "chat", "documents", "agents"])
def test_one_seed_gives_one_schedule(name: str) -> None:
    sessions = draw_sessions(scenario(name))
    assert sessions == draw_sessions(scenario(name))
    assert sessions != draw_sessions(scenario(name, seed=SEED + 1))
    starts = [session.start_s for session in sessions]
    assert starts == sorted(starts)
    assert starts[-1] <= 60.0
    indices = [turn.index for session in sessions for turn in session.turns]
    assert indices == list(range(num_requests(sessions)))


@pytest.mark.parametrize("name", ["mixed", "documents", "agents"])
def test_a_higher_rate_brings_the_same_requests_closer_together(name: str) -> None:
    slow = draw_sessions(scenario(name, rate=3.0))
    fast = draw_sessions(scenario(name, rate=6.0))
    assert len(fast) > len(slow)
    for one, other in zip(slow, fast, strict=False):
        assert other.start_s == pytest.approx(one.start_s / 2)
        assert without_times(one) == without_times(other)


@pytest.mark.parametrize("cv", [0.0, 1.0, 3.0])
def test_gaps_have_the_mean_and_the_spread_that_were_asked_for(cv: float) -> None:
    bursty = msgspec.structs.replace(scenario("mixed", rate=200.0, duration_s=60.0), cv_of_gaps=cv)
    starts = [session.start_s for session in draw_sessions(bursty)]
    gaps = np.diff(starts)
    assert np.mean(gaps) == pytest.approx(1 / 200, rel=0.15)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(cv, abs=0.6)


def test_the_asked_for_share_of_clients_hangs_up_before_the_last_token() -> None:
    sessions = draw_sessions(scenario("mixed", rate=40.0, share_cancelled=0.2))
    turns = [turn for session in sessions for turn in session.turns]
    cancelled = [turn for turn in turns if turn.cancel_after_tokens is not None]
    assert len(cancelled) / len(turns) == pytest.approx(0.2, abs=0.05)
    assert all(1 <= (t.cancel_after_tokens or 0) < t.num_output_tokens for t in cancelled)
    assert all(
        turn.cancel_after_tokens is None
        for session in draw_sessions(scenario("mixed", share_cancelled=0.0))
        for turn in session.turns
    )


def test_shrinking_divides_every_length_and_keeps_the_classes() -> None:
    whole, small = scenario("mixed"), scenario("mixed", shrink=8)
    for one, other in zip(draw_sessions(whole), draw_sessions(small), strict=True):
        tokens, shrunk = one.turns[0].num_new_tokens, other.turns[0].num_new_tokens
        assert shrunk == max(1, tokens // 8)
        assert small.class_of(shrunk) == whole.class_of(tokens)


def test_documents_are_shared_and_questions_are_not() -> None:
    sessions = draw_sessions(scenario("documents", rate=20.0))
    pieces = [session.turns[0].pieces for session in sessions]
    documents = {p[0].name: p[0].num_tokens for p in pieces if len(p) == 2}
    assert len(documents) <= 16 < sum(len(p) == 2 for p in pieces)
    assert all(documents[p[0].name] == p[0].num_tokens for p in pieces if len(p) == 2)
    own = [p[-1].name for p in pieces]
    assert len(own) == len(set(own))


def test_conversations_come_at_the_rate_of_their_turns() -> None:
    sessions = draw_sessions(scenario("agents", rate=100.0))
    # 1,000 conversations of 6 turns on average: 0.2 is six times the spread of their sum.
    assert num_requests(sessions) / 60.0 == pytest.approx(100.0, rel=0.2)
    assert {session.turns[0].pieces[0].name for session in sessions} == {"system"}
    assert all(turn.think_s == 0.0 for turn in (session.turns[0] for session in sessions))


def test_a_turn_begins_with_all_that_was_said_before() -> None:
    rng = random.Random(SEED)
    dialogue = IdDialogue(CONTENT)
    prompts = []
    for turn in range(4):
        prompts.append(dialogue.ask([Piece(name=f"q {turn}", num_tokens=rng.randint(1, 9))]))
        answer = [rng.randrange(1000) for _ in range(turn)]
        dialogue.hear("", answer, Piece(name=f"a {turn}", num_tokens=3))
    for turn, (prompt, longer) in enumerate(pairwise(prompts)):
        assert isinstance(prompt, list)
        assert isinstance(longer, list)
        assert longer[: len(prompt)] == prompt
        # The first answer never came; what stands in has the length that was asked for.
        assert len(longer) > len(prompt) + (turn or 3)


def test_text_and_chat_say_the_same_words_as_often_as_a_word_has_tokens() -> None:
    content = Content(salt=SEED, vocab_size=1000, tokens_per_word=2.0)
    piece = Piece(name="q", num_tokens=30)
    text = TextDialogue(content).ask([piece])
    assert isinstance(text, str)
    assert len(text.split()) == 15
    chat = ChatDialogue(content)
    assert chat.ask([piece]) == [{"role": "user", "content": text}]
    chat.hear("yes", [], piece)
    messages = chat.ask([piece])
    assert [m["role"] for m in messages if isinstance(m, dict)] == ["user", "assistant", "user"]


def test_another_salt_says_something_else() -> None:
    piece = Piece(name="own 1", num_tokens=40)
    assert CONTENT.ids(piece) == CONTENT.ids(piece)
    assert CONTENT.ids(piece) != Content(salt=SEED + 1, vocab_size=1000).ids(piece)
    assert CONTENT.ids(piece) != CONTENT.ids(replace(piece, name="own 2"))


# ---- recorded traffic ----------------------------------------------------------------------------


def azure(tmp_path: Path, num: int) -> str:
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 18:15:{i:02}.500000,{100 + i},{i}" for i in range(num)]
    path = tmp_path / "azure.csv"
    path.write_text("\n".join(lines))
    return str(path)


def replay(name: str, path: str, **changes: float) -> list[Session]:
    asked = Changes(trace=path, seed=SEED, **changes)  # type: ignore[arg-type]
    return draw_sessions(change(read_scenario(name), asked))


def test_a_recording_is_replayed_at_its_own_times_or_at_a_rate(tmp_path: Path) -> None:
    path = azure(tmp_path, 31)
    sessions = replay("azure_trace", path, duration_s=20.0)
    assert [s.start_s for s in sessions] == pytest.approx(range(21))
    assert [s.turns[0].num_new_tokens for s in sessions] == list(range(100, 121))
    assert sessions[0].turns[0].num_output_tokens == 1  # recorded as 0
    faster = replay("azure_trace", path, duration_s=20.0, rate=31 / 15)
    assert [s.start_s for s in faster] == pytest.approx([i / 2 for i in range(31)])


def test_blocks_of_one_name_have_the_same_tokens_in_every_prompt(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 3, "hash_ids": [5, 6, 7]},
        {"timestamp": 2500, "input_length": 1024, "output_length": 3, "hash_ids": [5, 9]},
    ]
    path = tmp_path / "mooncake.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    one, other = replay("mooncake_trace", str(path))
    first = IdDialogue(CONTENT).ask(one.turns[0].pieces)
    second = IdDialogue(CONTENT).ask(other.turns[0].pieces)
    assert (len(first), len(second)) == (1100, 1024)
    assert first[:512] == second[:512]
    assert first[512:1024] != second[512:]


def test_a_trace_that_cannot_be_replayed_says_why(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="--trace PATH"):
        draw_sessions(read_scenario("azure_trace"))
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    for name in ("azure_trace", "mooncake_trace"):
        with pytest.raises(ScenarioError, match=r"other\.csv"):
            replay(name, str(path))
    with pytest.raises(ScenarioError, match="No such file"):
        replay("azure_trace", str(tmp_path / "none.csv"))


def test_a_load_that_nobody_comes_to_is_an_error() -> None:
    with pytest.raises(ScenarioError, match="nobody arrives"):
        draw_sessions(scenario("mixed", rate=1e-9))
