"""A rank reads its shard and no more; what is wrong with a folder is said in one sentence."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Llama4Config, Llama4ForConditionalGeneration

from outrider.errors import CheckpointError, ConfigError
from outrider.workers.collective import Collective
from outrider.workers.model.checkpoint.progress import Progress
from outrider.workers.model.checkpoint.weights import Joined, Stacked, Whole
from outrider.workers.model.info import describe
from outrider.workers.model.target import load_model

from ..conftest import BASE, VARIANTS

CPU = torch.device("cpu")


def load(path, dtype=None):
    return load_model(path, dtype=dtype, device=CPU, collective=Collective.single())


@pytest.mark.parametrize("name", ["llama", "mixtral", "phi3", "tied", "llama4"])
def test_each_rank_reads_only_its_shard(checkpoint, run_ranks, elements_read, name):
    path, oracle = checkpoint(name)
    total = sum(parameter.numel() for parameter in oracle.parameters())
    norms = sum(
        p.numel()
        for key, p in oracle.named_parameters()
        if any(part in key for part in ("norm", "gate.w", "router"))
    )
    small = norms + sum(p.numel() for key, p in oracle.named_parameters() if key.endswith("bias"))

    def work(collective):
        progress = Progress()
        model = load_model(path, device=CPU, collective=collective, progress=progress)
        held = sum(parameter.numel() for parameter in model.module.parameters())
        return held, progress.amount

    held, amounts = zip(*run_ranks(2, work), strict=True)
    counted = sum(amount.num_bytes for amount in amounts)
    assert counted == 4 * sum(elements_read.values())
    assert counted == sum(amount.total_bytes for amount in amounts)
    for reads, elements in zip(elements_read.values(), held):
        # Half of everything that is split, all of what is small; the vocabulary is padded by one.
        assert reads <= (total - small) // 2 + small + 2 * 32
        assert elements <= (total - small) // 2 + small + 2 * 32
    assert sum(elements_read.values()) >= total


def test_sharded_and_single_file_checkpoints_agree(checkpoint):
    one, _ = checkpoint("llama")
    single = load(one).module.state_dict()
    shutil.rmtree(one)
    many, _ = checkpoint("llama", max_shard_size="20KB")
    assert len(list(many.glob("*.safetensors"))) > 2
    for name, tensor in load(many).module.state_dict().items():
        assert torch.equal(tensor, single[name]), name


def test_dtype_is_the_checkpoint_s_unless_asked_for(checkpoint):
    path, oracle = checkpoint("llama")
    assert load(path).info.dtype == torch.float32
    model = load(path, torch.bfloat16)
    assert model.info.dtype == torch.bfloat16
    assert all(p.dtype == torch.bfloat16 for p in model.module.parameters())
    assert model.kv_bytes_per_token() == 2 * 2 * 2 * 8 * 2  # layers, K and V, heads, dim, bytes
    assert model.new_cache(3, 4).num_bytes == 12 * model.kv_bytes_per_token()
    oracle.to(torch.bfloat16).save_pretrained(path)
    assert load(path).info.dtype == torch.bfloat16


def test_rotary_frequencies_are_not_left_empty(checkpoint):
    path, oracle = checkpoint("llama")
    mine = load(path).module.model.rotary_emb.inv_freq
    assert torch.equal(mine, oracle.model.rotary_emb.inv_freq)


def test_tied_output_shares_the_embedding(checkpoint):
    path, _ = checkpoint("tied")
    module = load(path).module
    assert module.lm_head.weight is module.model.embed_tokens.weight


def test_describe_needs_no_weights(checkpoint):
    path, _ = checkpoint("llama", eos_token_id=[2, 7])
    info = describe(path, tensor_parallel_size=4)
    assert (info.num_layers, info.num_heads, info.num_kv_heads, info.head_dim) == (2, 1, 1, 8)
    assert (info.vocab_size, info.max_model_len, info.eos_token_ids) == (101, 128, (2, 7))
    assert load(path).info == describe(path)


@pytest.mark.parametrize(
    ("name", "size", "says"),
    [
        ("llama", 8, "num_attention_heads=4"),
        ("llama", 3, "num_attention_heads=4"),
        ("mixtral", 4, "intermediate_size=42"),
    ],
)
def test_what_does_not_divide_is_named(checkpoint, name, size, says):
    path, _ = checkpoint(name, **({"intermediate_size": 42} if "42" in says else {}))
    with pytest.raises(ConfigError, match=says) as caught:
        describe(path, tensor_parallel_size=size)
    assert caught.value.field == "tensor_parallel_size"


def test_key_heads_that_do_not_divide_are_named(checkpoint):
    path, _ = checkpoint("llama", hidden_size=48, num_attention_heads=12, num_key_value_heads=3)
    with pytest.raises(ConfigError, match="num_key_value_heads=3"):
        describe(path, tensor_parallel_size=2)


def test_wrong_paths(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        describe(tmp_path / "nowhere")
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(CheckpointError, match="is a file"):
        describe(file)
    with pytest.raises(CheckpointError, match=re.escape("no config.json")):
        describe(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="transformers knows"):
        describe(tmp_path)


def test_no_safetensors(checkpoint):
    path, oracle = checkpoint("llama")
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no"):
        describe(path)
    torch.save(oracle.state_dict(), path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="convert them to safetensors"):
        describe(path)


def test_a_quantised_checkpoint_is_refused(checkpoint):
    path, _ = checkpoint("llama")
    settings = json.loads((path / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "aqlm"}
    (path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(
        CheckpointError, match="quantised.*quantization_config.quant_method is 'aqlm'"
    ):
        describe(path)


def test_the_text_model_of_a_model_for_images_is_served(tmp_path, part, build_step):
    torch.manual_seed(0)
    vision = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vision_output_dim": 16,
        "projector_input_dim": 16,
        "projector_output_dim": 16,
        "image_size": 28,
    }
    settings = {**BASE, **VARIANTS["llama4"]}
    whole = Llama4ForConditionalGeneration(
        Llama4Config(text_config=settings, vision_config=vision)
    ).eval()
    whole.save_pretrained(tmp_path)
    model = load(tmp_path)
    text = list(range(3, 14))
    step = build_step([part(text, 0, [2, 0, 3])], 4)
    with torch.inference_mode():
        wanted = whole(torch.tensor([text])).logits[0, -1:]
    torch.testing.assert_close(model.forward(step, model.new_cache(4, 4)), wanted)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "compressed-tensors"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match="quantised.*quantization_config.format"):
        describe(tmp_path)


def test_models_that_cannot_be_served_are_refused(checkpoint):
    path, _ = checkpoint("llama")
    (path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(CheckpointError, match="mamba"):
        describe(path)


def rewrite(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("model.norm.weight"), "missing model.norm.weight, surplus none"),
        (lambda t: t.update(stray=torch.ones(1)), "missing none, surplus stray"),
        (
            lambda t: t.update({"lm_head.weight": torch.ones(100, 32)}),
            r"'lm_head.weight' .* shape \[100, 32\], .* wants \[101, 32\]",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(checkpoint, change, says):
    path, _ = checkpoint("llama")
    rewrite(path, change)
    with pytest.raises(CheckpointError, match=says):
        load(path)


def test_a_truncated_file(checkpoint):
    path, _ = checkpoint("llama")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-500])
    with pytest.raises(CheckpointError, match="truncated"):
        load(path)


def test_a_missing_shard(checkpoint):
    path, _ = checkpoint("llama", max_shard_size="20KB")
    next(path.glob("*-of-*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match="not in the folder"):
        load(path)


def test_sources_read_only_the_box():
    parts = [Whole(torch.arange(6).view(2, 3) + 6 * index) for index in range(3)]
    stacked, joined = Stacked(parts), Joined(parts, 0)
    assert stacked.shape == (3, 2, 3)
    assert joined.shape == (6, 3)
    both = Joined([Stacked(parts), Stacked(parts)], 1)
    whole = torch.cat([torch.stack([part.tensor for part in parts])] * 2, dim=1)
    assert torch.equal(both.read(((1, 3), (1, 3), (0, 2))), whole[1:3, 1:3, :2])
    assert torch.equal(joined.read(((1, 5), (1, 2))), torch.arange(18).view(6, 3)[1:5, 1:2])
