"""Makes golden/*.npz with transformers: `python tests/models/qwen/make_golden.py` (needs torch and transformers).

A file holds tokens i32[row, q_pos], logits f32[row, q_pos, vocab], hidden f32[layer + 1, row, q_pos, hidden] and a
checksum of the seed-made weights.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[3])]

from hf_oracle import full_forward  # noqa: E402
from qwen_cases import CASES, GOLDEN, case_tokens, seed_weights  # noqa: E402

from models.qwen.config import QwenConfig  # noqa: E402


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for name, hf in CASES.items():
        tensors = seed_weights(QwenConfig.from_hf(hf))
        tokens = case_tokens(name)
        logits, hidden = full_forward(hf, tensors, tokens)
        checksum = sum(float(np.abs(tensor).sum(dtype=np.float64)) for tensor in tensors.values())
        path = GOLDEN / f"{name}.npz"
        np.savez_compressed(path, tokens=tokens, logits=logits, hidden=hidden, checksum=checksum)
        spread = float(logits.std())
        print(f"{name}: logits std {spread:.2f}, {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
