"""Text files become documents, and documents fill sequences: nothing is lost, nothing is there twice."""

import numpy as np
import pytest
from data_base import write
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax.data import DataConfig, TextDocuments, pack_documents
from libra_jax.data.batches import sequence_arrays
from libra_jax.data.documents import END_OF_DOCUMENT, PADDING_TOKEN, VOCAB_SIZE, cut, decode, encode, text_files

# ----------------------------------------------------------------------------------------------------------- documents


@settings(deadline=None)
@given(st.lists(st.integers(1, 200), max_size=20), st.integers(1, 60))
def test_cut_keeps_every_token_once(lengths, seq_len):
    document, start, length = cut(np.array(lengths, np.int64), seq_len)
    expected = [(d, s, min(seq_len, whole - s)) for d, whole in enumerate(lengths) for s in range(0, whole, seq_len)]
    assert list(zip(document.tolist(), start.tolist(), length.tolist(), strict=True)) == expected


def test_text_files_become_documents(tmp_path):
    write(tmp_path, {"b.py": b"x = 1\n", "a/z.md": b"\xff\x00", "a/b.txt": b"", ".git/c.py": b"1", "d.bin": b"1"})
    assert [path.name for path in text_files(tmp_path)] == ["b.txt", "z.md", "b.py"]
    documents = TextDocuments.open(64, [tmp_path])
    assert documents.names == (f"{tmp_path.name}/a/z.md", f"{tmp_path.name}/b.py")
    assert documents.empty_files == 1
    assert documents[0].tolist() == [255, 0, END_OF_DOCUMENT]
    assert documents[1].tolist() == [*b"x = 1\n", END_OF_DOCUMENT]
    assert documents.lengths.tolist() == [3, 7]
    assert "2 documents, 10 tokens" in documents.describe()
    assert TextDocuments.open(64, [tmp_path / "b.py"]).lengths.tolist() == [7]
    assert TextDocuments.open(64, [tmp_path], suffixes=(".bin",)).lengths.tolist() == [2]


def test_a_long_document_is_cut_and_counted(tmp_path):
    """40 tokens in sequences of 16: pieces of 16, 16 and 8, each with positions from 0. Never silently."""
    write(tmp_path, {"long.txt": bytes(range(39)), "short.txt": b"ab"})
    documents = TextDocuments.open(16, [tmp_path])
    assert documents.lengths.tolist() == [16, 16, 8, 3]
    assert documents.cut_documents == 1
    assert np.concatenate([documents[i] for i in range(3)]).tolist() == [*range(39), END_OF_DOCUMENT]
    assert "1 longer than 16 tokens, cut into 3 pieces" in documents.describe()
    rows = sequence_arrays([documents[0]], 16)
    assert rows["positions"].tolist() == list(range(16))
    assert sequence_arrays([documents[2]], 16)["positions"][:8].tolist() == list(range(8))


def test_bytes_come_back_as_text():
    text = "für Ωmega\n"
    tokens = encode(text.encode())
    assert tokens.dtype == np.int32
    assert tokens.max() < VOCAB_SIZE
    assert decode(np.append(tokens, PADDING_TOKEN)) == text


def test_documents_of_a_package_have_the_same_names_everywhere():
    documents = TextDocuments.open(1024, packages=["optax"])
    assert "optax/__init__.py" in documents.names
    assert documents.fingerprint == TextDocuments.open(1024, packages=["optax"]).fingerprint
    assert documents.fingerprint != TextDocuments.open(512, packages=["optax"]).fingerprint


def test_the_fingerprint_stands_for_the_content(tmp_path):
    """The same names and sizes with other bytes are other documents."""
    write(tmp_path, {"a.txt": b"eels", "b.txt": b"bees"})
    before = TextDocuments.open(16, [tmp_path]).fingerprint
    write(tmp_path, {"b.txt": b"bxxs"})
    assert TextDocuments.open(16, [tmp_path]).fingerprint != before
    write(tmp_path, {"b.txt": b"bees"})
    assert TextDocuments.open(16, [tmp_path]).fingerprint == before


def test_a_changed_file_is_refused(tmp_path):
    write(tmp_path, {"a.txt": b"abc"})
    documents = TextDocuments.open(16, [tmp_path])
    write(tmp_path, {"a.txt": b"abcdef"})
    with pytest.raises(ValueError, match=r"a\.txt has changed: 3 bytes when the run began, 6 now"):
        documents[0]


def test_bad_sources_are_refused_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        TextDocuments.open(16, [tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="no file that ends with one of"):
        TextDocuments.open(16, [tmp_path])
    write(tmp_path, {"a.txt": b""})
    with pytest.raises(ValueError, match="1 empty files"):
        TextDocuments.open(16, [tmp_path])
    with pytest.raises(ValueError, match="'no_such_package' is not an installed Python package"):
        TextDocuments.open(16, packages=["no_such_package"])
    with pytest.raises(ValueError, match=r"seq_len \(0\)"):
        TextDocuments.open(0, [tmp_path])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"paths": ()}, "both empty"),
        ({"packer": "worst_fit"}, "worst_fit"),
        ({"across": "steps"}, "steps"),
        ({"last_step": "repeat"}, "repeat"),
        ({"max_documents": 0}, "max_documents"),
        ({"prefetch": -1}, "prefetch"),
    ],
)
def test_bad_data_config_is_refused_by_name(values, words):
    with pytest.raises(ValueError, match=words):
        DataConfig(**({"paths": ("x",)} | values))


# ------------------------------------------------------------------------------------------------------------- packing


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(1, 32), min_size=1, max_size=60),
    st.integers(0, 5),
    st.sampled_from(["first_fit", "best_fit"]),
    st.none() | st.integers(1, 4),
)
def test_packing_keeps_every_document_once_and_whole(lengths, seed, packer, limit):
    packed = pack_documents(lengths, 32, seed=seed, packer=packer, max_documents=limit)
    assert sorted(np.concatenate(packed).tolist()) == list(range(len(lengths)))
    sizes = np.array(lengths)
    for sequence in packed:
        assert 0 < sizes[sequence].sum() <= 32
        assert limit is None or len(sequence) <= limit
    again = pack_documents(lengths, 32, seed=seed, packer=packer, max_documents=limit)
    assert [s.tolist() for s in packed] == [s.tolist() for s in again]


def test_packing_fills_sequences_and_shuffles_by_seed():
    lengths = np.random.default_rng(0).integers(1, 200, 500)
    packed = pack_documents(lengths, 256)
    assert lengths.sum() / (256 * len(packed)) > 0.9
    assert [s.tolist() for s in packed] != [s.tolist() for s in pack_documents(lengths, 256, seed=1)]


def test_limit_of_documents_holds_in_every_sequence():
    """12 documents of one token, at most 5 a sequence: the limit holds for sequences opened later, too."""
    assert [len(s) for s in pack_documents([1] * 12, 16)] == [12]
    assert sorted(len(s) for s in pack_documents([1] * 12, 16, max_documents=5)) == [2, 5, 5]


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (([40], 16), {}, ["document 0", "40", "16", "cut it first"]),
        (([4, 0], 16), {}, ["length 0", "entry 1"]),
        (([], 16), {}, ["0 documents"]),
        (([4], 16), {"packer": "next_fit"}, ["next_fit", "best_fit"]),
        (([4], 16), {"max_documents": 0}, ["max_documents (0)"]),
    ],
)
def test_bad_packing_is_refused_by_name(arguments, options, words):
    with pytest.raises(ValueError) as error:
        pack_documents(*arguments, **options)
    for word in words:
        assert word in str(error.value)
