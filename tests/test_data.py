"""Text files become documents, and documents fill sequences: nothing is lost, nothing is there twice."""

import errno
import os
import shutil

import numpy as np
import pytest
from data_base import read_whole, write

from libra_jax.data import DataConfig, TextDocuments
from libra_jax.data.documents import END_OF_DOCUMENT, VOCAB_SIZE, decode, encode, text_files, text_files_and_others

# ----------------------------------------------------------------------------------------------------------- documents


def test_text_files_become_documents(tmp_path):
    write(tmp_path, {"b.py": b"x = 1\n", "a/z.md": b"\xff\x00", "a/b.txt": b"", ".git/c.py": b"1", "d.bin": b"1"})
    assert [path.name for path in text_files(tmp_path)] == ["b.txt", "z.md", "b.py"]
    documents = TextDocuments.open([tmp_path])
    assert documents.names == (f"{tmp_path.name}/a/z.md", f"{tmp_path.name}/b.py")
    assert documents.empty_files == 1
    assert read_whole(documents, 0).tolist() == [255, 0, END_OF_DOCUMENT]
    assert read_whole(documents, 1).tolist() == [*b"x = 1\n", END_OF_DOCUMENT]
    assert documents.lengths.tolist() == [3, 7]
    assert documents.describe() == "2 text files, 10 byte tokens; 1 empty files left out"
    assert TextDocuments.open([tmp_path / "b.py"]).lengths.tolist() == [7]
    assert TextDocuments.open([tmp_path], suffixes=(".bin",)).lengths.tolist() == [2]


def test_no_file_of_a_folder_is_lost_without_a_word(tmp_path):
    write(tmp_path, {"U.TXT": b"1", "v.Md": b"2", "w.doc": b"3", ".x.doc": b"4", "sub/y.doc": b"5"})
    (tmp_path / "link").symlink_to(tmp_path / "sub")
    (tmp_path / ".#U.txt").symlink_to("somebody@somewhere.1234")  # an editor's lock
    assert [path.name for path in text_files(tmp_path, (".txt", ".MD"))] == ["U.TXT", "v.Md"]
    found, passed_over = text_files_and_others(tmp_path, (".txt",))
    assert ([path.name for path in found], passed_over) == (["U.TXT"], 4)
    (tmp_path / "lost.txt").symlink_to("nowhere")
    with pytest.raises(FileNotFoundError, match=r"lost\.txt is a link to nothing: .*nowhere is not there"):
        text_files(tmp_path)
    (tmp_path / "lost.txt").unlink()
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(ValueError, match=r"pipe\.txt is a pipe"):
        text_files(tmp_path)


def test_a_folder_that_cannot_be_read_is_named(tmp_path):
    """One that root cannot read either: its path is longer than a path may be."""
    at = os.open(tmp_path, os.O_RDONLY)
    for _ in range(20):
        os.mkdir("d" * 250, dir_fd=at)
        deeper = os.open("d" * 250, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = deeper
    os.close(at)
    with pytest.raises(OSError, match="d/dddd") as error:
        text_files(tmp_path)
    assert error.value.errno == errno.ENAMETOOLONG
    shutil.rmtree(tmp_path)


def test_bytes_come_back_as_text():
    text = "für Ωmega\n"
    tokens = encode(text.encode())
    assert tokens.dtype == np.int32
    assert tokens.max() < VOCAB_SIZE
    assert decode(tokens) == text


def test_documents_of_a_package_have_the_same_names_everywhere():
    documents = TextDocuments.open(packages=["optax"])
    assert "optax/__init__.py" in documents.names
    assert documents.fingerprint == TextDocuments.open(packages=["optax"]).fingerprint


def test_the_fingerprint_stands_for_the_content(tmp_path):
    """The same names and sizes with other bytes are other documents."""
    write(tmp_path, {"a.txt": b"eels", "b.txt": b"bees"})
    before = TextDocuments.open([tmp_path]).fingerprint
    write(tmp_path, {"b.txt": b"bxxs"})
    assert TextDocuments.open([tmp_path]).fingerprint != before
    write(tmp_path, {"b.txt": b"bees"})
    assert TextDocuments.open([tmp_path]).fingerprint == before


def test_a_changed_file_is_refused(tmp_path):
    write(tmp_path, {"a.txt": b"abc"})
    documents = TextDocuments.open([tmp_path])
    write(tmp_path, {"a.txt": b"abcdef"})
    with pytest.raises(ValueError, match=r"a\.txt has changed: 3 bytes when the run began, 6 now"):
        read_whole(documents, 0)


def test_bad_sources_are_refused_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        TextDocuments.open([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="no file that ends with one of"):
        TextDocuments.open([tmp_path])
    write(tmp_path, {"a.txt": b""})
    with pytest.raises(ValueError, match="1 empty files"):
        TextDocuments.open([tmp_path])
    with pytest.raises(ValueError, match="'no_such_package' is not an installed Python package"):
        TextDocuments.open(packages=["no_such_package"])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"paths": ()}, "both empty"),
        ({"packer": "worst_fit"}, "worst_fit"),
        ({"across": "steps"}, "steps"),
        ({"last_step": "repeat"}, "repeat"),
        ({"max_documents": 0}, "max_documents"),
        ({"prefetch": -1}, "prefetch"),
        ({"workers": -1}, "workers"),
        ({"long_documents": "shorten"}, "shorten"),
        ({"held_out": 1.0}, r"held_out \(1.0\)"),
        ({"paths": ("x", "x")}, "names 'x' twice"),
        ({"weights": (1.0, 2.0)}, "2 entries for 1 paths and 0 packages"),
        ({"weights": (1.0,), "packages": ("optax",)}, "1 entries for 1 paths and 1 packages"),
        ({"weights": (0.0,)}, "above 0"),
    ],
)
def test_bad_data_config_is_refused_by_name(values, words):
    with pytest.raises(ValueError, match=words):
        DataConfig(**({"paths": ("x",)} | values))
