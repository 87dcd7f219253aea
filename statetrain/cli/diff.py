"""`statetrain diff`: what differs between two checkpoints, bit for bit."""

from __future__ import annotations

import argparse
import contextlib
import json
import struct
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from statetrain.cli.elements import Apart, Bits, apart, bits_of
from statetrain.cli.facts import PART
from statetrain.cli.stored import Place, split
from statetrain.cli.text import emit, printable
from statetrain.cli.tree import brief, plain
from statetrain.errors import CheckpointError
from statetrain.persist.container import DamagedError, Opaque, TensorInfo, Values
from statetrain.persist.failures import explained
from statetrain.persist.record import Record

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  it has no other name

__all__ = ["add"]

SHOWN = 6  # differing elements of a tensor that --values lists
GENERATORS = ("random.Random", "numpy.random", "torch.Generator")  # as persist/codec.py names them
STREAMS = frozenset({"python", "numpy", "torch"})  # and cuda: what persist/randomness.py captures
KINDS = {
    "only_a": "only in A",
    "only_b": "only in B",
    "type": "of another type, dtype or shape",
    "value": "of another value",
    "random": "random streams",
}

ABOUT = """\
Say what differs between two checkpoints: what only one of them holds, other types, dtypes and
shapes, other values. None of the program is imported. Values are compared bit for bit: 0.0 and
-0.0 differ, and so do two NaNs with other bits. Not compared are the order of a dict's keys,
devices, and which tensors share memory. An object that stands at several places is told once.
"""

EXAMPLES = """\
examples:
  statetrain diff runs/a runs/b                              the newest of each
  statetrain diff runs/digits@step=100 runs/digits@step=120  two of one run
  statetrain diff runs/a runs/b --values                     differing elements too

exit codes: 0 they are the same; 1 they differ; 2 one is not there, damaged, or cannot be read
"""


def add(commands: Commands) -> None:
    """Add the command `diff` to the command line."""
    parser = commands.add_parser(
        "diff",
        help="say what differs between two checkpoints",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name in ("A", "B"):
        parser.add_argument(
            name.lower(),
            metavar=name,
            help="URL[@ID]: a path or URL, and the beginning of an id, or step=N",
        )
    parser.add_argument(
        "--values",
        action="store_true",
        help=f"list the first {SHOWN} differing elements of each tensor",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(command=_diff)


def _diff(options: argparse.Namespace) -> int:
    with _opened(options.a) as a, _opened(options.b) as b:
        comparison = Comparison(a, b, shown=SHOWN if options.values else 0)
        found: list[Difference] = []
        if options.json:
            found += comparison.differences()
            emit([json.dumps(_as_json(comparison, found), indent=2)])
        else:
            lines = _lines(comparison, found)
            emit(lines)
            deque(lines, maxlen=0)  # a reader that went away does not make the rest the same
    return 1 if found else 0


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two checkpoints, opened."""

    url: str
    record: Record
    tree: object
    values: Values

    def bits(self, value: TensorInfo | np.ndarray[Any, Any]) -> Bits:
        """Return the bits of a tensor or array in the tree.

        Raises:
            CheckpointError: its data is damaged, or cannot be read.
        """
        if isinstance(value, np.ndarray):
            return bits_of(value)
        try:
            with explained("read", self.url):
                return self.values.bits(value)
        except DamagedError as error:
            raise CheckpointError(f"checkpoint {self.record.id} is damaged: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A leaf that is not the same: its path, which of `KINDS` it is, and both values."""

    path: str
    kind: str
    told: str
    a: object = None
    b: object = None
    apart: Apart | None = None


class Comparison:
    """Two checkpoints being compared; `leaves` counts what was looked at so far."""

    def __init__(self, a: Side, b: Side, *, shown: int) -> None:
        self.a, self.b = a, b
        self.leaves = 0
        self._shown = shown
        self._seen: set[tuple[int, int]] = set()  # pairs of objects: they may be shared
        self._known: dict[tuple[int, int], Apart | None] = {}  # by both tensors' storage and number

    def differences(self) -> Iterator[Difference]:
        """Yield each leaf that differs, in the order of the trees."""
        return self._compared(self.a.tree, self.b.tree, "")

    def _compared(self, a: object, b: object, path: str) -> Iterator[Difference]:
        inner, other = _items(a), _items(b)
        if inner is None or other is None or _type(a) != _type(b):
            self.leaves += 1
            yield from self._leaf(a, b, path)
        elif _is_random(a) and _is_random(b):
            yield from self._random(self._within(inner, other, path), path)
        elif (id(a), id(b)) not in self._seen:
            self._seen.add((id(a), id(b)))
            yield from self._within(inner, other, path)

    def _within(self, a: Items, b: Items, path: str) -> Iterator[Difference]:
        streams = a.keys() >= STREAMS <= b.keys()
        for key in dict.fromkeys([*a, *b]):
            place = _joined(path, key)
            if key not in b or key not in a:
                yield from self._alone(a.get(key, b.get(key)), place, in_a=key in a)
            elif streams and key in {*STREAMS, "cuda"}:
                yield from self._random(self._compared(a[key], b[key], place), place)
            else:
                yield from self._compared(a[key], b[key], place)

    def _random(self, inside: Iterator[Difference], path: str) -> Iterator[Difference]:
        before = self.leaves
        if next(inside, None) is not None:
            yield Difference(path=path, kind="random", told="another state of a random stream")
        self.leaves = before + 1

    def _alone(self, value: object, path: str, *, in_a: bool) -> Iterator[Difference]:
        items = None if _is_random(value) else _items(value)
        if items:
            if (id(value), 0) not in self._seen:
                self._seen.add((id(value), 0))
                for key, item in items.items():
                    yield from self._alone(item, _joined(path, key), in_a=in_a)
            return
        self.leaves += 1
        words = "a random stream" if _is_random(value) else brief(value)
        if in_a:
            yield Difference(path=path, kind="only_a", told=f"only in A: {words}", a=value)
        else:
            yield Difference(path=path, kind="only_b", told=f"only in B: {words}", b=value)

    def _leaf(self, a: Any, b: Any, path: str) -> Iterator[Difference]:
        both = f"{brief(a)} in A, {brief(b)} in B"
        if _type(a) != _type(b):
            told = both if brief(a) != brief(b) else f"{_type(a)} in A, {_type(b)} in B"
            yield Difference(path=path, kind="type", told=told, a=a, b=b)
        elif isinstance(a, (TensorInfo, np.ndarray)):
            far = self._apart(a, b)
            if far is not None:
                told = f"{brief(a)}: {_told(far, scalar=a.shape == ())}"
                yield Difference(path=path, kind="value", told=told, a=a, b=b, apart=far)
            elif _layout(a) != _layout(b):
                told = f"{_layout(a)} in A, {_layout(b)} in B, and the same bits"
                yield Difference(path=path, kind="type", told=told, a=a, b=b)
        elif _exact(a) != _exact(b):
            told = both if brief(a) != brief(b) else f"{both}, with other bits"
            yield Difference(path=path, kind="value", told=told, a=a, b=b)

    def _apart(self, a: Any, b: Any) -> Apart | None:
        dtype = a.dtype if isinstance(a, TensorInfo) else a.dtype.str
        numpy = not isinstance(a, TensorInfo) or a.device.startswith("numpy")
        shown = max(self._shown, int(a.shape == ()))  # a single number is told in any case
        if isinstance(a, np.ndarray):
            return apart(bits_of(a), bits_of(b), dtype, numpy=numpy, shown=shown)
        if a.device == "meta":
            return None
        key = (a.number, b.number) if not numpy else (a.storage, b.storage)  # these are negative
        if key not in self._known:
            bits = self.a.bits(a), self.b.bits(b)
            self._known[key] = apart(*bits, dtype, numpy=numpy, shown=shown)
        return self._known[key]


Items = dict[Any, Any]


@contextlib.contextmanager
def _opened(target: str) -> Iterator[Side]:
    url, wanted = split(target)
    place = Place(url)
    found, passed = place.find(wanted)
    for stored in passed:
        print(f"statetrain: passed over {stored.id}: {stored.damage}", file=sys.stderr)
    with place.store.open(found.record) as file:
        with explained("read", url):
            values = Values(file)
        yield Side(url=url, record=found.record, tree=found.index.tree, values=values)


def _items(value: object) -> Items | None:
    if isinstance(value, Opaque):
        inside = _inside(value)
        items = _items(inside)
        return {"state": inside} if items is None else items
    if isinstance(value, Mapping):
        return dict(value)
    return dict(enumerate(value)) if isinstance(value, (list, tuple, deque)) else None


def _inside(value: Opaque) -> object:
    """Return the state of a registered class without its version; all parts of anything else."""
    registered = len(value.parts) == 2 and type(value.parts[0]) is int
    return value.parts[1] if registered else list(value.parts)


def _joined(path: str, key: object) -> str:
    return f"{path}/{key}" if path else str(key)


def _is_random(value: object) -> bool:
    if not isinstance(value, Opaque):
        return False
    inside = _inside(value)
    part = value.kind == PART and isinstance(inside, dict) and inside.get("kind") == "generator"
    return part or value.kind in GENERATORS


def _type(value: Any) -> str:
    """Return all that must be the same before values are compared."""
    name = type(value).__name__
    if isinstance(value, TensorInfo):
        sort = "array" if value.device.startswith("numpy") else "tensor"
        meta = "meta " * (value.device == "meta")
        return f"{meta}{sort} {value.dtype} {list(value.shape)} {value.pending}".rstrip()
    if isinstance(value, np.ndarray):
        return f"array {value.dtype.str} {list(value.shape)}"
    if isinstance(value, Opaque):
        version = [str(part) for part in value.parts[:1] if type(part) is int]
        return " ".join([value.kind, *version])
    if isinstance(value, deque):
        return f"{name} of at most {value.maxlen}"
    return f"{name} of {value.default_factory}" if isinstance(value, defaultdict) else name


def _layout(value: object) -> str:
    if not isinstance(value, TensorInfo) or value.device.startswith("numpy"):
        return "array"
    grad = " that requires a gradient" if value.requires_grad else ""
    return f"{brief(value)} with strides {list(value.stride)}{grad}"


def _exact(value: Any) -> object:
    """Return what is equal if and only if two values of one type are, to the last bit."""
    if isinstance(value, np.generic):
        return value.dtype.str, value.tobytes()
    if isinstance(value, (float, complex)):
        return struct.pack("<2d", value.real, value.imag)
    if isinstance(value, (set, frozenset)):
        return sorted(repr((type(item).__name__, _exact(item))) for item in value)
    if isinstance(value, tuple):  # in a set
        return [(type(item).__name__, _exact(item)) for item in value]
    return value if isinstance(value, (str, bytes, bytearray, int)) else repr(value)


def _told(far: Apart, *, scalar: bool) -> str:
    if scalar:
        (element,) = far.first
        return f"{element.a} in A, {element.b} in B"
    largest = f"{far.largest:.6g}" if type(far.largest) is float else far.largest
    parts = [f"{far.differing:,} of {far.elements:,} elements differ"]
    parts += [] if largest is None else [f"by up to {largest}"]
    parts += [f"{far.nans:,} of them NaN in one alone"] if far.nans else []
    parts += [f"{far.alike:,} of them in bits alone (-0.0, or NaNs)"] if far.alike else []
    return ", ".join(parts)


def _lines(comparison: Comparison, found: list[Difference]) -> Iterator[str]:
    for name, side in (("A", comparison.a), ("B", comparison.b)):
        yield printable(f"{name}: {side.record.id} at {side.url}")
    for each in comparison.differences():
        found.append(each)
        yield printable(f"{each.path or 'all'}: {each.told}")
        elements = each.apart.first if each.apart else ()
        for element in filter(lambda element: element.index, elements):  # a scalar is told above
            yield printable(f"  {list(element.index)}: {element.a} in A, {element.b} in B")
    if not found:
        yield f"the same, bit for bit: {comparison.leaves:,} leaves"
        return
    count = Counter(each.kind for each in found)
    kinds = [f"{count[kind]:,} {words}" for kind, words in KINDS.items() if count[kind]]
    yield f"{len(found):,} of {comparison.leaves:,} leaves differ: {', '.join(kinds)}"


def _as_json(comparison: Comparison, found: list[Difference]) -> dict[str, Any]:
    sides = {"a": comparison.a, "b": comparison.b}
    return {
        **{name: {"url": side.url, "id": side.record.id} for name, side in sides.items()},
        "leaves": comparison.leaves,
        "differences": [
            {
                "path": each.path,
                "kind": each.kind,
                "told": each.told,
                "a": plain(each.a),
                "b": plain(each.b),
                "elements": each.apart and plain(asdict(each.apart)),
            }
            for each in found
        ],
    }
