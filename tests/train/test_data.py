"""The data path against a plain-Python account of what every batch must hold."""

import json

import numpy as np
import pytest

from train.data.baselines import baselines
from train.data.batch import Batch
from train.data.config import DataConfig
from train.data.evaluation import heldout_batches
from train.data.packing import Pieces
from train.data.pipeline import TrainBatches
from train.data.sources import TextSource, is_held_out, load_source
from train.data.tokenizer import ByteTokenizer

CONTEXT = 16
SIZES = (1, 15, 16, 17, 31, 32, 33, 40, 100, 7, 64, 3, 5, 250)


@pytest.fixture
def source(tmp_path):
    """Documents of edge lengths in which no two pieces are alike."""
    random = np.random.default_rng(0)
    names = tuple(f"{i:02d}.txt" for i in range(len(SIZES)))
    for name, size in zip(names, SIZES, strict=True):
        (tmp_path / name).write_bytes(random.bytes(size))
    source = TextSource(tmp_path, names, SIZES)
    assert len(set(expected_pieces(source))) == len(expected_pieces(source))
    return source


def config(**changes):
    return DataConfig(**{"context_length": CONTEXT, "batch_size": 4, "seed": 3, **changes})


def train_batches(source, streams=None, **changes):
    return TrainBatches(config(**changes), source, ByteTokenizer(), streams=streams)


def take(batches, count):
    return [next(batches) for _ in range(count)]


def assert_same(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        for field in Batch._fields:
            np.testing.assert_array_equal(getattr(a, field), getattr(b, field), err_msg=field)
            assert getattr(a, field).dtype == getattr(b, field).dtype


def segments(batch, row):
    """(inputs, targets or None) of the segments of one row, read token by token."""
    found = {}
    for t in range(batch.inputs.shape[1]):
        if segment := int(batch.segment_ids[row, t]):
            pieces = found.setdefault(segment, ([], []))
            assert int(batch.positions[row, t]) == len(pieces[0])
            pieces[0].append(int(batch.inputs[row, t]))
            target = int(batch.targets[row, t])
            pieces[1].append(target if batch.loss_mask[row, t] else None)
        else:
            assert not batch.loss_mask[row, t] and batch.targets[row, t] == 0
    assert list(found) == list(range(1, len(found) + 1))
    return [(tuple(inputs), tuple(targets)) for inputs, targets in found.values()]


def expected_pieces(source):
    """All pieces of all documents: cut after the shift, so only a last token has no target."""
    pieces = []
    for i in range(len(source)):
        tokens = [256, *source.read(i)]
        targets = [*tokens[1:], None]
        for start in range(0, len(tokens), CONTEXT):
            span = slice(start, start + CONTEXT)
            pieces.append((tuple(tokens[span]), tuple(targets[span])))
    return pieces


def test_tokenizer_round_trip():
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode("naïve λ")
    assert tokens.dtype == np.int32 and tokens[0] == tokenizer.bos_id == 256
    assert tokenizer.decode(tokens) == "naïve λ"
    assert tokenizer.encode(b"\xff\x00", add_bos=False).tolist() == [255, 0]
    assert tokenizer.decode([256, 65, 255, 300]) == "A\ufffd"


def test_batch_shapes_and_dtypes(source):
    batch = next(train_batches(source))
    for name, array in batch._asdict().items():
        assert array.shape == (4, CONTEXT), name
        assert array.dtype == (bool if name == "loss_mask" else np.int32), name


def test_pieces_hold_every_token_once(source):
    pieces = Pieces(source, ByteTokenizer(), CONTEXT)
    found = [pieces[k] for k in range(len(pieces))]
    expected = expected_pieces(source)
    assert len(found) == len(expected)
    for piece, (inputs, targets) in zip(found, expected, strict=True):
        assert tuple(piece["inputs"]) == inputs
        assert tuple(piece["loss_mask"]) == tuple(target is not None for target in targets)
        assert tuple(piece["targets"]) == tuple(target or 0 for target in targets)


@pytest.mark.parametrize("num_streams", [1, 4])
def test_every_epoch_deals_every_piece_once(tmp_path, num_streams):
    """With pieces that fill their rows the rows are the pieces in order, so epochs are visible."""
    sizes = tuple(CONTEXT * n - 1 for n in (1, 3, 2, 6, 4))  # 16 pieces
    names = tuple("abcde")
    for i, (name, size) in enumerate(zip(names, sizes, strict=True)):
        (tmp_path / name).write_bytes(bytes(j % (101 + 10 * i) for j in range(size)))
    source = TextSource(tmp_path, names, sizes)
    once = sorted(expected_pieces(source), key=repr)
    batches = train_batches(source, num_streams=num_streams)
    epochs = []
    for _ in range(3):
        pieces = [segments(b, row)[0] for b in take(batches, 16 // 4) for row in range(4)]
        assert sorted(pieces, key=repr) == once
        epochs.append(pieces)
    assert epochs[0] != epochs[1] != epochs[2] != once


def test_streams_deal_pieces_in_turn_and_lose_none(source):
    """Whenever a stream's open rows are all out, what came out is a prefix of its pieces."""
    expected, checked = expected_pieces(source), 0
    batches = train_batches(source, shuffle=False)
    seen = [[] for _ in range(4)]
    for _ in range(100):
        batch = next(batches)
        for row, state in enumerate(batches.get_state()):
            seen[row] += segments(batch, row)
            if state["position"]["next_row"] == 0:
                count = state["position"]["parent"]["next_index"]
                fed = [expected[(row + 4 * j) % len(expected)] for j in range(count)]
                assert sorted(seen[row], key=repr) == sorted(fed, key=repr)
                checked += 1
    assert checked >= 16


def test_rows_do_not_depend_on_the_division_of_streams(source):
    """Two processes with half the streams each make the same global batches as one."""
    whole = take(train_batches(source), 30)
    halves = [take(train_batches(source, streams=streams), 30) for streams in ((0, 1), (2, 3))]
    joined = [
        Batch(*map(np.concatenate, zip(*pair, strict=True))) for pair in zip(*halves, strict=True)
    ]
    assert_same(joined, whole)


@pytest.mark.parametrize("changes", [{}, {"num_streams": 2}, {"shuffle": False}])
def test_resume_anywhere_is_exact(source, changes):
    """Also with the states read from JSON, and by other processes than those that saved."""
    batches = train_batches(source, **changes)
    whole, states = [], []
    for _ in range(45):  # passes several flushes of the open rows and an epoch
        states.append(json.loads(json.dumps(batches.get_state())))
        whole.append(next(batches))
    for step in (0, 1, 2, 7, 15, 16, 17, 30):
        fresh = train_batches(source, **changes)
        fresh.set_state(states[step])
        assert fresh.get_state() == states[step]
        assert_same(take(fresh, 14), whole[step : step + 14])
    # An iterator that is under way, prefetching, goes back.
    fresh.set_state(states[5])
    assert_same(take(fresh, 5), whole[5:10])
    tail = train_batches(source, streams=(1,), **changes)
    tail.set_state(states[9])
    rows = slice(1, 2) if config(**changes).streams == 4 else slice(2, 4)
    assert_same(take(tail, 3), [Batch(*(field[rows] for field in b)) for b in whole[9:12]])


def test_seed_changes_the_order(source):
    first, second = next(train_batches(source)), next(train_batches(source, seed=4))
    assert not np.array_equal(first.inputs, second.inputs)


def test_state_of_other_data_is_refused(source):
    states = train_batches(source).get_state()
    for name, changes in {
        "seed": {"seed": 9},
        "context_length": {"context_length": 32},
        r"batch_size \(or num_streams\)": {"num_streams": 2},
    }.items():
        with pytest.raises(ValueError, match=rf"with data\.{name} = "):
            train_batches(source, **changes).set_state(states)
    fewer = TextSource(source.root, source.names[1:], source.num_bytes[1:])
    with pytest.raises(ValueError, match=rf"another Python .*below {source.root}"):
        train_batches(fewer).set_state(states)
    with pytest.raises(ValueError, match=r"no data state for streams \[3\]"):
        train_batches(source).set_state(states[:3])
    with pytest.raises(ValueError, match="streams"):
        train_batches(source, streams=(4,))


def test_heldout_rows_cover_every_byte_once(source):
    batches = list(heldout_batches(source, ByteTokenizer(), context_length=CONTEXT, batch_size=5))
    rows = [segments(b, row) for b in batches for row in range(5)]
    expected = expected_pieces(source)
    assert [row[0] for row in rows[: len(expected)]] == expected
    assert not any(rows[len(expected) :]) and len(rows) - len(expected) < 5
    assert sum(int(b.loss_mask.sum()) for b in batches) == sum(SIZES)
    some = list(
        heldout_batches(source, ByteTokenizer(), context_length=CONTEXT, batch_size=5, max_rows=10)
    )
    chosen = [segments(b, row)[0] for b in some for row in range(5)]
    indices = [expected.index(piece) for piece in chosen]
    assert len(set(indices)) == 10 and max(np.diff(indices)) - min(np.diff(indices)) <= 1
    assert indices[0] < 3 and indices[-1] > len(expected) - 4


def test_shrunken_file_is_named(source):
    (source.root / source.names[8]).write_bytes(b"short")
    with pytest.raises(ValueError, match=r"08\.txt had 100 bytes"):
        take(train_batches(source), 40)


def test_stdlib_source_follows_the_rule():
    train, heldout = load_source(DataConfig())
    assert len(train) > 10 * len(heldout) > 0
    for side, held in ((train, False), (heldout, True)):
        assert list(side.names) == sorted(side.names)
        assert all(is_held_out(name) is held for name in side.names)
        assert min(side.num_bytes) > 0
        parts = {part for name in side.names for part in name.split("/")[:-1]}
        assert not parts & {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    assert "json/decoder.py" in (*train.names, *heldout.names)
    scores = baselines(train, heldout)
    # With Python 3.11; other versions have other files.
    np.testing.assert_allclose(scores, (4.45, 3.32, 1.83), atol=0.08)


def test_baselines_against_a_plain_count(tmp_path):
    (tmp_path / "a").write_bytes(b"abab")
    (tmp_path / "b").write_bytes(b"ac")
    train, heldout = TextSource(tmp_path, ("a",), (4,)), TextSource(tmp_path, ("b",), (2,))
    scores = baselines(train, heldout)
    unigram = -(np.log2(2.1 / 29.6) + np.log2(0.1 / 29.6)) / 2  # 29.6 = 4 + 256 * 0.1
    bigram = -(np.log2(1.1 / 26.6) + np.log2(0.1 / 27.6)) / 2  # a first, then c after a
    np.testing.assert_allclose(scores[:2], (unigram, bigram), rtol=1e-12)


def test_folder_source(tmp_path):
    names = [f"deep/{i}.md" for i in range(60)]
    (tmp_path / "deep").mkdir()
    for name in names:
        (tmp_path / name).write_bytes(b"\xff\x00 any bytes")
    (tmp_path / "empty.md").touch()
    (tmp_path / "other.rst").write_text("not matched")
    folder = {"source": "folder", "path": str(tmp_path), "pattern": "*.md"}
    train, heldout = load_source(DataConfig(**folder))
    assert sorted(train.names + heldout.names) == sorted(names)
    assert train.read(0, 1, 5) == b"\x00 an"

    with pytest.raises(ValueError, match=r"60 x \*\.md.*try data\.pattern='\*\.md'"):
        load_source(DataConfig(**{**folder, "pattern": "*.txt"}))
    with pytest.raises(ValueError, match="held-out side is empty"):
        load_source(DataConfig(**{**folder, "pattern": "*.rst"}))
    with pytest.raises(ValueError, match="is no folder"):
        load_source(DataConfig(**{**folder, "path": str(tmp_path / "missing")}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "web"}, "'stdlib', 'folder'"),
        ({"source": "folder"}, "needs data.path"),
        ({"path": "/texts"}, "data.source='folder'"),
        ({"context_length": 1}, "at least 2"),
        ({"batch_size": 0}, "at least 1"),
        ({"num_streams": 3}, r"use one of \[1, 2, 4\]"),
        ({"seed": -1}, r"\[0, 2\*\*32\)"),
    ],
)
def test_config_errors_say_what_works(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)
