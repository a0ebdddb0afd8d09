"""Tests of the shipped demo checkpoints and of the held-out split."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.demo import corpus

MODELS_DIR = corpus.DEMO_DIR / "models"
MODEL_NAMES = ("target", "draft")
MAX_TOTAL_BYTES = 48_000_000
# A uniform guess over the vocabulary costs 8.3 nats; trained models are far below.
MAX_NATS_PER_TOKEN = {"target": 3.5, "draft": 5.0}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the hub out of these tests: everything they load is in the repository."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def read_prompts() -> list[dict[str, str]]:
    """Return the held-out prompts as stored."""
    lines = corpus.HELDOUT_PATH.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_checkpoint_loads_with_expected_shape(name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODELS_DIR / name, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert model.config.num_key_value_heads == 2
    assert model.config.num_attention_heads % 4 == 0
    assert model.config.vocab_size == 4096
    assert model.config.tie_word_embeddings
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


@pytest.mark.parametrize(
    "text",
    [
        "def add(a, b):\n    return a + b\n",
        "héllo 中文 😀 \u200b e\u0301",
        "\r\n\t mixed \x00 white\n\n\n        space   \n",
        "0123456789 == 1e-9",
        "".join(chr(code) for code in range(1, 0x250)),
        "",
    ],
)
def test_tokenizer_round_trips(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODELS_DIR / "target")
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_vocabularies_are_equal() -> None:
    target, draft = (AutoTokenizer.from_pretrained(MODELS_DIR / name) for name in MODEL_NAMES)
    assert target.get_vocab() == draft.get_vocab()
    assert len(target) == 4096
    for name in ("tokenizer.json", "tokenizer_config.json"):
        target_bytes = (MODELS_DIR / "target" / name).read_bytes()
        assert target_bytes == (MODELS_DIR / "draft" / name).read_bytes()
    assert (
        target.eos_token_id
        == AutoModelForCausalLM.from_pretrained(MODELS_DIR / "draft").config.eos_token_id
    )


def test_chat_template_ends_with_the_answer_line() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODELS_DIR / "target")
    messages = [{"role": "user", "content": "Write a function\nthat adds"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == f"{tokenizer.bos_token}# Write a function\n# that adds\n# Answer:\n"


def test_total_size_is_small() -> None:
    total_bytes = sum(path.stat().st_size for path in MODELS_DIR.rglob("*") if path.is_file())
    assert total_bytes < MAX_TOTAL_BYTES


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_loss_on_heldout_prompts_is_sane(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODELS_DIR / name)
    model = AutoModelForCausalLM.from_pretrained(MODELS_DIR / name, dtype=torch.float32).eval()
    losses = []
    with torch.inference_mode():
        for prompt in read_prompts()[:8]:
            tokens = torch.tensor(tokenizer.encode(prompt["text"]))
            logits = model(input_ids=tokens[None]).logits[0, :-1]
            losses.append(functional.cross_entropy(logits, tokens[1:]).item())
    assert sum(losses) / len(losses) < MAX_NATS_PER_TOKEN[name]


def test_heldout_prompts_are_held_out() -> None:
    stored = read_prompts()
    tokenizer = AutoTokenizer.from_pretrained(MODELS_DIR / "target")
    manifest = json.loads(corpus.MANIFEST_PATH.read_text(encoding="utf-8"))
    assert len(stored) == corpus.NUM_PROMPTS
    assert len({prompt["text"] for prompt in stored}) == len(stored)
    for prompt in stored:
        assert prompt["source"].startswith("stdlib:")
        assert corpus.is_held_out(prompt["source"])
        assert prompt["source"] in manifest["heldout_sources"]
        assert 80 <= len(tokenizer.encode(prompt["text"])) <= corpus.MAX_PROMPT_TOKENS


def test_hash_rule_keeps_packages_and_most_of_the_library_in_training() -> None:
    assert not corpus.is_held_out("numpy:__init__.py")
    library = [f"stdlib:module_{index}.py" for index in range(3200)]
    held_out = [source for source in library if corpus.is_held_out(source)]
    files = [corpus.SourceFile("stdlib", source, "x = 1\n") for source in library]
    assert 100 < len(held_out) < 300
    assert {file.source for file in corpus.heldout_files(files)} == set(held_out)
    trained_on = {file.source for file in corpus.training_files(files)}
    assert trained_on == set(library) - set(held_out)


def test_manifest_names_a_licence_for_every_package() -> None:
    manifest = json.loads(Path(corpus.MANIFEST_PATH).read_text(encoding="utf-8"))
    for entry in manifest["packages"]:
        assert entry["licence"]
        assert entry["num_training_bytes"] > 0
