"""The dry run: what it counts in a program's text, and how it refuses."""

import dataclasses
import json
import os

import pytest

from configs import tiny
from tests.kernels.test_kda_mosaic import REPOSITORY, needs_libtpu
from tests.train.test_config import python
from train.config import TrainConfig, build
from train.dryrun import CHIPS, devices_of, with_flags
from train.run import hlo
from train.run.mesh import MeshConfig, check_divides, mesh_sizes

TEXT = """
HloModule jit_step, num_partitions=8

%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %ag = bf16[8,16]{1,0:T(8,128)} all-gather(%x), replica_groups=[2,4]<=[8], op_name="a/b"
  ROOT %t = (s32[], f32[8,4]) tuple(%i, %ag)
}

%cond (p: (s32[], f32[8,4])) -> pred[] {
  %c = s32[]{:T(128)} constant(5)
  ROOT %lt = pred[] compare(%i, %c), direction=LT
}

ENTRY %main (a: f32[8,4]) -> f32[8,4] {
  %w = (s32[], f32[8,4]) while(%a), condition=%cond, body=%body
  %known = (s32[], f32[8,4]) while(%a), condition=%other, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %ar = (f32[8,4]{1,0}, f32[2]{0}) all-reduce(%b, %c), replica_groups={{0,1},{2,3}}, to_apply=%add
  %cp = (f32[8]{0}, f32[8]{0}, u32[]) collective-permute-start(%d), source_target_pairs={{0,1}}
  %rs = f32[4]{0} reduce-scatter(%e), replica_groups=mesh['data'=4,'expert'=2] {'data'}
  %ar2 = (f32[100]{0}, f32[100]{0}) all-reduce-start(%b, %c), replica_groups={}, to_apply=%add
  %ag2 = ((f32[10], f32[10]), (f32[40], f32[40])) all-gather-start(%b, %c), replica_groups=[2,4]<=[8]
  %there = bf16[100,16]{1,0} ragged-all-to-all(%x, %zeros, %o, %s, %t, %r), replica_groups={{0,1}}
  %x = bf16[8,16]{1,0} copy(%a)
  ROOT %r = f32[8,4] copy(%a)
}
"""  # noqa: E501


def test_collectives_are_counted_with_the_rounds_of_their_loops():
    found = [(c.kind, c.num_bytes, c.group, c.count) for c in hlo.collectives(TEXT)]
    assert found == [
        ("all-gather", 256, 4, 5),
        ("all-gather", 256, 4, 3),
        ("all-reduce", 136, 2, 1),
        ("collective-permute", 32, 2, 1),
        ("reduce-scatter", 16, 4, 1),
        ("all-reduce", 800, 8, 1),
        ("all-gather", 320, 4, 1),
        ("ragged-all-to-all", 256, 2, 1),
    ]
    assert hlo.sent_by_kind(hlo.collectives(TEXT)) == {
        "all-gather": (8 * 256 + 320) * 3 / 4,
        "all-reduce": 136 + 800 * 2 * 7 / 8,
        "collective-permute": 32,
        "reduce-scatter": 16 * 3,
        "ragged-all-to-all": 128,
    }


def config(**changes):
    values = tiny.get_config()
    values.update_from_flattened_dict(changes)
    return build(TrainConfig, values.to_dict())


def test_a_longer_context_has_fewer_rows():
    changed = with_flags(config(), "data=2,sequence=4", 1024)
    assert (changed.data.context_length, changed.data.batch_size) == (1024, 2)
    assert changed.mesh == MeshConfig(data=2, sequence=4)
    assert with_flags(config(), None, None) == config()


@pytest.mark.parametrize(
    ("mesh", "context", "message"),
    [
        ("data", None, "must be such as data=-1"),
        ("date=2", None, "'date' is none of data, expert, sequence"),
        (None, 300, "--context=300 does not divide"),
    ],
)
def test_flags_that_mean_nothing_are_refused(mesh, context, message):
    with pytest.raises(ValueError, match=message):
        with_flags(config(), mesh, context)


@pytest.mark.parametrize("topology", ["v5p", "v5p:16", "h100:8", "cpu:x", "v5p:2x2x2x2"])
def test_topologies_that_do_not_exist_are_refused(topology):
    with pytest.raises(ValueError, match="is no topology; try cpu:8"):
        devices_of(topology)
    assert "v5p" in CHIPS


@pytest.mark.parametrize(
    ("sizes", "num_devices", "message"),
    [
        ((-1, 3, 1), 8, r"try mesh\.data=-1, mesh\.expert=1, mesh\.sequence=1"),
        ((2, -1, 3), 8, r"try mesh\.expert=-1, mesh\.data=2, mesh\.sequence=1"),
        ((2, 2, 1), 8, r"try mesh\.data=-1, mesh\.expert=2"),
    ],
)
def test_meshes_that_do_not_fit_are_refused(sizes, num_devices, message):
    with pytest.raises(ValueError, match=message):
        mesh_sizes(MeshConfig(*sizes), num_devices)


@dataclasses.dataclass
class FakeMesh:
    shape: dict[str, int]


@pytest.mark.parametrize(
    ("sizes", "changes", "message"),
    [
        ((1, 3, 1), {}, r"try mesh\.expert=1"),
        ((4, 1, 1), {"data.batch_size": 6}, r"try data\.batch_size=8"),
        ((2, 2, 1), {"step.accumulation": 4}, r"try data\.batch_size=16"),
        ((1, 1, 3), {}, r"context_length=256 .* try data\.context_length=258"),
        ((1, 1, 128), {}, r"at least 3 tokens; try data\.context_length=384"),
        ((1, 1, 8), {"run.eval_context": 9}, r"try run\.eval_context=24"),
    ],
)
def test_what_a_mesh_does_not_divide_is_refused(sizes, changes, message):
    here = config(**changes)
    mesh = FakeMesh(dict(zip(("data", "expert", "sequence"), sizes, strict=True)))
    with pytest.raises(ValueError, match=message):
        check_divides(mesh, here.model, here.data, here.step.accumulation, here.run.eval_context)


@pytest.mark.slow
def test_the_command_on_virtual_devices(tmp_path):
    file = tmp_path / "out.json"
    small = ["--config.model.layers=KM", "--config.model.moe.num_experts=4", f"--json={file}"]
    flags = ["--config=configs/tiny.py", "--topology=cpu:4", "--mesh=data=2,sequence=2"]
    done = python("train.dryrun", *flags, *small)
    assert done.returncode == 0, done.stderr
    assert "cpu:4: 4 chips, mesh data=2, expert=1, sequence=2" in done.stdout
    out = json.loads(file.read_text())
    assert out["memory"]["parameters"] > 0 and out["sent_per_step"]["collective-permute"] > 0
    done = python("train.dryrun", *flags[:2], "--mesh=data=3")
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1, done.stderr


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("topology, mesh", [("v5e:4x4", (2, 4, 2)), ("v5p:2x2x2", (1, 8, 1))])
@pytest.mark.parametrize("factor", [None, 1.5])
def test_tpus_exchange_ragged_rows(tmp_path, topology, mesh, factor):
    file = tmp_path / "out.json"
    sizes = ",".join(
        f"{axis}={n}" for axis, n in zip(("data", "expert", "sequence"), mesh, strict=True)
    )
    done = python(
        "train.dryrun",
        "--config=configs/tiny.py",
        f"--topology={topology}",
        f"--mesh={sizes}",
        f"--json={file}",
        "--config.model.layers=MM",
        "--config.model.moe.dispatch=all_to_all",
        f"--config.model.moe.buffer_factor={factor}",
        PYTHONPATH=f"{REPOSITORY / '.libtpu'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    sent = json.loads(file.read_text())["sent_per_step"]
    assert sent["ragged-all-to-all"] > 0 and "all-to-all" not in sent
