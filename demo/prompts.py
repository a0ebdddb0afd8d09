"""Cuts and reads the held-out prompts of ``heldout.jsonl``.

Duty: choose stretches of 100 to 300 tokens of whole lines from held-out files.
"""

import json
import random

from transformers import PreTrainedTokenizerBase

from .corpus import DEMO_DIR, SourceFile, heldout_files

HELDOUT_PATH = DEMO_DIR / "heldout.jsonl"
NUM_PROMPTS = 64
NUM_PROMPT_ROUNDS = 6
MIN_PROMPT_TOKENS = 100
MAX_PROMPT_TOKENS = 300


def cut_prompt(text: str, tokenizer: PreTrainedTokenizerBase, rng: random.Random) -> str | None:
    """Cut one prompt of whole lines out of ``text``, or None where it is too short."""
    lines = text.splitlines(keepends=True)
    target_num_tokens = rng.randint(MIN_PROMPT_TOKENS + 20, MAX_PROMPT_TOKENS - 40)
    starts = [
        index
        for index, line in enumerate(lines)
        if line.startswith(("def ", "class ", "    def ", "@", "import ", "from "))
    ]
    if not starts:
        return None
    start = rng.choice(starts)
    num_tokens = 0
    for end in range(start, len(lines)):
        num_tokens += len(tokenizer.encode(lines[end], add_special_tokens=False))
        if num_tokens > MAX_PROMPT_TOKENS:
            return None
        if num_tokens >= target_num_tokens and lines[end].strip():
            # No final line break: the model continues with one and the indentation.
            return "".join(lines[start : end + 1]).rstrip()
    return None


def write_prompts(files: list[SourceFile], tokenizer: PreTrainedTokenizerBase) -> int:
    """Cut the held-out prompts into ``heldout.jsonl``; return how many were written."""
    rng = random.Random(0)
    candidates = heldout_files(files)
    prompts: list[dict[str, str]] = []
    first_lines: set[str] = set()
    for _ in range(NUM_PROMPT_ROUNDS):
        for file in candidates:
            text = cut_prompt(file.text, tokenizer, rng)
            if text is None or len(prompts) == NUM_PROMPTS:
                continue
            first_line = text.splitlines()[0]
            if first_line not in first_lines:
                first_lines.add(first_line)
                prompts.append({"source": file.source, "text": text})
    prompts.sort(key=lambda prompt: prompt["source"])
    lines = [json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in prompts]
    HELDOUT_PATH.write_text("".join(lines), encoding="utf-8")
    return len(prompts)


def load_prompts() -> list[str]:
    """Return the texts of the held-out prompts."""
    lines = HELDOUT_PATH.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]
