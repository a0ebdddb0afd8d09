"""Distils the draft model, a two-layer Llama, from the trained target.

Duty: let the target continue training windows (its own text is what the draft
meets in speculative decoding), then train the draft to match the target's
distributions there and on the corpus.

Sources: knowledge distillation (Hinton et al., 2015) with forward KL, on target
continuations as in DistillSpec (Zhou et al., 2024), plus cross-entropy with the
target's most likely token, since greedy acceptance asks for that token alone.
"""

import logging
import time

import torch
from rich.progress import track
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from . import checkpoints, training
from .train_target import build_model, llama_config

logger = logging.getLogger(__name__)

CORPUS_SEED = 100
PROMPT_SEED = 200
WINDOW_TOKENS = 256
PROMPT_TOKENS = 96
NUM_CONTINUATIONS = 1024
GENERATION_BATCH = 64
NUM_CORPUS_WINDOWS = 8
NUM_CONTINUATION_WINDOWS = 8
MICRO_BATCH_WINDOWS = 4
ARGMAX_WEIGHT = 0.5
NUM_STEPS = 600
NUM_STEPS_PER_SAVE = 100
NUM_STEPS_PER_LOG = 20
CONTINUATIONS_PATH = checkpoints.WORK_DIR / "continuations.pt"
STATE_PATH = checkpoints.WORK_DIR / "draft.pt"


@torch.inference_mode()
def continue_greedily(target: LlamaForCausalLM, prompts: Tensor) -> Tensor:
    """Return ``prompts`` with the target's continuation up to the window length.

    There is no end token: after one the target opens another file, as in training.
    """
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = target(input_ids=prompts, use_cache=True)
        parts = [prompts, output.logits[:, -1:].argmax(-1)]
        for _ in range(WINDOW_TOKENS - prompts.shape[1] - 1):
            output = target(
                input_ids=parts[-1], past_key_values=output.past_key_values, use_cache=True
            )
            parts.append(output.logits[:, -1:].argmax(-1))
    return torch.cat(parts, dim=1)


def load_continuations(target: LlamaForCausalLM, streams: training.TokenStreams) -> Tensor:
    """Return the target's greedy continuations of training windows, generated once."""
    if CONTINUATIONS_PATH.exists():
        return torch.load(CONTINUATIONS_PATH)
    source = training.BatchSource(streams, PROMPT_SEED)
    num_batches = NUM_CONTINUATIONS // GENERATION_BATCH
    prompts = [source.batch(index, GENERATION_BATCH, PROMPT_TOKENS) for index in range(num_batches)]
    with training.worker_pool() as pool:
        parts = pool.map(lambda batch: continue_greedily(target, batch), prompts)
        tracked = track(parts, description="continuations", total=num_batches)
        continuations = torch.cat(list(tracked))
    torch.save(continuations, CONTINUATIONS_PATH)
    return continuations


def distillation_loss(target: LlamaForCausalLM, draft: LlamaForCausalLM, batch: Tensor) -> Tensor:
    """Return KL(target || draft) plus the weighted loss on the target's argmax."""
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        with torch.no_grad():
            target_logits = target(input_ids=batch, use_cache=False).logits.flatten(0, 1)
        draft_logits = draft(input_ids=batch, use_cache=False).logits.flatten(0, 1)
    target_log_probs = functional.log_softmax(target_logits.float(), dim=-1)
    draft_log_probs = functional.log_softmax(draft_logits.float(), dim=-1)
    divergence = functional.kl_div(
        draft_log_probs, target_log_probs, reduction="batchmean", log_target=True
    )
    argmax_loss = functional.nll_loss(draft_log_probs, target_log_probs.argmax(-1))
    return divergence + ARGMAX_WEIGHT * argmax_loss


def draft_batch(
    step: int, corpus: training.BatchSource, continuations: training.WindowSampler
) -> Tensor:
    """Return the windows of one step: corpus text, then the target's own text."""
    first = step * NUM_CONTINUATION_WINDOWS
    own_text = [
        continuations.window(first + i, WINDOW_TOKENS) for i in range(NUM_CONTINUATION_WINDOWS)
    ]
    return torch.cat([corpus.batch(step, NUM_CORPUS_WINDOWS, WINDOW_TOKENS), torch.stack(own_text)])


def train_draft(num_steps: int = NUM_STEPS) -> None:
    """Distil the draft for ``num_steps`` steps, going on from a saved state."""
    streams = training.load_streams()
    target = AutoModelForCausalLM.from_pretrained(
        checkpoints.TARGET_DIR, dtype=torch.float32, trust_remote_code=False
    ).eval()
    own_text = load_continuations(target, streams)
    corpus = training.BatchSource(streams, CORPUS_SEED)
    continuations = training.WindowSampler(own_text.flatten(), CORPUS_SEED)
    target.set_attn_implementation("eager")
    config = training.OptimizerConfig(num_steps=num_steps)
    draft = build_model(llama_config(160, 2, 4, 512), CORPUS_SEED)
    draft.set_attn_implementation("eager")
    optimizers = training.build_optimizers(draft, config)
    first_step = checkpoints.load_state(STATE_PATH, draft, optimizers)
    started_s = time.monotonic()
    with training.worker_pool() as pool, training.training_progress() as progress:
        task = progress.add_task("draft", total=num_steps, completed=first_step, status="")
        for step in range(first_step, num_steps):
            batch = draft_batch(step, corpus, continuations)
            loss = training.accumulate_gradients(
                pool,
                draft,
                batch.split(MICRO_BATCH_WINDOWS),
                lambda piece: distillation_loss(target, draft, piece),
            )
            training.apply_step(pool, draft, optimizers, step, config)
            progress.update(task, advance=1, status=f"loss {loss:.3f}")
            if (step + 1) % NUM_STEPS_PER_LOG == 0:
                rate = (step + 1 - first_step) * batch.numel() / (time.monotonic() - started_s)
                logger.info("step %d: loss %.3f, %.0f tokens/s", step + 1, loss, rate)
            if (step + 1) % NUM_STEPS_PER_SAVE == 0:
                checkpoints.save_state(STATE_PATH, draft, optimizers, step + 1)
                checkpoints.publish(draft, checkpoints.DRAFT_DIR)
    checkpoints.publish(draft, checkpoints.DRAFT_DIR)
