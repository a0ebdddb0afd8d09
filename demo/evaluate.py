"""Measures the demo models on the held-out files.

Duty: held-out loss of both models, and how many of the draft's tokens the target
accepts; results go to ``evaluation.json``.
The acceptance loop is greedy speculative decoding (Leviathan et al., 2023, at
temperature zero) written the plain way, without caches: a reference.
"""

import json
import logging
import math
from dataclasses import asdict, dataclass

import torch
from rich.progress import track
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from .checkpoints import DRAFT_DIR, TARGET_DIR
from .corpus import DEMO_DIR, collect_files, heldout_files, load_prompts
from .training import encode_files

logger = logging.getLogger(__name__)

EVALUATION_PATH = DEMO_DIR / "evaluation.json"
WINDOW_TOKENS = 512
NUM_DRAFT_TOKENS = 4
NUM_NEW_TOKENS = 96


@dataclass(frozen=True)
class HeldoutLoss:
    """Loss of one model over the held-out files."""

    nats_per_token: float
    bits_per_byte: float
    top1_accuracy: float


@dataclass(frozen=True)
class Acceptance:
    """Outcome of speculative decoding over the held-out prompts."""

    mean_accepted_tokens: float
    num_draft_tokens: int
    num_verify_steps: int
    min_prompt_mean: float
    max_prompt_mean: float


@torch.inference_mode()
def heldout_loss(model: LlamaForCausalLM, tokens: Tensor, num_bytes: int) -> HeldoutLoss:
    """Return the loss over ``tokens``, the encoding of ``num_bytes`` bytes of text.

    Each window but the first opens cold, so the figure is slightly pessimistic.
    """
    total_nats, num_correct, num_predicted = 0.0, 0, 0
    for window in tokens.long().split(WINDOW_TOKENS):
        if window.numel() < 2:
            continue
        logits = model(input_ids=window[None], use_cache=False).logits[0, :-1].float()
        total_nats += functional.cross_entropy(logits, window[1:], reduction="sum").item()
        num_correct += int((logits.argmax(-1) == window[1:]).sum())
        num_predicted += window.numel() - 1
    nats_per_token = total_nats / num_predicted
    return HeldoutLoss(
        nats_per_token=nats_per_token,
        bits_per_byte=nats_per_token / math.log(2) * tokens.numel() / num_bytes,
        top1_accuracy=num_correct / num_predicted,
    )


def greedy_tokens(model: LlamaForCausalLM, tokens: Tensor, num_positions: int) -> list[int]:
    """Return the argmax continuation at the last ``num_positions`` positions."""
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, -num_positions:]
    return logits.argmax(-1).tolist()


@torch.inference_mode()
def accepted_per_step(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, prompt: Tensor
) -> list[int]:
    """Return the number of accepted draft tokens of every verify step."""
    tokens = prompt
    num_total = prompt.numel() + NUM_NEW_TOKENS
    accepted_counts: list[int] = []
    while tokens.numel() < num_total:
        drafted = tokens
        for _ in range(NUM_DRAFT_TOKENS):
            next_id = greedy_tokens(draft, drafted, 1)
            drafted = torch.cat([drafted, torch.tensor(next_id)])
        choices = greedy_tokens(target, drafted, NUM_DRAFT_TOKENS + 1)
        proposals = drafted[-NUM_DRAFT_TOKENS:].tolist()
        num_accepted = 0
        while num_accepted < NUM_DRAFT_TOKENS and proposals[num_accepted] == choices[num_accepted]:
            num_accepted += 1
        accepted_counts.append(num_accepted)
        tokens = torch.cat([tokens, torch.tensor(choices[: num_accepted + 1])])
    return accepted_counts


def measure_acceptance(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, prompt_ids: list[list[int]]
) -> Acceptance:
    """Decode a continuation of every prompt and average over all verify steps."""
    per_prompt = [
        accepted_per_step(target, draft, torch.tensor(ids))
        for ids in track(prompt_ids, description="acceptance")
    ]
    all_steps = [count for counts in per_prompt for count in counts]
    prompt_means = [sum(counts) / len(counts) for counts in per_prompt]
    return Acceptance(
        mean_accepted_tokens=sum(all_steps) / len(all_steps),
        num_draft_tokens=NUM_DRAFT_TOKENS,
        num_verify_steps=len(all_steps),
        min_prompt_mean=min(prompt_means),
        max_prompt_mean=max(prompt_means),
    )


def evaluate() -> None:
    """Measure both published checkpoints and write ``evaluation.json``."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET_DIR, trust_remote_code=False)
    target, draft = (
        AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False
        ).eval()
        for folder in (TARGET_DIR, DRAFT_DIR)
    )
    files = heldout_files(collect_files())
    tokens = encode_files(files, tokenizer)
    num_bytes = sum(file.num_bytes for file in files)
    results: dict[str, object] = {
        "num_heldout_bytes": num_bytes,
        "num_heldout_tokens": tokens.numel(),
    }
    for name, model in (("target", target), ("draft", draft)):
        results[name] = {
            "num_parameters": model.num_parameters(),
            **asdict(heldout_loss(model, tokens, num_bytes)),
        }
    prompts = [tokenizer.encode(text) for text in load_prompts()]
    results["acceptance"] = asdict(measure_acceptance(target, draft, prompts))
    EVALUATION_PATH.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    logger.info("%s", json.dumps(results, indent=2))
