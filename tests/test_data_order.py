"""Reading a prepared folder, and the order of training sequences."""

from __future__ import annotations

import json
import pickle
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_texts import plain, run_python, write_jsonl
from valuepath.data.corpus import Corpus
from valuepath.data.order import TrainingOrder
from valuepath.data.prepare import prepare


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("corpus")
    sizes = {"large": 300, "middle": 80, "small": 9}
    sources = [str(write_jsonl(place / f"{name}.jsonl", plain(size, seed=size))) for name, size in sizes.items()]
    prepare(sources, place / "out", tokenizer="train:350", block=16)
    return place / "out"


@pytest.fixture(scope="module")
def corpus(folder) -> Corpus:
    return Corpus.load(folder)


# ---------------------------------------------------------------------------------------------------------- reading
@settings(max_examples=100)
@given(st.data())
def test_any_piece_of_a_stream_is_a_slice_of_its_stored_rows(corpus, data):
    name = data.draw(st.sampled_from(list(corpus.domains)))
    stream = data.draw(st.sampled_from([corpus.domains[name].train, corpus.domains[name].validation]))
    start = data.draw(st.integers(0, len(stream)))
    stop = data.draw(st.integers(start, len(stream)))
    import datasets

    whole = np.concatenate(datasets.load_from_disk(str(stream.folder)).with_format("numpy")["input_ids"][:])
    found = stream.read(start, stop)
    assert found.dtype == np.int64 and np.array_equal(found, whole[start:stop])
    for wrong in ((start, len(stream) + 1), (-1, stop), (stop + 1, stop)):
        with pytest.raises(ValueError, match="ids"):
            stream.read(*wrong)


def test_a_stream_of_many_record_batches_reads_across_their_borders(tmp_path):
    """``datasets`` writes a thousand rows at once, so that this one is in several pieces."""
    prepare([str(write_jsonl(tmp_path / "a.jsonl", plain(300)))], tmp_path / "out", tokenizer="train:257", block=8)
    stream = Corpus.load(tmp_path / "out").domains["a"].train
    assert len(stream._parts) > 3
    border = len(stream._parts[0])
    joined = np.concatenate(stream._parts)
    for start, stop in ((border - 3, border + 3), (border, border + 1), (border - 1, 2 * border + 5), (0, len(stream))):
        assert np.array_equal(stream.read(start, stop), joined[start:stop])


def test_the_ids_stay_in_the_files(folder):
    """Loading keeps no copy: the arrays are views of memory that does not belong to numpy and cannot be written."""
    stream = Corpus.load(folder).domains["large"].train
    assert all(not part.flags.owndata and not part.flags.writeable for part in stream._parts)
    copy = pickle.loads(pickle.dumps(stream))
    assert len(pickle.dumps(stream)) < 1000 and np.array_equal(copy.read(3, 300), stream.read(3, 300))


def test_damage_and_foreign_folders_are_one_error(folder, tmp_path):
    def broken(name: str, change) -> str:
        place = tmp_path / name
        shutil.copytree(folder, place)
        change(place)
        with pytest.raises(ValueError) as caught:
            Corpus.load(place).tokenizer()
        assert str(place) in str(caught.value) and "\n" not in str(caught.value)
        return str(caught.value)

    def edit(place: Path, **changes) -> None:
        meta = json.loads((place / "meta.json").read_text())
        for key, value in changes.items():
            if value is None:
                del meta[key]
            else:
                meta[key] = value
        (place / "meta.json").write_text(json.dumps(meta))

    rows = "train/000-large/data-00000-of-00001.arrow"
    assert "format 99" in broken("newer", lambda place: edit(place, format=99))
    assert "damaged" in broken("keyless", lambda place: edit(place, eos=None))
    assert "damaged" in broken("typeless", lambda place: edit(place, domains={"x": 3}))
    assert "damaged" in broken("blocks", lambda place: edit(place, block=17))
    assert "damaged" in broken("half", lambda place: (place / "meta.json").write_text('{"format": 1, '))
    assert "damaged" in broken("list", lambda place: (place / "meta.json").write_text("[]"))
    assert "damaged" in broken("rowless", lambda place: shutil.rmtree(place / "validation" / "001-middle"))
    assert "damaged" in broken("cut", lambda place: (place / rows).write_bytes((folder / rows).read_bytes()[:3000]))
    assert "damaged" in broken("swapped", lambda place: shutil.copy(folder / rows.replace("train", "validation"), place / rows))
    assert "damaged" in broken("wordless", lambda place: shutil.rmtree(place / "tokenizer"))
    assert "no prepared text" in broken("other", lambda place: (place / "meta.json").unlink())
    with pytest.raises(ValueError, match="there is no such folder"):
        Corpus.load(tmp_path / "absent")


# ------------------------------------------------------------------------------------------------------------ order
@settings(max_examples=60)
@given(
    st.integers(1, 60),
    st.integers(0, 2**63),
    st.integers(0, 700),
    st.integers(0, 700),
    st.none() | st.tuples(*[st.floats(0.01, 100)] * 3),
)
def test_a_longer_order_begins_like_a_shorter_one_and_every_sequence_is_whole(corpus, length, seed, n, m, weights):
    n, m = sorted((n, m))
    order = TrainingOrder(corpus, length, seed, None if weights is None else dict(zip(corpus.domains, weights, strict=True)))
    domains, starts = order.take(m)
    again, first = TrainingOrder(corpus, length, seed, order_weights(corpus, weights)).take(n)
    assert domains.dtype == np.int16 and starts.dtype == np.int64 and domains.shape == starts.shape == (m,)
    assert np.array_equal(again, domains[:n]) and np.array_equal(first, starts[:n])
    streams = [domain.train for domain in corpus.domains.values()]
    for d, start in zip(domains.tolist(), starts.tolist(), strict=True):
        assert start % length == 0 and start + length + 1 <= len(streams[d])
    for d, stream in enumerate(streams):
        count = (len(stream) - 1) // length
        drawn = starts[domains == d].tolist()
        epochs = [Counter(drawn[at : at + count]) for at in range(0, len(drawn), count)]
        assert all(max(each.values()) == 1 for each in epochs), "no sequence twice before all have come once"
        assert all(len(each) == count for each in epochs[:-1])
        assert order.epochs(m)[list(corpus.domains)[d]] == pytest.approx(len(drawn) / count)


def order_weights(corpus: Corpus, weights: tuple[float, ...] | None) -> dict[str, float] | None:
    """Doubled, which changes nothing: only their ratios count."""
    return None if weights is None else {name: 2 * weight for name, weight in zip(corpus.domains, weights, strict=True)}


def test_shares_follow_the_weights_and_by_default_the_sizes(corpus):
    sizes = np.array([(len(domain.train) - 1) // 16 for domain in corpus.domains.values()])
    given = {"large": 1.0, "middle": 2.0, "small": 5.0}
    for seed in range(20):
        for order, share in (
            (TrainingOrder(corpus, 16, seed), sizes / sizes.sum()),
            (TrainingOrder(corpus, 16, seed, given), np.array([1, 2, 5]) / 8),
        ):
            domains, _ = order.take(4000)
            drawn = np.cumsum(domains[:, None] == np.arange(3), axis=0)
            apart = np.abs(drawn - np.arange(1, 4001)[:, None] * share)
            assert apart.max() < 6, "evenly at every step, not only on average"


def test_one_epoch_reads_every_token_but_the_tail_once(corpus):
    order = TrainingOrder(corpus, 16, 0, {"large": 1e-9, "middle": 1.0, "small": 1e-9})
    stream = corpus.domains["middle"].train
    count = (len(stream) - 1) // 16
    domains, starts = order.take(count)
    assert (domains == 1).all()
    inputs = np.concatenate([order.read(1, start)[:-1] for start in np.sort(starts).tolist()])
    assert np.array_equal(inputs, stream.read(0, count * 16))
    sequence = order.read(1, int(starts[5]))
    assert sequence.shape == (17,) and np.array_equal(sequence, stream.read(int(starts[5]), int(starts[5]) + 17))


def test_seeds_and_epochs_differ_and_domains_do_not_disturb_each_other(corpus, tmp_path):
    order = TrainingOrder(corpus, 16, 0)
    count = order.counts[2]
    _, one = TrainingOrder(corpus, 16, 0, {"large": 1e-9, "middle": 1e-9, "small": 1.0}).take(2 * count)
    _, other = TrainingOrder(corpus, 16, 1, {"large": 1e-9, "middle": 1e-9, "small": 1.0}).take(2 * count)
    assert sorted(one[:count]) == sorted(one[count:]) == sorted(other[:count])
    assert one[:count].tolist() != one[count:].tolist() != sorted(one[:count]) and one.tolist() != other.tolist()
    domains, starts = order.take(4000)
    assert starts[domains == 2][: len(one)].tolist() == one[: (domains == 2).sum()].tolist()


def test_the_order_is_the_same_in_another_process(corpus, folder):
    code = (
        "import sys\nfrom valuepath.data.corpus import Corpus\nfrom valuepath.data.order import TrainingOrder\n"
        "domains, starts = TrainingOrder(Corpus.load(sys.argv[1]), 24, 7).take(500)\n"
        "print(domains.tolist(), starts.tolist())\n"
    )
    domains, starts = TrainingOrder(corpus, 24, 7).take(500)
    done = run_python(code, str(folder), PYTHONHASHSEED="77")
    assert done.stdout.strip() == f"{domains.tolist()} {starts.tolist()}", done.stderr


def test_weights_of_the_folder_hold_unless_others_are_given(tmp_path):
    sources = [str(write_jsonl(tmp_path / f"{name}.jsonl", plain(60, seed=n))) for n, name in enumerate("ab")]
    prepare(sources, tmp_path / "out", tokenizer="train:300", block=16, weights={"a": 3.0, "b": 1.0})
    corpus = Corpus.load(tmp_path / "out")
    assert [domain.weight for domain in corpus.domains.values()] == [3.0, 1.0]
    assert np.bincount(TrainingOrder(corpus, 16, 0).take(400)[0]).tolist() == pytest.approx([300, 100], abs=4)
    given = TrainingOrder(corpus, 16, 0, {"a": 1.0, "b": 1.0})
    assert np.bincount(given.take(400)[0]).tolist() == pytest.approx([200, 200], abs=4)


def test_what_cannot_be_ordered_says_why(corpus):
    shortest = len(corpus.domains["small"].train)
    with pytest.raises(ValueError, match=rf"'small'.*longest that every domain has is {shortest - 1}$"):
        TrainingOrder(corpus, shortest, 0)
    assert TrainingOrder(corpus, shortest - 1, 0).counts[2] == 1
    weights = {"large": 1.0, "middle": 1.0}
    with pytest.raises(ValueError, match="nothing is said about small"):
        TrainingOrder(corpus, 16, 0, weights)
    with pytest.raises(ValueError, match="Did you mean 'small'"):
        TrainingOrder(corpus, 16, 0, weights | {"smal": 1.0})
    with pytest.raises(ValueError, match="above 0"):
        TrainingOrder(corpus, 16, 0, weights | {"small": 0.0})
    for arguments in ((0, 0), (16, -1)):
        with pytest.raises(ValueError, match="at least"):
            TrainingOrder(corpus, *arguments)
    with pytest.raises(ValueError, match="at least 0"):
        TrainingOrder(corpus, 16, 0).take(-1)
