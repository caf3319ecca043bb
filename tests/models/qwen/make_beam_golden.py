"""Makes golden/beams.json with transformers: `python tests/models/qwen/make_beam_golden.py` (needs torch and transformers).

Beam search over one seed-made model: for every prompt and setting, tokens and scores of all beams, best first.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[3])]

from hf_oracle import beams, make_model  # noqa: E402
from qwen_cases import CASES, GOLDEN, case_tokens, seed_weights  # noqa: E402

from models.qwen.config import QwenConfig  # noqa: E402

CASE, NUM_BEAMS, NUM_NEW, EOS = "qwen3_head_dim_tied", 4, 12, [2, 7, 30, 31]
SETTINGS = [(1.0, False), (-1.0, False), (2.0, False), (1.0, True), (1.0, "never"), (-1.0, "never")]


def main() -> None:
    hf = CASES[CASE]
    model = make_model(hf, seed_weights(QwenConfig.from_hf(hf)))
    tokens = case_tokens(CASE)
    prompts = [tokens[0, :7].tolist(), tokens[1, :4].tolist()]
    lines = []
    for (length_penalty, early_stopping), prompt in itertools.product(SETTINGS, prompts):
        found, scores = beams(
            model, prompt, EOS, num_beams=NUM_BEAMS, max_new_tokens=NUM_NEW,
            length_penalty=length_penalty, early_stopping=early_stopping,
        )  # fmt: skip
        print(length_penalty, early_stopping, [len(x) for x in found], scores)
        entry = {
            "length_penalty": length_penalty, "early_stopping": early_stopping, "prompt": prompt,
            "tokens": found, "scores": [round(score, 6) for score in scores],
        }  # fmt: skip
        lines.append(json.dumps(entry))
    head = {"case": CASE, "num_beams": NUM_BEAMS, "max_new_tokens": NUM_NEW, "eos": EOS}
    text = "{" + json.dumps(head)[1:-1] + ', "searches": [\n  ' + ",\n  ".join(lines) + "\n]}\n"
    (GOLDEN / "beams.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
