"""Where parameters lie."""

import jax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from model.sharding import param_spec
from model.transformer import param_shapes, param_specs
from tests.model.configs import small_config

MESH = {"data": 4, "expert": 2, "sequence": 3}


@pytest.mark.parametrize(
    ("shape", "axes", "min_size", "expected"),
    [
        ((24, 5), ("embed", "hidden"), 0, P(("data", "sequence"), None)),
        ((24, 5), ("embed", "hidden"), 121, P(None, None)),
        ((3, 24, 5), ("layers", "embed", "hidden"), 121, P(None, None, None)),
        ((3, 24, 5), ("layers", "embed", "hidden"), 120, P(None, ("data", "sequence"), None)),
        ((8, 5), ("embed", "hidden"), 0, P("data", None)),
        ((6, 5), ("embed", "hidden"), 0, P(None, None)),
        # Experts are shared whatever their size, or shard_map would not find its own.
        ((4, 6, 5), ("expert", "expert_in", "hidden"), 10**6, P("expert", None, None)),
        ((4, 12, 5), ("expert", "expert_in", "hidden"), 0, P("expert", ("data", "sequence"), None)),
    ],
)
def test_param_spec(shape, axes, min_size, expected):
    assert param_spec(shape, axes, MESH, min_size) == expected


@pytest.mark.parametrize(
    ("shape", "axes", "message"),
    [
        ((8, 8), ("embed", "rank_in"), "'embed' and 'rank_in' .* axis 'data'"),
        ((8,), ("embedd",), "'embedd' is not in model.sharding.RULES"),
        ((5, 8, 8), ("expert", "expert_in", "hidden"), r"mesh\.expert=2; try mesh\.expert=1"),
    ],
)
def test_impossible_specs_are_refused(shape, axes, message):
    with pytest.raises(ValueError, match=message):
        param_spec(shape, axes, MESH, 0)


def test_large_parameters_of_every_layer_are_spread():
    config = small_config(shard_min_size=100, param_dtype="float32")
    mesh = AbstractMesh((2, 2, 2), ("data", "expert", "sequence"))
    specs = jax.tree.leaves(param_specs(config, mesh), is_leaf=lambda x: isinstance(x, P))
    for (path, shape), spec in zip(
        jax.tree_util.tree_leaves_with_path(param_shapes(config)), specs, strict=True
    ):
        layers = shape.shape[0] if len(shape.shape) == len(spec) > 3 else 1
        if shape.size >= 100 * layers and "conv" not in path[-1].key:
            assert any(spec), (path, shape, spec)
