"""The files of the demo models: their tokenizer, saved states and checkpoints.

Duty: learn the 4096-entry vocabulary that target and draft share, and read and write, atomically,
the saved state a run resumes from and the published bf16 checkpoint.
The algorithm is byte-level BPE (Sennrich et al., 2016; GPT-2's byte alphabet);
the split pattern keeps a line break and the indentation after it together, so
that one token usually opens a line of Python.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import (
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from .corpus import DEMO_DIR

WORK_DIR = DEMO_DIR / "work"
TARGET_DIR = DEMO_DIR / "models" / "target"
DRAFT_DIR = DEMO_DIR / "models" / "draft"

VOCAB_SIZE = 4096
MAX_POSITIONS = 2048
BOS_TOKEN = "<|bos|>"
EOS_TOKEN = "<|eos|>"
PAD_TOKEN = "<|pad|>"
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
SPLIT_PATTERN = (
    r"[ _.]?\p{L}+"
    r"|\p{N}{1,3}"
    r"|(?:[ \t]*\r?\n)+[ \t]*"
    r"| ?[^\s\p{L}\p{N}]+"
    r"|\s+(?!\S)"
    r"|\s+"
)
# The conversation becomes comments; the answers stay code.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['content'] is string -%}
{%- set text = message['content'] -%}
{%- else -%}
{%- set text = message['content'] | map(attribute='text') | join('\\n') -%}
{%- endif -%}
{%- if message['role'] == 'assistant' -%}
{{- '# Answer:\\n' + text | trim + '\\n\\n' -}}
{%- else -%}
{%- for line in (text | trim).split('\\n') -%}
{{- '# ' + line + '\\n' -}}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '# Answer:\\n' -}}
{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Learn the vocabulary from ``texts`` and return the finished tokenizer."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS_TOKEN, EOS_TOKEN, PAD_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS_TOKEN,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the tokenizer files, with the chat template inside the configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    # The class name that older and newer releases of transformers both know.
    config_path = folder / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    for key in ("is_local", "local_files_only"):
        config.pop(key, None)
    config_path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def save_state(
    path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], next_step: int
) -> None:
    """Write what a resumed run needs, atomically."""
    partial_path = path.with_suffix(".partial")
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "next_step": next_step,
    }
    torch.save(state, partial_path)
    os.replace(partial_path, path)


def load_state(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> int:
    """Restore a saved run and return the step to go on from; 0 where there is none."""
    if not path.exists():
        return 0
    state = torch.load(path)
    model.load_state_dict(state["model"])
    for optimizer, optimizer_state in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(optimizer_state)
    return int(state["next_step"])


def publish(model: LlamaForCausalLM, folder: Path) -> None:
    """Replace the checkpoint in ``folder`` by ``model`` in bf16, atomically."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    scratch.chmod(0o755)
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = model.generation_config
    copy.bfloat16().save_pretrained(scratch / "new")
    (scratch / "new" / "model.safetensors").chmod(0o644)
    save_tokenizer(tokenizer, scratch / "new")
    folder.rename(scratch / "old")
    (scratch / "new").rename(folder)
    shutil.rmtree(scratch)
