"""What a compiled program sends between devices, from its text."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
)
_BITS = {"pred": 8, "bf16": 16, "f8e4m3fn": 8, "f8e5m2": 8}
_SHAPE = re.compile(r"\b(pred|bf16|[fsuc]\d+\w*)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.+?) ([\w\-]+)\((.*)$")
_CALLED = re.compile(r"(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


class Collective(NamedTuple):
    """One collective instruction."""

    kind: str
    shape: str  # of its result, as in the text
    num_bytes: int  # of its result on a device; of a ragged one's operand if that is smaller
    group: int  # devices that take part together
    count: int  # runs in one step
    operation: str  # the JAX operation it comes from

    @property
    def sent(self) -> float:
        """Bytes that a device sends in a step, with the usual ring algorithms."""
        others = (self.group - 1) / self.group
        factor = {
            "all-gather": others,
            "all-reduce": 2 * others,
            "reduce-scatter": self.group - 1,
            "collective-permute": 1.0,
        }.get(self.kind, others)
        return self.count * self.num_bytes * factor


def collectives(text: str) -> list[Collective]:
    """The collectives of a compiled module, those of loops with the number of their rounds.

    A loop whose number of rounds the compiler does not know counts as one round.
    """
    computations, entry = _computations(text)
    devices = re.search(r"num_partitions=(\d+)", text)
    everyone = int(devices[1]) if devices else 1
    found: list[Collective] = []

    def visit(name: str, count: int) -> None:
        instructions = computations.get(name, {})
        for shape, operation, rest in instructions.values():
            kind = operation.removesuffix("-start")
            if kind in KINDS:
                one = _collective(operation, shape, rest, count, everyone)
                operand = instructions.get(rest.split(",")[0].lstrip("%"))
                if kind == "ragged-all-to-all" and operand:  # rows travel; either side has room
                    one = one._replace(num_bytes=min(one.num_bytes, sum(_sizes(operand[0]))))
                found.append(one)
            rounds = _rounds(rest, computations) if operation == "while" else 1
            for called in _called(rest):
                visit(called, count * rounds)

    visit(entry, 1)
    return found


def sent_by_kind(found: list[Collective]) -> dict[str, float]:
    """Bytes that a device sends in a step, by kind."""
    totals: Counter[str] = Counter()
    for one in found:
        totals[one.kind] += one.sent
    return dict(totals)


def _computations(text: str) -> tuple[dict[str, dict[str, tuple[str, str, str]]], str]:
    """(shape, operation, rest of the line) of the instructions of every computation, by name, and
    the entry's name."""
    computations: dict[str, dict[str, tuple[str, str, str]]] = {}
    entry, current = "", None
    for line in text.splitlines():
        header = re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$", line)
        if header:
            current = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif current is not None and (instruction := _INSTRUCTION.match(line)):
            name, *parts = instruction.groups()
            current[name] = tuple(parts)
    return computations, entry


def _called(rest: str) -> Iterator[str]:
    yield from _CALLED.findall(rest)
    for branches in _BRANCHES.findall(rest):
        yield from (name.strip().lstrip("%") for name in branches.split(","))


def _rounds(rest: str, computations: dict[str, dict[str, tuple[str, str, str]]]) -> int:
    """Rounds of a loop: as the compiler says, else the one number that its condition holds."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', rest):
        return int(known[1])
    condition = re.search(r"condition=%?([\w.\-]+)", rest)
    limits = [
        int(number[1])
        for _, operation, rest in computations.get(condition[1] if condition else "", {}).values()
        if operation == "constant" and (number := re.match(r"(\d+)\)", rest))
    ]
    return limits[0] if len(limits) == 1 else 1


def _collective(operation: str, shape: str, rest: str, count: int, everyone: int) -> Collective:
    kind, sizes = operation.removesuffix("-start"), _sizes(shape)
    # An asynchronous start lists its operands, then its results, then a context; of an all-reduce
    # the results alone.
    if operation.endswith("-start") and kind != "all-reduce":
        dims = [dims for _, dims in _SHAPE.findall(shape)]
        sizes = [size for size, dims in zip(sizes, dims, strict=True) if dims]
        sizes = sizes[len(sizes) // 2 :]
    from_jax = re.search(r'op_name="([^"]*)"', rest)
    return Collective(
        kind, shape, sum(sizes), _group_size(rest, everyone), count, from_jax[1] if from_jax else ""
    )


def _sizes(shape: str) -> list[int]:
    """Bytes of every array in a shape."""
    return [
        _BITS.get(dtype, int(re.sub(r"\D.*", "", dtype[1:]) or 8))
        * math.prod(int(n) for n in dims.split(",") if n)
        // 8
        for dtype, dims in _SHAPE.findall(shape)
    ]


def _group_size(rest: str, everyone: int) -> int:
    """Devices of a group, in each of the notations for them."""
    if "replica_groups={}" in rest:
        return everyone
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", rest):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[name]) for name in re.findall(r"'([^']+)'", mesh[2]))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", rest):
        return int(iota[1])
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
        return len(listed[1].split(","))
    return 2  # a permutation
