"""A tiny target with a tokenizer of single characters, and text for it."""

from __future__ import annotations

from pathlib import Path

import pytest

ALPHABET = "abcdefghijklmnopqrstuvwxyz .,:<>\n"
EOS, BOS = 0, 1
VOCAB_SIZE = 40  # padded, as real checkpoints are
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role + ':' + m.content + '>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant:' }}{% endif %}"
)


def ids_of(text: str) -> list[int]:
    return [2 + ALPHABET.index(char) for char in text]


@pytest.fixture(scope="session")
def tokenizer():
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<eos>", "<bos>", *ALPHABET]
    words = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<bos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


@pytest.fixture(scope="session")
def target_path(tokenizer, tmp_path_factory) -> Path:
    """Random weights, large enough for its text not to repeat at once."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=BOS,
        eos_token_id=EOS,
        initializer_range=0.2,
    )
    path = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def target(target_path):
    """In float32."""
    import torch

    from outrider.training.protocol import FrozenTarget

    return FrozenTarget(target_path, torch.device("cpu"))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text("the cat sat on the mat, and the other cat sat too.\n" * 20)
    return path
