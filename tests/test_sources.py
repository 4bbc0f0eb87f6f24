"""Documents that are read as they are: Megatron's .bin and .idx, and random-access sources with an array of lengths.

Files are written here with `struct` by the format's published layout; what must come back is sliced from Python lists.
"""

import mmap
import pickle
import struct
from pathlib import Path

import grain
import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from libra_jax.data.megatron import MegatronDocuments
from libra_jax.data.sources import Documents, SourceDocuments

CODES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
LARGEST = {1: 255, 2: 127, 3: 32767, 4: 2**31 - 1, 5: 2**31 - 1, 8: 65535}
FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def write_pair(prefix, documents, code=4, modes=False, **other):
    """Write PREFIX.bin and PREFIX.idx. documents: of each, a list of sequences, each a list of ids.

    other: what the files say instead of the truth: magic, version, said_code, sequences, entries, lengths, pointers,
        index.
    """
    flat = [sequence for document in documents for sequence in document]
    width = int(CODES[code][-1])
    lengths = [len(sequence) for sequence in flat]
    pointers = [width * sum(lengths[:i]) for i in range(len(flat))]
    index = [sum(len(d) for d in documents[:i]) for i in range(len(documents) + 1)]
    lengths, pointers, index = (
        other.get(name, value) for name, value in (("lengths", lengths), ("pointers", pointers), ("index", index))
    )
    content = other.get("magic", b"MMIDIDX\x00\x00")
    content += struct.pack("<Q", other.get("version", 1)) + struct.pack("<B", other.get("said_code", code))
    content += struct.pack("<QQ", other.get("sequences", len(lengths)), other.get("entries", len(index)))
    content += struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(pointers)}q", *pointers)
    content += struct.pack(f"<{len(index)}q", *index) + bytes(len(flat) if modes else 0)
    Path(f"{prefix}.idx").write_bytes(content)
    Path(f"{prefix}.bin").write_bytes(b"".join(np.array(sequence, CODES[code]).tobytes() for sequence in flat))
    return str(prefix)


def read(documents: Documents, pieces) -> list[int]:
    """Tokens of pieces (document, start, length), read at once into an array that was full of something else."""
    document, start, length = np.array(pieces, np.int64).reshape(-1, 3).T
    out = np.full(int(length.sum()), -77, np.int32)
    documents.read(document, start, length, out)
    return out.tolist()


@st.composite
def corpora(draw, most_sequences=4):
    """A dtype's code, documents as lists of sequences (both may be empty), and pieces of them in any order."""
    code = draw(st.sampled_from(sorted(CODES)))
    ids = st.integers(0, LARGEST[code])
    sequences = st.lists(st.lists(ids, max_size=7), min_size=int(most_sequences == 1), max_size=most_sequences)
    documents = draw(st.lists(sequences, max_size=8))
    whole = [[token for sequence in document for token in sequence] for document in documents]
    pieces = []
    for number in draw(st.lists(st.integers(0, max(len(whole) - 1, 0)), max_size=12)) if whole else []:
        start = draw(st.integers(0, len(whole[number])))
        pieces.append((number, start, draw(st.integers(0, len(whole[number]) - start))))
    return code, documents, whole, pieces


@FOLDER
@given(corpus=corpora(), modes=st.booleans(), ending=st.sampled_from(["", ".bin", ".idx"]))
def test_megatron_gives_what_was_written(tmp_path, corpus, modes, ending):
    code, written, whole, pieces = corpus
    prefix = write_pair(tmp_path / "corpus", written, code, modes)
    documents = MegatronDocuments.open(prefix + ending)
    assert documents.lengths.tolist() == [len(document) for document in whole]
    expected = [token for number, start, length in pieces for token in whole[number][start : start + length]]
    assert read(documents, pieces) == expected
    assert read(pickle.loads(pickle.dumps(documents)), pieces) == expected
    tokens = sum(map(len, whole))
    assert documents.describe() == f"{len(whole)} documents, {tokens} tokens in {prefix}.bin ({documents.dtype.name})"


@FOLDER
@given(corpus=corpora(most_sequences=1))
def test_megatron_lengths_are_the_files_own_where_a_document_is_a_sequence(tmp_path, corpus):
    code, written, whole, _ = corpus
    documents = MegatronDocuments.open(write_pair(tmp_path / "corpus", written, code))
    for lengths in (documents.lengths, pickle.loads(pickle.dumps(documents)).lengths):
        assert isinstance(lengths, np.memmap) and isinstance(lengths.base, mmap.mmap)
        assert lengths.dtype == np.int32 and lengths.tolist() == [len(document) for document in whole]
    assert len(pickle.dumps(documents)) < 1000


def test_megatron_many_documents(tmp_path):
    """More than are looked at together, some of them without tokens, one and two sequences each."""
    random = np.random.default_rng(0)
    lengths = random.integers(0, 4, 200_001)
    tokens = random.integers(0, 65536, int(lengths.sum())).tolist()
    ends = np.cumsum(lengths).tolist()
    pointers = [2 * (end - length) for end, length in zip(ends, lengths.tolist(), strict=True)]
    for sequences_each in (1, 3):
        index = range(0, 200_002, sequences_each)
        write_pair(tmp_path / "c", [[tokens]], 8, lengths=lengths.tolist(), pointers=pointers, index=list(index))
        documents = MegatronDocuments.open(tmp_path / "c")
        starts = [0, *ends]
        expected = [starts[index[i + 1]] - starts[index[i]] for i in range(len(index) - 1)]
        assert documents.lengths.tolist() == expected
        for number in (0, 1, 21_845, 21_846, 65_535, 65_536, len(index) - 2):
            begin = starts[index[number]]
            assert read(documents, [(number, 0, expected[number])]) == tokens[begin : begin + expected[number]]


def test_megatron_documents_may_lie_in_any_order(tmp_path):
    """Pointers decide: here documents lie in the file from the last to the first, and two share their tokens."""
    write_pair(tmp_path / "c", [[[5, 6, 7, 8, 9]]], lengths=[2, 3, 3], pointers=[12, 0, 0], index=[0, 1, 2, 3])
    documents = MegatronDocuments.open(tmp_path / "c")
    assert read(documents, [(0, 0, 2), (1, 0, 3), (2, 1, 2)]) == [8, 9, 5, 6, 7, 6, 7]
    write_pair(tmp_path / "c", [[[5, 6, 7, 8, 9]]], lengths=[2, 1, 2], pointers=[12, 0, 4], index=[0, 1, 3])
    documents = MegatronDocuments.open(tmp_path / "c")
    assert read(documents, [(0, 0, 2), (1, 0, 3)]) == [8, 9, 5, 6, 7]


def test_megatron_says_what_belongs_to_no_document(tmp_path):
    write_pair(tmp_path / "c", [[[5, 6, 7, 8, 9]]], lengths=[3], pointers=[0])
    assert MegatronDocuments.open(tmp_path / "c").describe().endswith("; 8 bytes of it belong to no document")


def test_megatron_names_a_missing_file(tmp_path):
    prefix = write_pair(tmp_path / "corpus", [[[1]]])
    for gone, other in (("bin", "idx"), ("idx", "bin")):
        content = Path(f"{prefix}.{gone}").read_bytes()
        Path(f"{prefix}.{gone}").unlink()
        for given_path in (prefix, f"{prefix}.bin", f"{prefix}.idx"):
            with pytest.raises(FileNotFoundError, match=rf"corpus\.{gone}: no such .*corpus\.{other}, which is there"):
                MegatronDocuments.open(given_path)
        Path(f"{prefix}.{gone}").write_bytes(content)
    with pytest.raises(FileNotFoundError, match=r"other\.bin: no such file.*other\.idx, which is missing, too"):
        MegatronDocuments.open(tmp_path / "other.bin")


def test_megatron_prefix_may_end_like_a_file(tmp_path):
    assert read(MegatronDocuments.open(write_pair(tmp_path / "text.bin", [[[4, 2]]])), [(0, 0, 2)]) == [4, 2]


# A .bin of two documents, 3 and 2 int32 tokens: 20 bytes. The .idx of it: 34 + 2 * 12 + 3 * 8 = 82 bytes.
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"magic": b"TNTIDX\x00\x00\x00"}, r"corpus\.idx: .*begins with b'MMIDIDX.*, this file with b'TNTIDX"),
        ({"version": 2}, r"corpus\.idx: version must be 1, got 2"),
        ({"said_code": 9}, r"corpus\.idx: dtype code must be one of .*8\], got 9"),
        ({"said_code": 0}, r"corpus\.idx: dtype code must be one of .*8\], got 0"),
        ({"said_code": 6}, r"corpus\.idx: token ids must be whole numbers, but dtype code 6 is float64"),
        ({"said_code": 7}, r"corpus\.idx: token ids must be whole numbers, but dtype code 7 is float32"),
        ({"said_code": 5}, r"sequence 1 begins at byte 12 of corpus\.bin, .*multiple of a token's 8 bytes"),
        ({"sequences": 3}, r"corpus\.idx: 3 sequences and 3 entries .* take 94 bytes \(97 with modes\), .* has 82"),
        ({"entries": 2}, r"corpus\.idx: 2 sequences and 2 entries .* take 74 bytes \(76 with modes\), .* has 82"),
        ({"entries": 0, "index": []}, r"document index must have at least 1 entry, got 0"),
        ({"sequences": 2**63}, r"corpus\.idx: 9223372036854775808 sequences .* but the file has 82"),
        ({"index": [1, 1, 2]}, r"corpus\.idx: the document index must begin with sequence 0, not 1"),
        ({"index": [0, 2, 1]}, r"must not fall, but document 1 begins with sequence 2 and the next with 1"),
        ({"index": [0, 1, 3]}, r"corpus\.idx: document 1 ends before sequence 3, but there are 2"),
        ({"index": [0, 1, 1]}, r"document index ends before sequence 1 and leaves the rest of 2 sequences"),
        ({"index": [0]}, r"document index ends before sequence 0 and leaves the rest of 2 sequences"),
        ({"lengths": [3, -2]}, r"corpus\.idx: sequence 1 has -2 tokens, must be at least 0"),
        ({"lengths": [3, 3]}, r"corpus\.bin: 20 bytes, but by corpus\.idx sequence 1 ends at byte 24"),
        ({"pointers": [0, 16]}, r"corpus\.bin: 20 bytes, but by corpus\.idx sequence 1 ends at byte 24"),
        ({"pointers": [0, 2**63 - 4]}, r"corpus\.bin: 20 bytes, but .* sequence 1 ends at byte 9223372036854775812"),
        ({"pointers": [0, -4]}, r"sequence 1 begins at byte -4 of corpus\.bin, which must be at least 0"),
        ({"pointers": [0, 11]}, r"sequence 1 begins at byte 11 of corpus\.bin, .*multiple of a token's 4 bytes"),
        ({"pointers": [0, 8], "index": [0, 2, 2]}, r"sequence 1 begins at byte 8 .*, which ends at byte 12"),
    ],
)
def test_megatron_refuses_an_index_that_cannot_be(tmp_path, wrong, message):
    prefix = write_pair(tmp_path / "corpus", [[[1, 2, 3]], [[4, 5]]], **wrong)
    with pytest.raises(ValueError, match=message):
        MegatronDocuments.open(prefix)


def test_megatron_refuses_files_cut_short_anywhere(tmp_path):
    prefix = write_pair(tmp_path / "corpus", [[[1, 2, 3]], [[4, 5]]])
    for ending in ("idx", "bin"):
        path = Path(f"{prefix}.{ending}")
        content = path.read_bytes()
        for size in range(len(content)):
            path.write_bytes(content[:size])
            with pytest.raises(ValueError, match=rf"corpus\.{ending}: .*\b{size}\b|begins with b'MMIDIDX"):
                MegatronDocuments.open(prefix)
        path.write_bytes(content)
    Path(f"{prefix}.idx").write_bytes(content + b"???")
    with pytest.raises(ValueError):
        MegatronDocuments.open(prefix)


@FOLDER
@given(place=st.integers(0, 34 + 4 * 12 + 4 * 8 - 1), byte=st.integers(1, 255), code=st.sampled_from(sorted(CODES)))
def test_megatron_any_wrong_byte_is_refused_or_readable(tmp_path, place, byte, code):
    """Whatever an index says, it is refused by a ValueError, or every document can be read and lies in the file."""
    prefix = write_pair(tmp_path / "corpus", [[[1, 2, 3], []], [], [[4, 5], [6]]], code)
    index = Path(f"{prefix}.idx")
    content = bytearray(index.read_bytes())
    before = MegatronDocuments.open(prefix).fingerprint
    content[place] ^= byte
    index.write_bytes(content)
    try:
        documents = MegatronDocuments.open(prefix)
        tokens = read(documents, [(i, 0, int(length)) for i, length in enumerate(documents.lengths)])
    except ValueError:
        return
    assert set(tokens) <= set(np.fromfile(f"{prefix}.bin", documents.dtype).tolist())
    assert documents.fingerprint != before


def test_megatron_fingerprint(tmp_path):
    """The same for a copy; another for other tokens, lengths, borders of documents, order or dtype."""
    base = [[[1, 2, 3], [4]], [[5, 6]]]
    other = [
        [[[1, 2, 3], [4]], [[5, 7]]],
        [[[1, 2, 3, 4]], [[5, 6]]],
        [[[1, 2], [3, 4]], [[5, 6]]],
        [[[1, 2, 3]], [[4], [5, 6]]],
        [[[1, 2, 3], [4]], [[5, 6]], []],
        [[[5, 6]], [[1, 2, 3], [4]]],
    ]
    seen = [MegatronDocuments.open(write_pair(tmp_path / f"c{i}", d)).fingerprint for i, d in enumerate([base, *other])]
    seen.append(MegatronDocuments.open(write_pair(tmp_path / "int64", base, 5)).fingerprint)
    assert len(set(seen)) == len(seen)
    (tmp_path / "elsewhere").mkdir()
    assert MegatronDocuments.open(write_pair(tmp_path / "elsewhere" / "name", base)).fingerprint == seen[0]


def test_megatron_fingerprint_of_a_large_file(tmp_path):
    """Of 12,000,000 bytes, block 20 of 64 begins at 20 * (12,000,000 - 65,536) // 63 = 3,788,720 and ends at 3,854,256.

    The first byte, the last and both ends of this block are seen; the token behind it is not, as the docstring says.
    """
    tokens = np.arange(3_000_000) % 50_000
    before = MegatronDocuments.open(write_pair(tmp_path / "c", [[tokens]])).fingerprint
    for place, seen in ((0, True), (947_180, True), (963_563, True), (963_564, False), (2_999_999, True)):
        changed = tokens.copy()
        changed[place] += 1
        after = MegatronDocuments.open(write_pair(tmp_path / "c", [[changed]])).fingerprint
        assert (after != before) == seen, place


@pytest.mark.parametrize(
    ("code", "tokens", "vocab_size", "message"),
    [
        (4, [1, 2, -3], None, r"corpus\.bin: token 2 of document 1 is -3, but ids must be from 0 to 2147483647"),
        (2, [1, -1, 3], None, r"corpus\.bin: token 1 of document 1 is -1, "),
        (5, [2**31, 1, 2], None, r"token 0 of document 1 is 2147483648, but ids must be from 0 to 2147483647 \(int32"),
        (5, [0, 2**32 + 5, 2], None, r"token 1 of document 1 is 4294967301, "),
        (5, [0, -1, 2], None, r"token 1 of document 1 is -1, "),
        (8, [0, 100, 99], 100, r"token 1 of document 1 is 100, but ids must be from 0 to vocab_size - 1 \(99\)"),
        (1, [0, 99, 100], 100, r"token 2 of document 1 is 100, "),
        (5, [0, 99, 100], 100, r"token 2 of document 1 is 100, "),
    ],
)
def test_megatron_refuses_ids_that_cannot_be(tmp_path, code, tokens, vocab_size, message):
    prefix = write_pair(tmp_path / "corpus", [[[7, 8]], [tokens], [[9]]], code)
    documents = MegatronDocuments.open(prefix, vocab_size=vocab_size, tokenizer="bytes")
    assert (documents.vocab_size, documents.tokenizer) == (vocab_size, "bytes")
    assert read(documents, [(2, 0, 1), (0, 0, 2)]) == [9, 7, 8]
    with pytest.raises(ValueError, match=message):
        read(documents, [(2, 0, 1), (1, 0, 3), (0, 0, 2)])
    bad = int(message.split("token ")[1].split()[0])
    with pytest.raises(ValueError, match=f"token {bad} of document 1"):
        read(documents, [(1, bad, 1)])


def sources(tmp_path) -> list[Documents]:
    """Documents of 2, 0 and 3 tokens."""
    written = [[[7, 8]], [[]], [[4, 5, 6]]]
    return [
        MegatronDocuments.open(write_pair(tmp_path / "one", written)),
        MegatronDocuments.open(write_pair(tmp_path / "several", [[[7], [8]], [], [[4, 5], [6]]])),
        SourceDocuments([np.array(d[0], np.int64) for d in written], np.array([2, 0, 3])),
    ]


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        ((0, 1, 2), r"tokens 1 to 3 of document 0 were asked for, but it has 2"),
        ((1, 0, 1), r"tokens 0 to 1 of document 1 were asked for, but it has 0"),
        ((2, -1, 2), r"tokens -1 to 1 of document 2 were asked for, but it has 3"),
        ((2, 2**63 - 1, 1), r"of document 2 were asked for, but it has 3"),
        ((3, 0, 1), r"document 3 was asked for, but they are 0 to 2"),
        ((-1, 0, 1), r"document -1 was asked for, but they are 0 to 2"),
    ],
)
def test_pieces_outside_a_document_are_refused(tmp_path, piece, message):
    for documents in sources(tmp_path):
        with pytest.raises(ValueError, match=message):
            read(documents, [(0, 0, 2), piece])


def test_another_out_is_refused(tmp_path):
    for documents in sources(tmp_path):
        for out in (np.empty(2, np.int32), np.empty(4, np.int32), np.empty(3, np.int64), np.empty((1, 3), np.int32)):
            with pytest.raises(ValueError, match=rf"out must be int32 of shape \(3,\), got {out.dtype} of shape"):
                documents.read(np.array([2]), np.array([0]), np.array([3]), out)
        assert read(documents, []) == [] and read(documents, [(1, 0, 0)]) == []


def test_vocabularies_that_cannot_be_are_refused(tmp_path):
    prefix = write_pair(tmp_path / "c", [[[1]]])
    for size in (0, 2**31 + 1):
        with pytest.raises(ValueError, match=rf"vocab_size \({size}\) must be from 1 to 2147483648"):
            MegatronDocuments.open(prefix, vocab_size=size)
        with pytest.raises(ValueError, match=rf"vocab_size \({size}\) must be from 1 to 2147483648"):
            SourceDocuments([], np.array([], int), vocab_size=size)


def test_megatron_files_that_change_size_are_refused(tmp_path):
    """A copy in another process opens the files again; so does the first read."""
    prefix = write_pair(tmp_path / "corpus", [[[1, 2]]])
    for ending, size in (("bin", 8), ("idx", 62)):
        documents = MegatronDocuments.open(prefix)
        path = Path(f"{prefix}.{ending}")
        content = path.read_bytes()
        assert len(content) == size
        path.write_bytes(content[:-4])
        with pytest.raises(ValueError, match=rf"corpus\.{ending} has changed: {size} bytes .* opened, {size - 4} now"):
            read(pickle.loads(pickle.dumps(documents)), [(0, 0, 1)])
        path.write_bytes(content)


@given(corpus=corpora(most_sequences=1), form=st.sampled_from(["array", "dict", "bytes", "bytes in a dict"]))
def test_source_gives_what_was_put_in(corpus, form):
    code, _, whole, pieces = corpus
    elements = [np.array(document, CODES[code]) for document in whole]
    if "bytes" in form:
        elements = [element.tobytes() for element in elements]
    if "dict" in form:
        elements = [{"ids": element, "text": "?"} for element in elements]
    documents = SourceDocuments(elements, np.array(list(map(len, whole)), int), tokens="ids", dtype=CODES[code])
    expected = [token for number, start, length in pieces for token in whole[number][start : start + length]]
    assert read(documents, pieces) == expected
    assert read(pickle.loads(pickle.dumps(documents)), pieces) == expected


def test_source_of_array_records_and_of_a_range(tmp_path):
    documents = [[1, 2, 3], [65535], [9, 8]]
    path = str(tmp_path / "documents.array_record")
    writer = ArrayRecordWriter(path, "group_size:1")
    for tokens in documents:
        writer.write(np.array(tokens, "<u2").tobytes())
    writer.close()
    lengths = np.array([3, 1, 2], np.uint32)
    source = SourceDocuments(grain.sources.ArrayRecordDataSource([path]), lengths, dtype="<u2", vocab_size=65536)
    assert np.shares_memory(source.lengths, lengths)
    assert source.describe() == "3 documents, 6 tokens in a source (ArrayRecordDataSource)"
    for copy in (source, pickle.loads(pickle.dumps(source))):
        assert read(copy, [(2, 1, 1), (0, 0, 3), (1, 0, 1), (0, 1, 2)]) == [8, 1, 2, 3, 65535, 2, 3]
        assert (copy.vocab_size, copy.tokenizer, copy.fingerprint) == (65536, None, source.fingerprint)


def test_source_reads_an_element_once_for_all_its_pieces():
    class Counting(list):
        asked = 0

        def __getitem__(self, index):
            Counting.asked += 1
            return super().__getitem__(index)

    documents = SourceDocuments(Counting([np.arange(4), np.arange(5)]), np.array([4, 5]))
    assert read(documents, [(1, 3, 2), (0, 0, 1), (1, 0, 2), (0, 3, 1)]) == [3, 4, 0, 0, 1, 3]
    assert Counting.asked == 2


@pytest.mark.parametrize(
    ("element", "message"),
    [
        (np.arange(4), r"list: element 1 holds 4 tokens, but lengths\[1\] is 3"),
        ({"tokens": np.arange(2)}, r"list: element 1 holds 2 tokens, but lengths\[1\] is 3"),
        (bytes(8), r"list: element 1 holds 4 tokens, but lengths\[1\] is 3"),
        (bytes(7), r"list: element 1 is 7 bytes, which must be a multiple of uint16's 2"),
        ({"text": "?"}, r"list: element 1 has no 'tokens', only \['text'\]"),
        (np.zeros(3), r"list: element 1 must be a 1-d array of integers, got shape \(3,\) and dtype float64"),
        (np.zeros((3, 1), int), r"list: element 1 must be a 1-d array of integers, got shape \(3, 1\)"),
        ("abc", r"list: element 1 must be a 1-d array of integers, got shape \(\)"),
        (np.array([0, 1, -1]), r"list: token 2 of document 1 is -1, but ids must be from 0"),
        (np.array([0, 2**32, 1]), r"list: token 1 of document 1 is 4294967296, but ids must be from 0"),
        (np.array([2**63, 0, 1], np.uint64), r"list: token 0 of document 1 is 9223372036854775808, but ids must be"),
        (np.array([0, 1, 50]), r"list: token 2 of document 1 is 50, but ids must be from 0 to vocab_size - 1 \(49\)"),
    ],
)
def test_source_refuses_elements_that_are_not_as_said(element, message):
    vocab_size = 50 if "vocab" in message else None
    documents = SourceDocuments([np.arange(2), element], np.array([2, 3]), dtype="u2", vocab_size=vocab_size)
    assert read(documents, [(0, 0, 2)]) == [0, 1]
    with pytest.raises(ValueError, match=message):
        read(documents, [(0, 0, 2), (1, 1, 1)])


def test_source_refuses_what_it_cannot_use():
    with pytest.raises(ValueError, match=r"the source has 2 documents, but there are 3 lengths"):
        SourceDocuments([[1], [2]], np.array([1, 1, 1]))
    with pytest.raises(ValueError, match=r"lengths\[1\] \(-4\) must be at least 0"):
        SourceDocuments([[1], [2]], np.array([1, -4]))
    for lengths in (np.array([1.0, 2.0]), np.array([[1, 2]])):
        with pytest.raises(ValueError, match=r"lengths must be a 1-d array of integers, got shape"):
            SourceDocuments([[1], [2]], lengths)
    with pytest.raises(ValueError, match=r"dtype \(float32\) must be one of integers"):
        SourceDocuments([b""], np.array([0]), dtype=np.float32)
    with pytest.raises(ValueError, match=r"element 0 is 4 bytes: name the dtype"):
        read(SourceDocuments([bytes(4)], np.array([2])), [(0, 0, 1)])


def test_source_fingerprint():
    elements = [[1], [2, 3]]
    plain = SourceDocuments(elements, np.array([1, 2])).fingerprint
    assert plain == SourceDocuments(elements, np.array([1, 2], np.uint16)).fingerprint
    assert plain != SourceDocuments(elements, np.array([2, 1])).fingerprint
    assert SourceDocuments(elements, np.array([1, 2]), fingerprint="mine").fingerprint == "mine"


def test_source_lengths_in_a_file_are_mapped_again(tmp_path):
    np.save(tmp_path / "lengths.npy", np.full(100_000, 2, np.uint32))
    lengths = np.load(tmp_path / "lengths.npy", mmap_mode="r")
    documents = SourceDocuments(range(100_000), lengths)
    assert documents.lengths is lengths
    pickled = pickle.dumps(documents)
    assert len(pickled) < 1000
    copy = pickle.loads(pickled).lengths
    assert isinstance(copy, np.memmap) and np.array_equal(copy, lengths)
    part = pickle.loads(pickle.dumps(SourceDocuments(range(3), lengths[5:8])))  # a part is not where its file begins
    assert part.lengths.tolist() == [2, 2, 2]
