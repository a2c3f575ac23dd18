"""Files that are not Horovod's source distribution are refused."""

import pytest

from hvdkit.errors import BuildError
from hvdkit.install.sdist import SDIST_SHA256, verify


@pytest.mark.parametrize(
    ("content", "sha256"),
    [
        (b"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
        (b"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
    ],
)
def test_another_file(tmp_path, content, sha256):
    path = tmp_path / "horovod-0.28.1.tar.gz"
    path.write_bytes(content)
    with pytest.raises(BuildError) as caught:
        verify(path)
    assert sha256 in str(caught.value)
    assert SDIST_SHA256 in str(caught.value)


def test_no_file(tmp_path):
    with pytest.raises(BuildError, match="No such file"):
        verify(tmp_path / "horovod-0.28.1.tar.gz")
