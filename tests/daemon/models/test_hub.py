import time
from types import SimpleNamespace

import huggingface_hub
import pytest

from tierd.daemon.errors import DownloadFailed
from tierd.daemon.models.hub import HuggingFaceHub


def test_snapshot_passes_everything_on(monkeypatch, tmp_path, quiet):
    seen = {}

    def snapshot(repo, **kwargs):
        seen.update(kwargs, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert HuggingFaceHub().snapshot("o/n", "main", ("*.json",), True, quiet) == tmp_path
    assert seen == {
        "repo": "o/n", "revision": "main", "allow_patterns": ["*.json"], "local_files_only": True, "endpoint": None,
        "ignore_patterns": ["*/*.safetensors*"],
    }  # fmt: skip


def test_files(monkeypatch):
    def info(self, repo, revision, timeout):
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=f"{repo}.{revision}")])

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", info)
    assert HuggingFaceHub().files("o/n", None) == ["o/n.None"]


def test_a_hub_that_is_not_there_is_told_at_once_and_in_one_line(capfd):
    started_s = time.monotonic()
    with pytest.raises(DownloadFailed) as caught:
        HuggingFaceHub("http://127.0.0.1:9").files("no/such", None)
    assert "no/such could not be fetched: " in caught.value.message and "\n" not in caught.value.message
    assert time.monotonic() - started_s < 5, "nothing is tried again and again"
    assert capfd.readouterr().err == ""


class GatedRepoError(Exception):
    """Named as the hub's."""


@pytest.mark.parametrize(
    ("error", "message", "hint"),
    [
        (GatedRepoError("401\nmore"), "o/n could not be fetched: 401", "hf auth login"),
        (ConnectionError("no route"), "o/n could not be fetched: no route", "check the network"),
        (RuntimeError(), "o/n could not be fetched: RuntimeError", "check the network"),
    ],
)
def test_errors_say_what_to_do(monkeypatch, quiet, error, message, hint):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    hub = HuggingFaceHub()
    for call in (lambda: hub.files("o/n", None), lambda: hub.snapshot("o/n", None, (), False, quiet)):
        with pytest.raises(DownloadFailed) as caught:
            call()
        assert caught.value.message == message and hint in (caught.value.hint or "")
