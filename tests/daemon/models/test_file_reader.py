import os

import pytest

from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.models.file_reader import FileReader


def test_reads_inside_and_refuses_outside(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(bytes(range(100)))
    with FileReader(path) as reader:
        assert reader.size_bytes == 100
        assert reader.read(10, 3, "x").tolist() == [10, 11, 12]
        assert reader.read(100, 0, "x").size == 0
        for offset, count in ((0, 101), (100, 1), (-1, 1), (1 << 70, 1), (0, 1 << 70), (5, -1)):
            with pytest.raises(ModelFileError, match="truncated or damaged"):
                reader.read(offset, count, "x")


def test_a_file_that_shrinks_is_an_error(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"x" * 100)
    with FileReader(path) as reader:
        os.truncate(path, 50)
        with pytest.raises(ModelFileError, match="became shorter"):
            reader.read(0, 100, "x")


def test_only_regular_files(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path):
        with pytest.raises(ModelFileError, match="isn't a regular file"):
            FileReader(path)
    with pytest.raises(ModelFileError, match="can't open nothing"):
        FileReader(tmp_path / "nothing")


def test_close_twice(tmp_path):
    (tmp_path / "f").write_bytes(b"x")
    reader = FileReader(tmp_path / "f")
    reader.close()
    reader.close()
