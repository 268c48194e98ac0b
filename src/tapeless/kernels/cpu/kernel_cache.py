"""Compiled CPU kernels on disk: one file for each kernel and signature, with a checksum.

Numba's own cache has an index and data files, written one after the other: several processes that compile at once may leave
an index that names another's file, and a damaged file ends the process, at worst by running damaged machine code. Here a file
is complete or absent, and what does not match its checksum is compiled again. A cache that cannot be written (a full or
read-only disk) is a warning: the kernel is compiled, and forgotten with the process.

    file   sha256 of its name and the rest, 32 bytes · Numba's serialised result of the compilation
Tested by: tests/kernels/cpu/test_kernel_cache.py."""

import hashlib
import logging
import os
import pickle
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import _Cache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

log = logging.getLogger("tapeless")
DIGEST = hashlib.sha256().digest_size
_warned: set[str] = set()  # once in a process, not for each of fifty kernels


def _warn_once(text: str, *facts: object) -> None:
    if text not in _warned:
        _warned.add(text)
        log.warning(text, *facts)


def _digest(path: Path, content: bytes) -> bytes:
    """With the name, so that a file in the place of another is noticed: it is a kernel too, with other arguments."""
    return hashlib.sha256(path.name.encode() + b"\0" + content).digest()


class KernelCache(_Cache):
    """Of one kernel, in the place of Numba's."""

    def __init__(self, function: Callable[..., Any], folder: Path):
        self.folder = folder
        self._name = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}".replace("<", "").replace(">", "")
        self._python = sys.implementation.cache_tag

    @property
    def cache_path(self) -> str:
        return str(self.folder)

    def enable(self) -> None:
        pass

    def disable(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def path(self, signature: Any, codegen: Any) -> Path:
        """The folder's name is a hash of all sources; the signature, the processor, and the versions are in the file's."""
        key = repr((str(signature), codegen.magic_tuple(), self._python, numba.__version__))
        return self.folder / f"{self._name}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.kernel"

    def load_overload(self, sig: Any, target_context: Any) -> Any:  # CompileResult | None
        target_context.refresh()
        path = self.path(sig, target_context.codegen())
        try:
            if not path.is_file() and not os.path.lexists(path):
                return None
            content = path.read_bytes() if path.is_file() else b""  # not from a pipe of that name, which would block
            if _digest(path, content[DIGEST:]) == content[:DIGEST]:
                return CompileResult._rebuild(target_context, *pickle.loads(content[DIGEST:]))
            reason = "its checksum does not match"
        except Exception as error:  # of the disk, or of a Numba that reads its own format differently
            reason = repr(error)
        log.warning("the cached kernel %s is damaged (%s): it is compiled again", path, reason)
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        if data.library.has_dynamic_globals:  # addresses of this process
            return
        path = self.path(sig, data.codegen)
        content = dumps(data._reduce())
        temporary = path.with_name(f".tmp-{os.getpid()}-{threading.get_ident()}-{path.name}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            try:
                temporary.write_bytes(_digest(path, content) + content)
                os.replace(temporary, path)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
        except OSError as error:
            text = "compiled CPU kernels cannot be cached in %s: %s; they are compiled again by every process"
            _warn_once(text, self.folder, error.strerror or error)
