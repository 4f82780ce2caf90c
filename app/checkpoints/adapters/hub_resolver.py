"""Finds an adapter on a hub by `organisation/name`, or `organisation/name/folder`, as in vLLM's lora_hf_hub_resolver.

Looked for is in the repositories alone that an operator has allowed, each at one commit: the one that was given, or the
one that its revision meant when it was first asked for, which is noted beside the files. So all ingresses mean the same
weights by a name, today and after a restart. Two files are downloaded of an adapter, once, and none whose size the hub
does not say or for which there is no room.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from app.checkpoints.adapters.adapter_config import CONFIG_FILE, PARAM
from app.checkpoints.adapters.adapter_files import MOST_BYTES, MOST_CONFIG_BYTES, WEIGHTS_FILE
from app.checkpoints.adapters.adapter_resolver import AdapterResolver
from app.checkpoints.hub import download, is_offline
from app.errors import CheckpointError, ServerOverloadedError, UnsupportedError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

    from app.config.model import ModelConfig

MOST_FOLDERS = 8
ANSWER_S = 10.0  # for what the hub says of a repository
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PINS = "pinned"


class HubResolver(AdapterResolver):
    """Looks on the hub of HF_ENDPOINT. `repositories`: those that are allowed, `organisation/name`, with `@revision`
    behind it or not, or `organisation/*`; `most_bytes`: of all files that it downloads."""

    def __init__(self, root: Path, repositories: Sequence[str] = (), most_bytes: int = MOST_BYTES) -> None:
        super().__init__(root)
        self._most_bytes = most_bytes
        self._revisions: dict[str, str] = {}
        for entry in repositories:
            repository, _, revision = entry.partition("@")
            self._revisions[repository] = revision or "main"

    @classmethod
    def of(cls, config: ModelConfig) -> HubResolver:
        """See AdapterResolver."""
        return cls(Path(config.adapter_directory or ""), config.adapter_repositories, config.adapter_download_bytes)

    def find(self, name: str) -> Path | None:
        """See AdapterResolver."""
        parts = name.split("/")
        if not (2 <= len(parts) <= 2 + MOST_FOLDERS and all(_PART.fullmatch(part) for part in parts)):
            return None
        repository, folder = "/".join(parts[:2]), "/".join(parts[2:])
        revision = self._revisions.get(repository, self._revisions.get(f"{parts[0]}/*"))
        if revision is None or any(mark in repository for mark in ("--", "..")):
            return None
        with _told_apart(repository) as failed:
            commit = self._commit(repository, revision)
            directory = self.root / f"models--{parts[0]}--{parts[1]}" / "snapshots" / commit / folder
            names = [f"{folder}/{file}".lstrip("/") for file in (CONFIG_FILE, WEIGHTS_FILE)]
            if not all((directory / file).is_file() for file in (CONFIG_FILE, WEIGHTS_FILE)):
                if not self._has_room(name, names, _sizes(repository, commit)):
                    return None
                download(repository, commit, str(self.root), [glob.escape(one) for one in names])
        return None if failed else directory

    def _commit(self, repository: str, revision: str) -> str:
        """The commit that a revision meant when it was asked for first."""
        if _COMMIT.fullmatch(revision):
            return revision
        note = self.root / _PINS / f"{repository.replace('/', '--')}@{revision.replace('/', '--')}"
        if not note.is_file():
            found = _info(repository, revision).sha
            if found is None or not _COMMIT.fullmatch(found):
                raise CheckpointError(f"{repository}: the hub says no commit of {revision!r}", param=PARAM)
            note.parent.mkdir(exist_ok=True)
            own = note.with_name(f".{os.getpid()}-{note.name}")
            own.write_text(found)
            try:
                os.link(own, note)  # whole, and the first one's
            except FileExistsError:
                pass
            finally:
                own.unlink()
        pinned = note.read_text()
        if not _COMMIT.fullmatch(pinned):
            raise CheckpointError(f"{note} holds no commit: remove it", param=PARAM)
        return pinned

    def _has_room(self, name: str, wanted: Sequence[str], sizes: Mapping[str, int | None]) -> bool:
        """False: there is no adapter. UnsupportedError, CheckpointError say why it is not downloaded."""
        config, weights = wanted
        if config not in sizes:
            return False
        if weights not in sizes:
            raise UnsupportedError(f"{name}: it has no {WEIGHTS_FILE}; pickles are not read", param=PARAM)
        own = 0
        for file, most in ((config, MOST_CONFIG_BYTES), (weights, MOST_BYTES)):
            size = sizes[file]
            if size is None or not 0 <= size <= most:
                raise CheckpointError(f"{name}: {file} has {size} bytes; at most {most}", param=PARAM)
            own += size
        taken = sum(file.stat().st_size for file in self.root.glob("models--*/blobs/*"))
        if taken + own > self._most_bytes:
            what = f"{own:,} bytes, beside {taken:,} that lie there: adapter_download_bytes={self._most_bytes:,}"
            raise CheckpointError(f"{name}: no room in {self.root} for {what}", param=PARAM)
        return True


def _info(repository: str, revision: str) -> ModelInfo:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    if is_offline():
        raise OfflineModeIsEnabled(f"HF_HUB_OFFLINE forbids to ask for {repository}")
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    return api.model_info(repository, revision=revision, files_metadata=True, timeout=ANSWER_S)


def _sizes(repository: str, commit: str) -> dict[str, int | None]:
    """Returns the size of each file, as far as the hub says it."""
    return {file.rfilename: file.size for file in _info(repository, commit).siblings or ()}


@contextmanager
def _told_apart(repository: str) -> Iterator[list[bool]]:
    """Fills the list where there is no such repository. CheckpointError: it may not be read, or is not what was
    configured; ServerOverloadedError: the hub cannot be asked just now."""
    from httpx import HTTPError
    from huggingface_hub import errors

    failed: list[bool] = []
    try:
        yield failed
    except errors.GatedRepoError:
        raise CheckpointError(f"{repository} is gated: HF_TOKEN has to be one that may read it", param=PARAM) from None
    except errors.RevisionNotFoundError:
        raise CheckpointError(f"{repository} has no such revision", param=PARAM) from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        failed.append(True)
    except errors.OfflineModeIsEnabled as error:
        raise CheckpointError(str(error), param=PARAM) from None
    except (errors.HfHubHTTPError, HTTPError, OSError) as error:
        what = f"the hub cannot be asked for {repository} now: {type(error).__name__}"
        raise ServerOverloadedError(what, param=PARAM) from error
