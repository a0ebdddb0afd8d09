"""Trains the target model, a 10M-parameter Llama, on the Python corpus.

Duty: next-token training from scratch, resumable, publishing the checkpoint in
``models/target`` at intervals and at the end.
"""

import logging
import time

import torch
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from . import checkpoints, training
from .checkpoints import BOS_ID, EOS_ID, MAX_POSITIONS, PAD_ID, VOCAB_SIZE

logger = logging.getLogger(__name__)

SEED = 0
STEP_TOKENS = 4096
MICRO_BATCH_TOKENS = 1024
# Short windows first: attention over long ones is what costs most on a CPU.
FIRST_WINDOW_TOKENS = 128
MIDDLE_WINDOW_TOKENS = 256
LAST_WINDOW_TOKENS = 512
NUM_FIRST_STEPS = 360
LAST_FRACTION = 0.08
NUM_STEPS = 750
NUM_STEPS_PER_SAVE = 50
NUM_STEPS_PER_LOG = 20
STATE_PATH = checkpoints.WORK_DIR / "target.pt"


def llama_config(
    hidden_size: int, num_layers: int, num_heads: int, intermediate_size: int
) -> LlamaConfig:
    """Return the configuration of a demo model; both models have two KV heads."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=2,
        head_dim=hidden_size // num_heads,
        intermediate_size=intermediate_size,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )


def build_model(config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    """Return a freshly initialised model with its generation defaults."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID
    )
    return model


def window_tokens(step: int, num_steps: int) -> int:
    """Return the window length at ``step``."""
    if step >= round((1.0 - LAST_FRACTION) * num_steps):
        return LAST_WINDOW_TOKENS
    return FIRST_WINDOW_TOKENS if step < NUM_FIRST_STEPS else MIDDLE_WINDOW_TOKENS


def next_token_loss(model: LlamaForCausalLM, batch: Tensor) -> Tensor:
    """Return the mean cross-entropy of ``batch`` in nats per token."""
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        logits = model(input_ids=batch, use_cache=False).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())


def train_target(num_steps: int = NUM_STEPS) -> None:
    """Train the target for ``num_steps`` steps, going on from a saved state."""
    source = training.BatchSource(training.load_streams(), SEED)
    config = training.OptimizerConfig(num_steps=num_steps)
    model = build_model(llama_config(320, 8, 8, 864), SEED)
    # Faster than the fused kernel on a CPU at these lengths; not saved with the model.
    model.set_attn_implementation("eager")
    optimizers = training.build_optimizers(model, config)
    first_step = checkpoints.load_state(STATE_PATH, model, optimizers)
    model.train()
    started_s = time.monotonic()
    with training.worker_pool() as pool, training.training_progress() as progress:
        task = progress.add_task("target", total=num_steps, completed=first_step, status="")
        for step in range(first_step, num_steps):
            num_tokens = window_tokens(step, num_steps)
            batch = source.batch(step, STEP_TOKENS // num_tokens, num_tokens)
            pieces = batch.split(MICRO_BATCH_TOKENS // num_tokens)
            loss = training.accumulate_gradients(
                pool, model, pieces, lambda piece: next_token_loss(model, piece)
            )
            training.apply_step(pool, model, optimizers, step, config)
            progress.update(task, advance=1, status=f"loss {loss:.3f}")
            if (step + 1) % NUM_STEPS_PER_LOG == 0:
                num_done = (step + 1 - first_step) * STEP_TOKENS
                rate = num_done / (time.monotonic() - started_s)
                logger.info("step %d: loss %.3f, %.0f tokens/s", step + 1, loss, rate)
            if (step + 1) % NUM_STEPS_PER_SAVE == 0:
                checkpoints.save_state(STATE_PATH, model, optimizers, step + 1)
                checkpoints.publish(model, checkpoints.TARGET_DIR)
    checkpoints.publish(model, checkpoints.TARGET_DIR)
