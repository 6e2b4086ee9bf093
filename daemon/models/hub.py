"""The Hugging Face hub behind a small interface, so that what is fetched is decided and tested without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from tierd.daemon.errors import DownloadFailed, TierdError

ANSWER_S = 20.0  # for the list of a repository's files
# In patterns of the hub `*` goes into folders: gpt-oss has its weights in one a second time.
_IGNORED = ("*/*.safetensors*",)
Progress = Callable[[str, int, int], None]  # stage, done, total (bytes; a total of 0 is unknown)


class Hub(Protocol):
    """What is needed of a hub. Both methods raise DownloadFailed."""

    def files(self, repo: str, revision: str | None) -> list[str]:
        """The files of a repository, as paths inside it."""

    def snapshot(
        self, repo: str, revision: str | None, patterns: Sequence[str], offline: bool, progress: Progress
    ) -> Path:
        """A directory that holds the files that match, from the cache alone if `offline`."""


class HuggingFaceHub:
    """The real hub. Its library keeps the files (`HF_HOME`), resumes `.incomplete` ones, and finds the user's token.

    `endpoint`: another hub than the one that the library knows.
    """

    def __init__(self, endpoint: str | None = None) -> None:
        self._endpoint = endpoint

    def files(self, repo: str, revision: str | None) -> list[str]:
        """See `Hub`."""
        from huggingface_hub import HfApi  # 0.4 s that only a pull from the hub pays

        try:
            # Not `list_repo_files`: that tries again and again, for 20 s and in lines of its own, without a network.
            found = HfApi(self._endpoint).model_info(repo, revision=revision, timeout=ANSWER_S)
            return [file.rfilename for file in found.siblings or ()]
        except Exception as exc:  # its errors share no base with those of the transport below it
            raise _failed(repo, exc) from exc

    def snapshot(
        self, repo: str, revision: str | None, patterns: Sequence[str], offline: bool, progress: Progress
    ) -> Path:
        """See `Hub`. How far it is stays unknown: the library tells only terminals."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
        progress("download", 0, 0)
        try:
            path = snapshot_download(
                repo, revision=revision, allow_patterns=list(patterns), local_files_only=offline,
                ignore_patterns=list(_IGNORED), endpoint=self._endpoint,
            )  # fmt: skip
        except Exception as exc:
            raise _failed(repo, exc) from exc
        return Path(path)


def _failed(repo: str, exc: Exception) -> TierdError:
    """The hub's error as ours: what happened, in a line, and what to do."""
    hints = {
        "GatedRepoError": "ask for access on its page, then log in with: hf auth login",
        "RepositoryNotFoundError": "check the spelling; private repositories need: hf auth login",
        "RevisionNotFoundError": "check the revision after the @",
        "LocalEntryNotFoundError": "it isn't in the cache; check the network, or pull without --offline",
    }
    kind = type(exc).__name__
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    reason = lines[0][:300] if lines else kind
    return DownloadFailed(f"{repo} could not be fetched: {reason}", hint=hints.get(kind, "check the network"))
