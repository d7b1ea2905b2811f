"""Drafts the tokens that followed the same words before: in the request, or in finished answers.

    text    ... d e f g x y z ... d e f g      longest end seen before: d e f g
                        drafts: x y z          what followed it the last time

A *gram* is `min_match` tokens; a *place* is the position of a token. An index knows the newest
place that follows each gram, and for each place the one before it that follows the same gram: a
chain, newest first, as in zlib's deflate. A proposal walks at most `max_candidates` places of the
chain, counts how many tokens before each equal the end of the text (at most `max_match`), and takes
the longest match, the newest of equal ones. The request's own text wins a tie with the answers.

The cost of a proposal is that of the tokens new since the last one, the candidates and the drafts,
never of the whole text. Memory is 12 bytes and at most one entry of a dictionary for each token of
a live request, and for at most `max_corpus_tokens` tokens of finished answers: the oldest goes
first. Knows no model, no device and no scheduler. The same calls give the same drafts.
"""

from array import array
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

END = -1  # in the place after a finished answer; equal to no token
NONE = -1  # no place
ID_BITS = 32  # a gram is one integer, its ids side by side


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramRules:
    """What counts as a match, how much is searched and how much is kept."""

    min_match: int = 2  # tokens; a shorter match proposes nothing
    max_match: int = 32  # tokens; longer matches count as equally long
    max_candidates: int = 16  # places looked at in each of the two indices
    max_corpus_tokens: int = 262_144  # one more for each answer; 0 = answers are not kept
    quote_tokens: int = 128  # of an answer, for who searches no answers

    def __post_init__(self) -> None:
        assert 1 <= self.min_match <= self.max_match, f"{self.min_match} to {self.max_match}"
        assert self.max_candidates >= 1, "a search needs a candidate"
        assert self.quote_tokens > self.max_match, "a quote has what follows a match"


DEFAULT_RULES = NgramRules()


@dataclass(frozen=True, slots=True)
class Match:
    """The `num_tokens` tokens before `place` equal the end of a text; drafts begin at `place`."""

    num_tokens: int
    place: int


NO_MATCH = Match(0, NONE)


@dataclass(frozen=True, slots=True)
class Quote:
    """A part of a finished answer: its tokens, and the place of the first."""

    start: int
    token_ids: list[int]
    ends_answer: bool

    def has(self, match: Match, num_after: int) -> bool:
        """Whether it has all of the match, and `num_after` tokens behind or all that there are."""
        num_left = self.start + len(self.token_ids) - match.place
        is_enough = num_left >= num_after or self.ends_answer
        return self.start <= match.place - match.num_tokens and num_left > 0 and is_enough


NO_QUOTE = Quote(NONE, [], ends_answer=True)


class GramIndex:
    """Texts one after the other, and the places that follow each gram.

    A gram that ends a text is not indexed until a token follows it, since it predicts nothing. Law:
    the chain of a gram holds the places that follow it within one text, all of them, newest first,
    down to `first`.
    """

    def __init__(self, rules: NgramRules) -> None:
        self.first = 0  # the oldest place held
        self.end = 0  # one past the newest place
        self.num_operations = 0  # places indexed or dropped, candidates and tokens compared
        self._rules = rules
        self._offset = (
            0  # place of the first element of both arrays; places before `first` are dead
        )
        self._tokens = array("i")
        self._before = array("q")  # for each place, the place before that follows the same gram
        self._newest: dict[int, int] = {}  # gram -> the newest place that follows it
        self._mask = (1 << ID_BITS * rules.min_match) - 1

    @property
    def num_grams(self) -> int:
        return len(self._newest)

    def extend(self, token_ids: Sequence[int], start: int) -> None:
        """Append `token_ids` to the last text, which begins at place `start`."""
        place = max(self.end, start + self._rules.min_match)  # the first that follows a gram
        num_unindexed = min(place - self.end, len(token_ids))
        self._tokens.extend(token_ids)
        self.end += len(token_ids)
        self.num_operations += len(token_ids)
        if num_unindexed:
            self._before.extend([NONE] * num_unindexed)
        if place < self.end:
            self._index(place)

    def _index(self, first: int) -> None:
        """Enter the places from `first` to the end."""
        newest, before, mask = self._newest, self._before, self._mask
        gram = self._gram_before(first)
        append = before.append
        for place, token_id in enumerate(self._tokens[first - self._offset :], first):
            append(newest.get(gram, NONE))
            newest[gram] = place
            gram = (gram << ID_BITS | token_id) & mask

    def end_text(self) -> int:
        """Close the last text; returns the place where the next one begins."""
        self._tokens.append(END)
        self._before.append(NONE)
        self.end += 1
        return self.end

    def drop(self, end: int) -> None:
        """Forget the oldest text, which takes the places [first, end), with its `END`."""
        for place in range(self.first + self._rules.min_match, end - 1):
            gram = self._gram_before(place)
            if self._newest[gram] == place:
                del self._newest[gram]
        self.num_operations += end - self.first
        self.first = end
        num_dead = end - self._offset
        if 2 * num_dead >= len(self._tokens):  # so each place is moved about once
            del self._tokens[:num_dead], self._before[:num_dead]
            self._offset = end

    def has(self, gram: int) -> bool:
        """Whether anything follows it."""
        return gram in self._newest

    def longest_match(self, suffix: "array[int]") -> Match:
        """The longest match for the end of `suffix`, newest first among those looked at."""
        rules, best = self._rules, NO_MATCH
        if len(suffix) < rules.min_match:
            return best
        place = self._newest.get(_gram(suffix[-rules.min_match :]), NONE)
        for _ in range(rules.max_candidates):
            if place < self.first:  # none, or dropped
                break
            num_tokens = self._num_equal(place, suffix)
            if num_tokens > best.num_tokens:
                best = Match(num_tokens, place)
                if num_tokens == len(suffix):
                    break
            place = self._before[place - self._offset]
        return best

    def _num_equal(self, place: int, suffix: "array[int]") -> int:
        """How many tokens before `place` equal the end of `suffix`; a gram is known to."""
        tokens, at = self._tokens, place - self._offset
        num = self._rules.min_match
        most = min(len(suffix), at)
        if tokens[at - most : at] == suffix[-most:]:  # at once: text that repeats is often alike
            num = most
        while num < most and tokens[at - num - 1] == suffix[-num - 1]:
            num += 1
        self.num_operations += 1 + num - self._rules.min_match
        return num

    def following(self, place: int, num_tokens: int) -> list[int]:
        """At most `num_tokens` tokens from `place` to the end of its text.

        If that is the end of the index, the copy goes on with itself: a text that repeats is
        expected to go on repeating.
        """
        at = place - self._offset
        found = list(self._tokens[at : at + num_tokens])
        if END in found:
            return found[: found.index(END)]
        period = len(found)
        found.extend(found[i % period] for i in range(num_tokens - period))
        return found

    def quote(self, place: int, num_tokens: int) -> Quote:
        """At most `num_tokens` tokens of the text around `place`: a longest match, what follows."""
        start = max(self.first, place - self._rules.max_match)
        before = list(self._tokens[start - self._offset : place - self._offset])
        if END in before:
            start = place - before[::-1].index(END)
        found = list(self._tokens[start - self._offset : start - self._offset + num_tokens])
        end = found.index(END) if END in found else len(found)
        return Quote(start, found[:end], ends_answer=end < len(found))

    def check(self) -> None:
        """Assert the law, place by place; for tests."""
        seen: dict[int, int] = {}
        tokens, size = self._tokens, self._rules.min_match
        assert len(tokens) == len(self._before), f"{len(tokens)} tokens, {len(self._before)} places"
        for at in range(self.first - self._offset + size, len(tokens)):
            if END in tokens[at - size : at + 1]:
                continue
            gram = _gram(tokens[at - size : at])
            before, expected = self._before[at], seen.get(gram, NONE)
            is_right = before == expected or (expected == NONE and before < self.first)
            assert is_right, f"place {at + self._offset} is after {before}, not {expected}"
            seen[gram] = at + self._offset
        assert seen == self._newest, f"{len(seen)} grams held, {len(self._newest)} indexed"

    def _gram_before(self, place: int) -> int:
        at = place - self._offset
        return _gram(self._tokens[at - self._rules.min_match : at])


def _gram(token_ids: Sequence[int]) -> int:
    gram = 0
    for token_id in token_ids:
        gram = gram << ID_BITS | token_id
    return gram


class NgramDrafter:
    """Proposes drafts for requests, each by its key, from their own tokens and finished answers.

    Law: answers kept = `corpus.end - corpus.first` <= `max_corpus_tokens`; one index a live key.
    """

    def __init__(self, rules: NgramRules = DEFAULT_RULES) -> None:
        self._rules = rules
        self._texts: dict[Hashable, GramIndex] = {}  # of requests not forgotten
        self._corpus = GramIndex(rules)
        self._answers: deque[int] = deque()  # one past the last place of each answer kept

    def propose(
        self,
        key: Hashable,
        token_ids: Sequence[int],
        num_drafts: int,
        *,
        with_corpus: bool = True,
    ) -> list[int]:
        """At most `num_drafts` tokens expected after `token_ids`; [] if nothing like it is known.

        `token_ids` are all known tokens of the request, prompt and output: those of the last call
        with this key, and newer ones. `with_corpus` False ignores the finished answers, as a
        request must that shares nothing with others (one with a salt).
        """
        if num_drafts <= 0:
            self.extend(key, token_ids)
            return []
        index, best = self._find(key, token_ids, with_corpus=with_corpus)
        return index.following(best.place, num_drafts) if best.num_tokens else []

    def _find(
        self, key: Hashable, token_ids: Sequence[int], *, with_corpus: bool
    ) -> tuple[GramIndex, Match]:
        """The longest match for the end of `token_ids`, and the index that it is in."""
        index, suffix = self.extend(key, token_ids), self._end_of(token_ids)
        best = index.longest_match(suffix)
        if with_corpus and best.num_tokens < len(suffix):
            elsewhere = self._corpus.longest_match(suffix)
            if elsewhere.num_tokens > best.num_tokens:
                return self._corpus, elsewhere
        return index, best

    def quote(
        self,
        key: Hashable,
        token_ids: Sequence[int],
        held: Quote,
        num_after: int,
        *,
        with_corpus: bool = True,
    ) -> Quote | None:
        """What to search besides the request's own text, by who cannot search finished answers.

        None = nothing like the end of `token_ids` is known. `held`: what is searched now, and what
        is returned while it has the longest match and `num_after` tokens behind it, or while that
        match is in the request itself.
        """
        own = self.extend(key, token_ids)
        # A text shorter than a gram has none in its own index; `_find` looks at its length.
        gram = _gram(token_ids[-self._rules.min_match :])
        if not (with_corpus and self._corpus.has(gram)):  # so no match is longer than its own
            return held if own.has(gram) else None
        index, best = self._find(key, token_ids, with_corpus=with_corpus)
        if best.num_tokens == 0:
            return None
        if index is not self._corpus or held.has(best, num_after):
            return held
        return index.quote(best.place, self._rules.quote_tokens)

    def _end_of(self, token_ids: Sequence[int]) -> "array[int]":
        """What a match may be as long as."""
        return array("i", token_ids[-self._rules.max_match :])

    def extend(self, key: Hashable, token_ids: Sequence[int]) -> GramIndex:
        """Index what is new in `token_ids`; returns the request's index."""
        text = self._texts.get(key)
        if text is None:
            text = self._texts[key] = GramIndex(self._rules)
        num_seen = text.end
        assert num_seen <= len(token_ids), f"{key} had {num_seen} tokens, now {len(token_ids)}"
        if num_seen < len(token_ids):
            text.extend(token_ids[num_seen:], 0)
        return text

    def forget(self, key: Hashable) -> None:
        """Drop the request's index; an unknown key is ignored."""
        self._texts.pop(key, None)

    def add_finished(self, token_ids: Sequence[int]) -> None:
        """Keep an answer's output tokens for all requests; of a longer one than fits, the last."""
        corpus, most = self._corpus, self._rules.max_corpus_tokens
        kept = token_ids[max(0, len(token_ids) - most + 1) :]
        if len(kept) <= self._rules.min_match or most == 0:
            return  # nothing in it follows a gram
        while self._answers and corpus.end - corpus.first + len(kept) + 1 > most:
            corpus.drop(self._answers.popleft())
        corpus.extend(kept, corpus.end)
        self._answers.append(corpus.end_text())

    def statistics(self) -> dict[str, int]:
        texts = self._texts.values()
        return {
            "num_requests": len(texts),
            "num_request_tokens": sum(text.end for text in texts),
            "num_answers": len(self._answers),
            "num_corpus_tokens": self._corpus.end - self._corpus.first,
            "num_grams": self._corpus.num_grams + sum(text.num_grams for text in texts),
            "num_operations": self._corpus.num_operations + sum(t.num_operations for t in texts),
        }

    def check(self) -> None:
        """Assert the laws of this drafter and its indices; for tests."""
        held = self._corpus.end - self._corpus.first
        assert held <= self._rules.max_corpus_tokens, f"{held} tokens of answers"
        for index in (self._corpus, *self._texts.values()):
            index.check()
