"""The benchmark's own steps, on a CPU: pure JAX in place of the kernels, and no times looked at."""

import pytest

from kernels.kda import bench
from kernels.kda.bench_peers import makers, ours


@pytest.fixture
def bench_on_cpu(monkeypatch):
    make_inputs = bench.make_inputs
    options = {"ours": {}, "ours, full": {"residuals": "full"}, "ours, softplus": {}}
    options["ours, softplus"] = {"gate_kind": "softplus"}
    assert options.keys() == makers().keys() - {"jla"}
    stand_ins = {name: ours("xla", **o) for name, o in options.items()} | {"jla": None}
    monkeypatch.setattr(bench, "makers", lambda: stand_ins)
    monkeypatch.setattr(bench, "make_inputs", lambda *shape: make_inputs(1, 64, 1))
    monkeypatch.setattr(bench, "flash_kda_works", lambda arrays: False)
    monkeypatch.setattr(bench, "REPEATS", 1)
    monkeypatch.setattr(bench, "BATCH_MS", 1e-9)
    return bench.Bench(peers=())


@pytest.mark.slow
def test_checks_and_times_every_part(bench_on_cpu, capsys):
    bench_on_cpu.check(backward=True)
    said = capsys.readouterr().out
    assert said.count("error  ours") == 2
    assert said.count("a later gate changes an earlier output") == said.count(" no\n") == 2
    shape = (1, 8192, 96)
    forward, backward = (bench_on_cpu.time(shape, part) for part in ("forward", "backward"))
    assert forward["ms"].keys() == {"ours", "ours, softplus"}
    assert backward["ms"].keys() == {"ours", "ours, full", "ours, softplus"}
    assert forward["recorded_not_measured"]["flash_kda"] == 1.45
