"""Leaves values out of cases: what `oneOf`, `not` and `else` forbid.

A case without the values of a schema is written as cases again, each of which shares no value with
that schema for certain: another type, a length or number outside its bounds, a constant that it
does not have, a property or item that it does not allow, or no property that it requires. An object
that is written has no properties but its own, which sets many alternatives apart. Where none of
these ways is open, the schema is refused: nothing is left in that could be wrong.
"""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from engine.constraints.cases import (
    Anything,
    Arrays,
    Case,
    CaseReader,
    Numbers,
    Objects,
    Strings,
    Values,
)
from engine.constraints.keywords import LOWER, STRICT, TYPES, UPPER, refused
from engine.constraints.membership import Membership
from engine.constraints.numbers import Bounds, integer_bounds, multiples_within, number_bounds
from engine.constraints.schema_reader import (
    ANY,
    NEVER,
    Conjunction,
    Part,
    SchemaReader,
    joined,
)

_MAX_TEXT = 400  # characters of constants that are left out of a string
_MAX_DEPTH = 3  # of properties and items within those that are compared
_MAX_CASES = 64  # into which one case may fall
_MAX_LEFT_OUT = 16  # constants that are left out of strings or numbers one by one
_MAX_FEW = 100  # integers that are taken as constants
_Range = tuple[int, int | None]


class _InseparableError(Exception):
    """Raised where no way is open to leave the values out."""


class Separation:
    """The cases of one document's conjunctions, without what is excluded."""

    def __init__(self, reader: SchemaReader, membership: Membership, cases: CaseReader) -> None:
        self._reader = reader
        self._membership = membership
        self._cases = cases
        self._known: dict[object, list[Case]] = {}
        self._depth = 0

    def cases(self, conjunction: Conjunction) -> list[Case]:
        """Cases with values of the conjunction only. Raises RequestError if it cannot be kept."""
        try:
            return self._cases_of(conjunction)
        except _InseparableError as error:
            part: Part = error.args[0]
            raise refused(part.where, part.reason) from error

    def is_apart(self, conjunction: Conjunction) -> bool:
        """Whether the parts alone have no value of what is excluded, as they are written."""
        whole = self.cases(Conjunction(conjunction.parts))
        return _is_same(self.cases(conjunction), whole)

    def _cases_of(self, conjunction: Conjunction) -> list[Case]:
        if conjunction.key not in self._known:
            whole = Conjunction(conjunction.parts)
            own = {id(part.schema) for part in self._reader.flat(whole).conjunction.excluded}
            others = [part for part in conjunction.excluded if id(part.schema) not in own]
            found: list[Case]
            if others:
                found = self._cases_of(whole)
                for part in others:
                    found = self._left(found, part)
            else:
                found = []
                for leaf in self._cases.leaves(whole):
                    cases: list[Case] = [leaf.case]
                    for part in leaf.excluded:
                        cases = self._left(cases, part)
                    found += cases
            self._known[conjunction.key] = found
        return self._known[conjunction.key]

    def _left(self, cases: Sequence[Case], part: Part) -> list[Case]:
        """`cases` without the values of a part."""
        excluded = Conjunction((part,))
        try:
            return [left for case in cases for left in self._without(case, excluded)]
        except _InseparableError as error:
            raise _InseparableError(part) from error

    def _without(self, case: Case, excluded: Conjunction) -> list[Case]:
        if isinstance(case, Values):
            return self._without_constants(case, excluded)
        others = self._cases.leaves(excluded, is_wide=True)
        left: list[Case] = [case]
        if others and isinstance(case, Anything):
            left = self._cases.of_each_type()
        for other in others:
            if not left:
                return []
            if not all(_is_whole_type(other.case, each) for each in left):
                left = [one for each in left for one in self._apart(each, other.case, excluded)]
            elif other.excluded:  # it has fewer values than its case
                raise _InseparableError
            else:
                return []
        return left

    def _apart(self, case: Case, other: Case, excluded: Conjunction) -> list[Case]:
        """`case` without the values of `other`, a wide case of `excluded`."""
        self._reader.spend(1)
        if _is_whole_type(other, case):
            return []
        match case, other:
            case Values(), _:
                return self._without_constants(case, excluded)
            case _, Values():
                return self._apart_from_constants(case, other, excluded)
            case Strings(), Strings():
                ranges = _outside((case.least, case.most), (other.least, other.most))
                return _each(case, ranges)
            case Numbers(), Numbers():
                return _numbers_apart(case, other)
            case Arrays(), Arrays():
                return self._arrays_apart(case, other)
            case Objects(), Objects():
                return self._objects_apart(case, other)
        return [case]

    def _without_constants(self, case: Values, excluded: Conjunction) -> list[Case]:
        kept = [v for v in case.values if not self._membership.has(excluded, v, surely=False)]
        if len(kept) == len(case.values):
            return [case]
        return [replace(case, values=tuple(kept))] if kept else []

    def _apart_from_constants(self, case: Case, other: Values, excluded: Conjunction) -> list[Case]:
        if not any(
            _is_of_kind(case, value) and self._membership.meets_all(case.parts, value, surely=False)
            for value in other.values
        ):
            return [case]
        if isinstance(case, Strings | Numbers) and len(other.values) <= _MAX_LEFT_OUT:
            return _without_each(case, other.values)
        few = few_values(case, _MAX_FEW)
        if few is None:
            raise _InseparableError
        where = case.where if isinstance(case, Numbers) else ""
        return self._without_constants(Values(case.parts, tuple(few), where), excluded)

    # ---- arrays and objects ---------------------------------------------------------------------

    def _arrays_apart(self, case: Arrays, other: Arrays) -> list[Case]:
        length = _length_of(case)
        ranges = _outside(length, _length_of(other, is_wide=True))
        if ranges == [length]:
            return [case]
        options: list[Case] = [
            replace(case, least=least, most=most, is_bounded=True) for least, most in ranges
        ]
        num_compared = max(len(case.prefix), len(other.prefix), 1)
        for i in range(min(length[0], num_compared)):
            mine, theirs = _item(case, i), _item(other, i)
            narrowed = self._narrowed(mine, theirs)
            if narrowed is mine:
                return [case]
            if narrowed is not None:
                prefix = [_item(case, k) for k in range(max(len(case.prefix), i + 1))]
                prefix[i] = narrowed
                options.append(
                    replace(
                        case, prefix=tuple(prefix), least=length[0], most=length[1], is_bounded=True
                    )
                )
        return _some_of(options)

    def _objects_apart(self, case: Objects, other: Objects) -> list[Case]:
        if case.is_closed and any(name not in case.properties for name in other.required):
            return [case]
        options: list[Case] = []
        # Constants first: they set most alternatives apart, and little has to be read for it.
        order = sorted(case.properties.items(), key=lambda item: not self._is_listed(item[1]))
        for name, mine in order:
            if name in case.required or name in other.properties:
                theirs = self._cases.property_of(other.layers, name, is_wide=True)
                narrowed = self._narrowed(mine, theirs)
                if narrowed is mine and name in case.required:
                    return [case]
                if narrowed is not None:
                    options.append(_with(case, name, narrowed))
        options += [
            replace(case, properties={**case.properties, name: NEVER})
            for name in other.required
            if case.is_closed and name not in case.required
        ]
        ranges = _outside((case.least, case.most), (other.least, other.most))
        options += _each(case, ranges) if ranges else []
        return _some_of(options)

    def _is_listed(self, conjunction: Conjunction) -> bool:
        parts = self._reader.flat(conjunction).conjunction.parts
        return any("const" in part.schema or "enum" in part.schema for part in parts)

    def _narrowed(self, mine: Conjunction, theirs: Conjunction) -> Conjunction | None:
        """`mine` without `theirs`: `mine` itself if they share nothing, None if that fails."""
        if self._depth >= _MAX_DEPTH or theirs.excluded:
            return None
        self._reader.spend(10)
        part = self._reader.as_one_part(theirs)
        narrowed = joined([mine, Conjunction((), (part,))])
        self._depth += 1
        try:
            cases = self._cases_of(narrowed)
            whole = self._cases_of(mine)
        except _InseparableError:
            return None
        finally:
            self._depth -= 1
        if _is_same(cases, whole):
            return mine
        return narrowed if cases else None


def few_values(case: Case, max_num: int) -> list[object] | None:
    """All values of a case; None if there are more than `max_num`, or if that is not known."""
    if isinstance(case, Values):
        return list(case.values) if len(case.values) <= max_num else None
    if not isinstance(case, Numbers):
        return None
    if case.is_integer or case.steps:
        bounds = integer_bounds(case.bounds) if case.is_integer else number_bounds(case.bounds)
        steps = (*case.steps, 1) if case.is_integer else case.steps
        found = [] if bounds is None else multiples_within(steps, bounds, max_num)
        return None if found is None else list(found)
    return None


def _is_same(cases: Sequence[Case], others: Sequence[Case]) -> bool:
    return len(cases) == len(others) and all(map(lambda a, b: a is b, cases, others))


def _some_of(options: Sequence[Case]) -> list[Case]:
    if not options:
        raise _InseparableError
    return list(options[:_MAX_CASES])


def _with(case: Objects, name: str, value: Conjunction) -> Objects:
    required = tuple(dict.fromkeys([*case.required, name]))
    return replace(case, properties={**case.properties, name: value}, required=required)


def _item(case: Arrays, index: int) -> Conjunction:
    return case.prefix[index] if index < len(case.prefix) else case.rest


def _length_of(case: Arrays, *, is_wide: bool = False) -> _Range:
    """The lengths that the array may have; as it is written unless `is_wide`."""
    if case.prefix and not case.is_bounded and not is_wide:
        return len(case.prefix), len(case.prefix)
    if case.rest == NEVER:
        most = len(case.prefix) if case.most is None else min(case.most, len(case.prefix))
        return case.least, most
    return case.least, case.most


def _outside(own: _Range, other: _Range) -> list[_Range]:
    """The parts of the range `own` outside of `other`: [own] if they do not overlap."""
    least, most = own
    found: list[_Range] = []
    if other[0] > least:
        found.append((least, other[0] - 1 if most is None else min(most, other[0] - 1)))
    if other[1] is not None and (most is None or most > other[1]):
        found.append((max(least, other[1] + 1), most))
    return found


def _each(case: Strings | Objects, ranges: Sequence[_Range]) -> list[Case]:
    if not ranges:
        raise _InseparableError
    if list(ranges) == [(case.least, case.most)]:
        return [case]
    return [replace(case, least=least, most=most) for least, most in ranges]


def _numbers_apart(case: Numbers, other: Numbers) -> list[Case]:
    """Below the least number of `other`, and above its greatest."""
    if _bounds_of(case, case.bounds) is None:
        return []
    options: list[Case] = []
    for names in (LOWER, UPPER):
        limits = {name: value for name, value in other.bounds.items() if name in names}
        if not limits:
            continue
        # The strictest of them is the one of which all others are true as well.
        name, value = max(limits.items(), key=lambda item: _strictness(item, names))
        opposite = UPPER if names == LOWER else LOWER
        beyond = opposite[0] if name in STRICT else opposite[1]
        pick = min if beyond in UPPER else max
        bound = pick(case.bounds[beyond], value) if beyond in case.bounds else value
        bounds = {**case.bounds, beyond: bound}
        if _bounds_of(case, bounds) is None:
            continue
        if _bounds_of(case, bounds) == _bounds_of(case, case.bounds):
            return [case]
        options.append(replace(case, bounds=bounds))
    return _some_of(options)


def _without_each(case: Strings | Numbers, values: Sequence[object]) -> list[Case]:
    """`case` without each of `values` that is of its type."""
    if isinstance(case, Strings):
        texts = tuple(value for value in values if isinstance(value, str))
        if sum(map(len, texts)) > _MAX_TEXT:
            raise _InseparableError
        return [replace(case, besides=(*case.besides, *texts))]
    left: list[Case] = [case]
    for value in values:
        if isinstance(value, int | float) and not isinstance(value, bool):
            at = Numbers((), is_integer=False, bounds={"minimum": value, "maximum": value})
            left = [x for c in left if isinstance(c, Numbers) for x in _numbers_apart(c, at)]
    return left


def _strictness(limit: tuple[str, float], names: Sequence[str]) -> tuple[Fraction, bool]:
    name, value = limit
    number = Fraction(repr(value))
    return (number if names == LOWER else -number), name in STRICT


def _bounds_of(case: Numbers, bounds: Bounds) -> Bounds | None:
    return integer_bounds(bounds) if case.is_integer else number_bounds(bounds)


def _is_whole_type(other: Case, case: Case) -> bool:
    """Whether `other` has every value of the type of `case`."""
    match case, other:
        case _, Anything():
            return True
        case Strings(), Strings():
            is_free = not (other.patterns or other.formats)
            return is_free and other.least == 0 and other.most is None
        case Numbers(), Numbers():
            is_free = not (other.bounds or other.steps)
            return is_free and (case.is_integer or not other.is_integer)
        case Arrays(), Arrays():
            is_free = not (other.prefix or other.rest != ANY or other.is_unique)
            return is_free and other.least == 0 and other.most is None
        case Objects(), Objects():
            return not other.layers
    return False


def _is_of_kind(case: Case, value: object) -> bool:
    match case:
        case Strings():
            return isinstance(value, str)
        case Numbers():
            return TYPES["integer" if case.is_integer else "number"](value)
        case Arrays():
            return isinstance(value, list)
        case Objects():
            return isinstance(value, dict)
    return True
