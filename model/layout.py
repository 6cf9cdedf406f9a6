"""Where each decoder layer lives: AttnRes blocks, and inside them runs of a repeated pattern.

Depth costs program size per block, not per layer: a run of equal patterns is one scanned group.
"""

from typing import NamedTuple

from model.config import ModelConfig


class LayerSpec(NamedTuple):
    """What distinguishes one decoder layer's program from another's."""

    attention: str  # "kda" | "mla"
    ffn: str  # "dense" | "moe"
    mixes_attention: bool  # False for layer 0: its only source is the embedding
    mixes_ffn: bool


class Group(NamedTuple):
    """`repeats` copies of the layers `specs`; scanned when there is more than one copy."""

    specs: tuple[LayerSpec, ...]
    repeats: int
    first_layer: int

    @property
    def num_moe(self) -> int:
        """MoE layers in one copy."""
        return sum(spec.ffn == "moe" for spec in self.specs)


def layer_specs(config: ModelConfig) -> list[LayerSpec]:
    """One LayerSpec per decoder layer."""
    mixes = config.residual.mode != "none"
    return [
        LayerSpec(
            attention="kda" if letter == "K" else "mla",
            ffn="dense" if i < config.num_dense_layers else "moe",
            mixes_attention=mixes and i > 0,
            mixes_ffn=mixes,
        )
        for i, letter in enumerate(config.layers)
    ]


def _group_runs(specs: list[LayerSpec], first_layer: int) -> list[Group]:
    """Splits a block into runs of repeated patterns with the fewest traced layer bodies.

    Dynamic programming over suffixes: a run of pattern length p costs p, however often it repeats;
    ties go to fewer groups.
    """
    num = len(specs)
    best: list[tuple[tuple[int, int], list[Group]]] = [((0, 0), [])] * (num + 1)
    for start in reversed(range(num)):
        options = []
        for length in range(1, num - start + 1):
            pattern = specs[start : start + length]
            end, repeats = start + length, 1
            while True:
                (cost, groups), tail = best[end]
                group = Group(tuple(pattern), repeats, first_layer + start)
                options.append(((cost + length, groups + 1), [group, *tail]))
                if specs[end : end + length] != pattern:
                    break
                end, repeats = end + length, repeats + 1
        best[start] = min(options, key=lambda option: option[0])
    return best[0][1]


def blocks(config: ModelConfig) -> list[list[Group]]:
    """The groups of every AttnRes block, in order.

    "block": block_size decoder layers each; "none": one block of all layers; "full": every layer a
    block, since each of its two sublayers is a source of its own.
    """
    specs = layer_specs(config)
    size = {"block": config.residual.block_size, "full": 1, "none": len(specs)}
    step = size[config.residual.mode]
    out = []
    for start in range(0, len(specs), step):
        block = specs[start : start + step]
        if config.scan:
            out.append(_group_runs(block, start))
        else:
            out.append([Group((spec,), 1, start + i) for i, spec in enumerate(block)])
    return out
